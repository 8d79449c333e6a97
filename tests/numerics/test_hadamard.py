"""Products with Hadamard matrices: those of the matrix, their own inverse, and NaN only in its own block."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intaglio import numerics


def matrix(size):
    found = np.ones((1, 1))
    while len(found) < size:
        found = np.block([[found, found], [found, -found]])
    return found / np.sqrt(size)


@given(st.integers(1, 8), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_blocks_are_multiplied_by_the_matrix(power, blocks, seed):
    size = 2**power
    x = np.random.RandomState(seed).standard_normal((2, 3, blocks * size)).astype(np.float32)
    found = numerics.hadamard(x, size)
    expected = (x.astype(np.float64).reshape(2, 3, blocks, size) @ matrix(size)).reshape(x.shape)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(numerics.hadamard(found, size), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_stay_in_their_block(value):
    x = np.ones((1, 8), np.float32)
    x[0, 1] = value
    found = numerics.hadamard(x, 4)
    assert not np.isfinite(found[0, :4]).any()
    assert np.array_equal(found[0, 4:], [2, 0, 0, 0])


def test_values_are_added_in_float32_pair_by_pair():
    large = np.float32(2**24)
    assert np.array_equal(numerics.hadamard(np.array([large, 1, -large, 0], np.float32), 4)[:1], [0.0])
