"""Rotations are orthogonal matrices that spread one large channel over all channels."""

import pytest
import torch

from intaglio.quant.rotation.orthogonal import Rotation, hadamard_factors

HADAMARD = {2: 2, 8: 8, 12: 12, 20: 20, 28: 28, 36: 36, 64: 64, 80: 20, 96: 12, 256: 64, 384: 12, 896: 28}
"""Size -> order of the first factor."""
OTHERS = (3, 17, 18, 92, 250)


@pytest.mark.parametrize("keeps_mean", [False, True])
@pytest.mark.parametrize("size", [*HADAMARD, *OTHERS])
def test_rows_stay_orthogonal_and_of_length_one(size, keeps_mean):
    found = Rotation(size, keeps_mean)(torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(found @ found.t(), torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [8, 12, 96, 17])
def test_a_layer_norm_of_rotated_rows_is_the_rotated_layer_norm(size):
    rotation, x = Rotation(size, keeps_mean=True), torch.randn(4, size, dtype=torch.float64)
    norm = torch.nn.functional.layer_norm
    torch.testing.assert_close(norm(rotation(x), (size,)), rotation(norm(x, (size,))), rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", HADAMARD)
def test_a_single_channel_is_spread_evenly(size):
    found = Rotation(size)(torch.eye(size, dtype=torch.float64)[:1])
    torch.testing.assert_close(found.abs(), torch.full_like(found, size**-0.5))


@pytest.mark.parametrize("size", [12, 384, 17])
def test_a_rotation_is_known_by_its_size(size):
    x = torch.randn(3, size, dtype=torch.float64)
    assert torch.equal(Rotation(size)(x), Rotation(size)(x))


def test_sizes_are_products_of_small_hadamard_matrices():
    assert {size: len((hadamard_factors(size) or [[0]])[0]) for size in HADAMARD} == HADAMARD
    assert not any(map(hadamard_factors, OTHERS))
