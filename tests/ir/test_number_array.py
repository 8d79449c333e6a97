"""`NumberArray` equals the tuple of its numbers."""

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from intaglio.ir import NumberArray, QParams


@given(st.lists(st.floats(allow_nan=False, width=32), max_size=9))
def test_an_array_of_numbers_equals_their_tuple(values):
    array, expected = NumberArray(np.array(values)), tuple(values)
    assert (array, len(array), hash(array), repr(array)) == (expected, len(expected), hash(expected), repr(expected))
    assert expected == array == NumberArray(np.array(values))
    assert array[2:5] == expected[2:5]
    assert [array[i] for i in range(len(array))] == list(array) == values
    assert np.array_equal(np.array(array, np.float32), np.array(values, np.float32))
    assert array != (*expected, 1.0)
    assert pickle.loads(pickle.dumps(array)) == expected


def test_equal_zero_points_of_an_array_take_the_memory_of_one():
    zeros = NumberArray(np.broadcast_to(np.int64(3), 1000))
    assert zeros == (3,) * 1000
    assert QParams((1.0,) * 1000, zeros, 0, 255, 0).zeros == (3,) * 1000
    assert all(type(value) is int for value in (zeros[0], *zeros))
