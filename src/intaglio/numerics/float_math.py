"""Reference arithmetic of tensors that stay float32 between integers; the C++ of it is native/elementwise/loops.h.

Inputs have any size, NaN and infinities included: IEEE float32 in the written order, no fused multiply-add. bfloat16 is
float32 whose low 16 bits are zero.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from intaglio import numerics
from intaglio.numerics import LANES, LN2_HIGH, LN2_LOW, FloatArray

LARGEST_EXPONENT = np.float32(89)
"""exp of it is beyond float32."""
LOG_TERMS = tuple(np.float32(2 / n) for n in (9, 7, 5, 3))
"""Of s^9 ... s^3 in ``log((1 + s) / (1 - s)) = 2 s + 2/3 s^3 + ...``; |s| <= 0.172."""
SQRT_HALF_BITS = 0x3F3504F3
"""Of the float32 nearest to sqrt(1/2)."""
SMALLEST_NORMAL = np.float32(2.0**-126)

Function = Callable[[FloatArray], FloatArray]


def exp(x: ArrayLike) -> FloatArray:
    """Return e to the power of x, f32, within 1.2e-7 relative to it; 0 below -87, `numerics.exp_negative` up to 0."""
    x = np.asarray(x, np.float32)
    bounded = np.where(x > numerics.LOWEST_EXPONENT, x, numerics.LOWEST_EXPONENT)
    bounded = np.where(bounded < LARGEST_EXPONENT, bounded, LARGEST_EXPONENT)
    n: FloatArray = np.rint(bounded * numerics.LOG2_E)
    rise = _exp_rise(bounded, n)
    whole = n.astype(np.int32)
    power = ((np.minimum(whole, 127) + 127) << 23).view(np.float32)
    twice = np.where(whole > 127, np.float32(2), np.float32(1))
    with np.errstate(over="ignore"):
        found = ((rise + np.float32(1)) * power) * twice
    found = np.where(x < numerics.LOWEST_EXPONENT, np.float32(0), found)
    return np.where(np.isnan(x), x, found)


def _exp_rise(x: FloatArray, n: FloatArray) -> FloatArray:
    """exp(x - n ln 2) - 1, in the order of `numerics.exp_negative`."""
    r: FloatArray = (x - n * LN2_HIGH) - n * LN2_LOW
    total = np.full_like(r, numerics.EXP_TERMS[0])
    for term in numerics.EXP_TERMS[1:]:
        total = total * r + term
    return total * (r * r) + r


def log(x: ArrayLike) -> FloatArray:
    """Return the natural logarithm, f32, within 1.2e-7 relative to it or to 1; -inf of 0, NaN below."""
    x = np.asarray(x, np.float32)
    small = x < SMALLEST_NORMAL
    with np.errstate(all="ignore"):
        scaled = np.where(small, x * np.float32(2.0**23), x)
        bits = scaled.view(np.int32)
        n = (bits - SQRT_HALF_BITS) >> 23
        mantissa = (bits - (n << 23)).view(np.float32)
        rise = mantissa - np.float32(1)
        s = rise / (np.float32(2) + rise)
        square = s * s
        total = np.full_like(s, LOG_TERMS[0])
        for term in LOG_TERMS[1:]:
            total = total * square + term
        exponent = (n - np.where(small, 23, 0)).astype(np.float32)
        found = ((total * (square * s) + exponent * LN2_LOW) + (s + s)) + exponent * LN2_HIGH
    found = np.where(x == 0, np.float32(-np.inf), found)
    found = np.where(x == np.inf, x, found)
    return np.where((x >= 0) | np.isnan(x), np.where(np.isnan(x), x, found), np.float32(np.nan))


def of_numbers(function: Function) -> Function:
    """The function, and NaN of NaN."""

    def wide(x: FloatArray) -> FloatArray:
        unknown = np.isnan(x)
        return np.where(unknown, x, function(np.where(unknown, np.float32(0), x)))

    return wide


def maximum(a: FloatArray, b: FloatArray) -> FloatArray:
    """The larger; NaN if either is."""
    return np.where((a > b) | np.isnan(a), a, b)


def minimum(a: FloatArray, b: FloatArray) -> FloatArray:
    """The smaller; NaN if either is."""
    return np.where((a < b) | np.isnan(a), a, b)


def in_lanes(x: FloatArray, start: float, join: Callable[[FloatArray, FloatArray], FloatArray]) -> FloatArray:
    """f32[..., C] -> f32[..., 1]: element i joins lane ``i % 16``, in order; then lanes, the upper half to the lower,
    until there is one.
    """
    lanes: FloatArray = np.full((*x.shape[:-1], LANES), start, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, x.shape[-1], LANES):
            part = x[..., first : first + LANES]
            width = part.shape[-1]
            lanes[..., :width] = join(lanes[..., :width], part)
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = join(lanes[..., :half], lanes[..., half:])
    return lanes


def total(x: FloatArray) -> FloatArray:
    """f32[..., C] -> f32[..., 1]: the sum."""
    return in_lanes(x, 0.0, np.add)


def mean(x: FloatArray) -> FloatArray:
    """f32[..., C] -> f32[..., 1]: the sum over ``float32(C)``."""
    with np.errstate(invalid="ignore", divide="ignore"):
        result: FloatArray = total(x) / np.float32(x.shape[-1])
    return result


def greatest(x: FloatArray) -> FloatArray:
    """f32[..., C] -> f32[..., 1]: -inf of none."""
    return in_lanes(x, -np.inf, lambda lanes, part: maximum(part, lanes))


def least(x: FloatArray) -> FloatArray:
    """f32[..., C] -> f32[..., 1]: inf of none."""
    return in_lanes(x, np.inf, lambda lanes, part: minimum(part, lanes))


def to_bfloat16(x: ArrayLike) -> FloatArray:
    """f32 -> the nearest that bfloat16 holds, ties to even; NaN stays NaN."""
    x = np.asarray(x, np.float32)
    bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), np.float32(np.nan), rounded.view(np.float32))


def rows_of(table: NDArray[np.float32], ids: NDArray[np.int64]) -> FloatArray:
    """f32[V, D], i64[..., 1] -> f32[..., D]. IndexError, as PyTorch's, for an id the table does not have."""
    return table[_known(ids, len(table))[..., 0]]


def rows_of_levels(
    levels: NDArray[np.uint8], ids: NDArray[np.int64], scales: FloatArray, zeros: FloatArray
) -> FloatArray:
    """u8[V, D], i64[..., 1], scales and zero points f32[V] -> f32[..., D]; ids as of `rows_of`."""
    found = _known(ids, len(levels))[..., 0]
    return numerics.dequantize_table(levels[found], scales[found], zeros[found])


def _known(ids: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    if ids.size and (ids.min() < 0 or ids.max() >= count):
        raise IndexError("index out of range in self")
    return ids


def linear(
    x: FloatArray,
    weight: NDArray[np.float16 | np.int8],
    scales: FloatArray | None = None,
    bias: FloatArray | None = None,
) -> FloatArray:
    """f32[..., K] and [N, K] -> f32[..., N]: from 0, products with the weights as they are stored, one input after the
    other; then times the scale of an output, then plus its bias.
    """
    total = np.zeros((*x.shape[:-1], len(weight)), np.float32)
    with np.errstate(all="ignore"):
        for k, column in enumerate(weight.T.astype(np.float32)):
            total = total + x[..., k, None] * column
        total = total if scales is None else total * scales
        return total if bias is None else total + bias
