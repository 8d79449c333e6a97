"""Operands of dynamic layers as bytes: blocks of rows give the bits of PyTorch's operators on whole tensors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intaglio import numerics
from intaglio.ir import QParams
from intaglio.quant.correct.operand_columns import as_bytes, largest_magnitude
from intaglio.quant.qdq import row_blocks

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3)


def operand(shape: list[int], seed: int, special: bool) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=make) * 2.0 ** torch.randint(-3, 4, shape, generator=make)
    values = torch.where(torch.rand(shape, generator=make) < 0.3, (values * 8).round() / 8 + 1 / 16, values)
    if special:
        values.view(-1)[0] = [torch.nan, torch.inf, -torch.inf][seed % 3]
    return values


@given(SHAPES, st.integers(0, 2**31), st.booleans(), st.integers(1, 30), st.sampled_from([0.125, 0.0371, 3.1]))
def test_bytes_are_those_of_the_formula_on_the_whole_tensor(shape, seed, special, block, step):
    values, q = operand(shape, seed, special), QParams((float(np.float32(step)),), (128,), 1, 255)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_blocks, "BLOCK", block)
        found = as_bytes(values, q)
    steps = torch.nan_to_num(values, 0.0, 0.0, 0.0) / q.step
    expected = torch.atleast_2d(numerics.round_clamp(steps, q.qmin, q.qmax, q.zero).to(torch.uint8))
    assert torch.equal(found, expected)


@given(SHAPES, st.integers(0, 2**31), st.booleans())
def test_the_largest_magnitude_is_that_of_finite_values(shape, seed, special):
    values = operand(shape, seed, special)
    assert largest_magnitude(values) == float(torch.nan_to_num(values, 0.0, 0.0, 0.0).abs().max())


def test_without_values_the_largest_magnitude_is_zero():
    assert largest_magnitude(torch.zeros(0, 4)) == 0.0
