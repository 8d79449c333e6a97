"""Bits in which files store imported weights."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from intaglio.ir import Packing
from intaglio.lower.stored_weights import fewest_bits
from intaglio.runtime.saved.bit_packing import pack, unpack


@given(
    arrays.arrays(np.int8, st.tuples(st.integers(1, 4), st.integers(1, 70)), elements=st.integers(-128, 127)),
    st.integers(1, 80),
    st.integers(0, 6),
    st.booleans(),
)
def test_every_weight_fits_the_packing_that_is_chosen_for_it(values, group, shift, of_groups):
    values = values >> shift  # fewer bits
    if of_groups:
        values = values + np.random.default_rng(0).integers(-1 << shift, (1 << shift) + 1, (len(values), 1))
        values = np.clip(values, -128, 127).astype(np.int8)
    packing = fewest_bits(values, group)
    if packing is None:
        assert int(values.max()) - min(int(values.min()), 0) > 127
        return
    packed = pack(values, packing)
    assert packed is not None
    np.testing.assert_array_equal(unpack(*packed, packing, values.shape), values)


def test_weights_of_four_bits_have_four():
    signed = np.arange(-8, 8, dtype=np.int8)[None].repeat(4, 0)
    assert fewest_bits(signed, 16) == Packing(4, -8)
    assert fewest_bits(signed + np.int8(8), 16) == Packing(4, 0)


def test_groups_with_different_zero_points_have_smallest_values_of_their_own():
    values = np.random.default_rng(0).integers(0, 16, (8, 256)) - np.repeat(np.arange(16), 128).reshape(
        8, 2, 128
    ).reshape(8, 256)
    assert fewest_bits(values.astype(np.int8), 128) == Packing(4, 0, lows=128)
    assert fewest_bits(values.astype(np.int8), 2).lows == 0  # they would take more bytes than they save


def test_eight_bits_are_stored_as_they_are():
    assert fewest_bits(np.array([[-128, 127]], np.int8), 2) is None
