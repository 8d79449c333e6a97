"""Squared errors of weights with a scale for each row: the kernel gives the bits of the reference implementation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intaglio import numerics
from intaglio.native import native_library
from intaglio.native.scale_errors import LONGEST_ROW, scale_errors


@given(
    channels=st.integers(0, 5),
    groups=st.integers(1, 9),
    size=st.integers(1, LONGEST_ROW) | st.sampled_from([16, 32, 64, 128]),
    bounds=st.sampled_from([(-8, 7), (-4, 3), (-2, 1), (-127, 127)]),
    spread=st.integers(0, 30),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_the_kernel_gives_the_bits_of_numpy(runtime_library, channels, groups, size, bounds, spread, threads, seed):
    make = np.random.default_rng(seed)
    shape = channels, groups, size
    rows = make.standard_normal(shape).astype(np.float32) * np.exp2(make.uniform(-spread, spread, shape))
    rows = rows.astype(np.float32)
    rows[make.random(shape) < 0.05] = 0.0
    rows[make.random(shape) < 0.01] = make.choice([np.nan, np.inf, -np.inf, -0.0, 1e38, 1e-42])
    steps = np.exp2(make.uniform(-spread - 4, spread, shape[:2])).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "runtime_if_built", lambda: runtime_library)
        found = scale_errors(rows, steps, *bounds, threads)
    np.testing.assert_array_equal(found, numerics.squared_errors(rows, steps, *bounds))


def test_values_halfway_between_two_quantized_values_are_rounded_to_even(runtime_library):
    rows = np.array([[-8.5, -7.5, -2.5, -0.5, 0.5, 1.5, 2.5, 6.5, 7.5]], np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "runtime_if_built", lambda: runtime_library)
        found = scale_errors(rows * 0.25, np.array([0.25], np.float32), -8, 7)
    np.testing.assert_array_equal(found, [9 * 0.125**2])


@pytest.mark.parametrize(("size", "qmax"), [(LONGEST_ROW + 1, 7), (32, 1 << 22)])
def test_rows_and_values_that_the_kernel_does_not_take_are_left_to_numpy(size, qmax):
    assert scale_errors(np.ones((1, size), np.float32), np.ones(1, np.float32), -8, qmax) is None


def test_without_a_compiler_the_result_is_left_to_numpy(monkeypatch):
    monkeypatch.setattr(native_library, "runtime_if_built", lambda: None)
    assert scale_errors(np.ones((1, 32), np.float32), np.ones(1, np.float32), -8, 7) is None
