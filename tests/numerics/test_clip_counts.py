"""Counts of clipped values: no value of a range is outside of it, and values a little beyond are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intaglio import numerics

FINITE = st.floats(-(2.0**100), 2.0**100, width=32)
BOUNDS = st.sampled_from([(0, 255), (-128, 127), (0, 127), (0, 15), (0, 65535)])


ENDS = st.one_of(st.tuples(FINITE, FINITE), st.floats(0.0078125, 10, width=32).map(lambda end: (-end, end)))
"""Ranges, many of them symmetric: their ends are half a step beyond the outermost quantized values."""


@given(ENDS, BOUNDS, st.lists(st.floats(0, 1), max_size=5))
def test_no_value_of_a_range_is_outside(ends, bounds, shares):
    low, high = sorted(np.float32(ends))
    low, high = min(low, np.float32(0)), max(high, np.float32(0))
    qparams = numerics.affine_qparams(low, high, *bounds)
    inner = [np.float32(low + (high - low) * share) for share in np.float32(shares)]
    values = np.clip(np.array([low, high, *inner], np.float32), low, high)
    assert numerics.count_clipped(values, *qparams, *bounds) == 0


@given(ENDS, BOUNDS)
def test_a_value_more_than_a_step_beyond_a_range_is_outside(ends, bounds):
    low, high = min(*ends, 0.0), max(*ends, 2.0**-20)
    scale, zero_point = numerics.affine_qparams(low, high, *bounds)
    assert numerics.count_clipped([high + 1.1 * scale], scale, zero_point, *bounds) == 1


@pytest.mark.parametrize("end", [0.27, 0.035, 5.41])
def test_a_range_whose_end_is_half_a_step_beyond_the_last_value_holds_its_end(end):
    scale, zero_point = numerics.affine_qparams(-end, end, 0, 255)
    x = np.float32([-end, end, 1.01 * end, -1.01 * end])
    assert [numerics.count_clipped(value, scale, zero_point, 0, 255) for value in x] == [0, 0, 1, 1]
