"""Reference arithmetic of tensors that stay float32 in an integer graph.

Its C++ is native/elementwise/float_functions.h.

Inputs may have any magnitude and may be NaN or infinite. Operations are IEEE float32 in the written order, without
fused multiply-add. A bfloat16 value is a float32 value whose low 16 bits are zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from intaglio import numerics
from intaglio.errors import INDEX_OUT_OF_RANGE
from intaglio.numerics import LANES, LN2_HIGH, LN2_LOW, FloatArray

LARGEST_EXPONENT = np.float32(89)
"""exp of this exceeds float32."""
LOG_TERMS = tuple(np.float32(2 / n) for n in (9, 7, 5, 3))
"""Coefficients of s^9 ... s^3 in ``log((1 + s) / (1 - s)) = 2 s + 2/3 s^3 + ...``; |s| <= 0.172."""
SQRT_HALF_BITS = 0x3F3504F3
"""Bit pattern of the float32 nearest to sqrt(1/2)."""
SMALLEST_NORMAL = np.float32(2.0**-126)
TWO_OVER_PI = 2 / math.pi
HALF_PI_HIGH = float.fromhex("0x1.921fb544p+0")
"""The upper 33 bits of pi / 2: its products with integers below 2^20 are exact in float64."""
HALF_PI_LOW = float.fromhex("0x1.0b4611a626331p-34")
"""pi / 2 - `HALF_PI_HIGH` in float64."""
LARGEST_ANGLE = 2.0**40
"""Magnitudes from here on have the sine and cosine of 0."""
SIN_TERMS = tuple(np.float32(s / math.factorial(n)) for s, n in ((1, 9), (-1, 7), (1, 5), (-1, 3)))
"""Coefficients of r^9 ... r^3 of the Taylor series of the sine; |r| <= pi / 4."""
COS_TERMS = tuple(np.float32(s / math.factorial(n)) for s, n in ((-1, 10), (1, 8), (-1, 6), (1, 4), (-1, 2)))
"""Coefficients of r^10 ... r^2 of the Taylor series of the cosine."""

Function = Callable[[FloatArray], FloatArray]


def exp(x: ArrayLike) -> FloatArray:
    """Return e to the power of f32 x, with a relative error of at most 1.2e-7; 0 below -87.

    It equals `numerics.exp_negative` for x <= 0.
    """
    x = np.asarray(x, np.float32)
    bounded = np.where(x > numerics.LOWEST_EXPONENT, x, numerics.LOWEST_EXPONENT)
    bounded = np.where(bounded < LARGEST_EXPONENT, bounded, LARGEST_EXPONENT)
    n: FloatArray = np.rint(bounded * numerics.LOG2_E)
    rise = _exp_rise(bounded, n)
    exponent = n.astype(np.int32)
    power = ((np.minimum(exponent, 127) + 127) << 23).view(np.float32)
    twice = np.where(exponent > 127, np.float32(2), np.float32(1))
    with np.errstate(over="ignore"):
        found = ((rise + np.float32(1)) * power) * twice
    found = np.where(x < numerics.LOWEST_EXPONENT, np.float32(0), found)
    return np.where(np.isnan(x), x, found)


def _exp_rise(x: FloatArray, n: FloatArray) -> FloatArray:
    """Return exp(x - n ln 2) - 1 with the operations of `numerics.exp_negative` in the same order."""
    r: FloatArray = (x - n * LN2_HIGH) - n * LN2_LOW
    total = np.full_like(r, numerics.EXP_TERMS[0])
    for term in numerics.EXP_TERMS[1:]:
        total = total * r + term
    return total * (r * r) + r


def log(x: ArrayLike) -> FloatArray:
    """Return the natural logarithm of f32 x; -inf at 0, NaN for negative x.

    The error is at most 1.2e-7, absolute or relative to the result, whichever is larger.
    """
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


def sin(x: ArrayLike) -> FloatArray:
    """Return the sine of f32 x; NaN for infinite x.

    The error is at most 1.2e-7 for magnitudes up to 2^29. Larger ones, whose neighbours are 64 or more apart, have
    some result from -1 to 1.
    """
    return _circular(x, 0)


def cos(x: ArrayLike) -> FloatArray:
    """Return the cosine of f32 x, with the bounds of `sin`."""
    return _circular(x, 1)


def _circular(x: ArrayLike, quarters: int) -> FloatArray:
    """Return sin(x + quarters * pi / 2): a multiple of pi / 2 is subtracted in float64, the rest is a polynomial."""
    x = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        wide = np.where(np.abs(x) < np.float32(LARGEST_ANGLE), x, np.float32(0)).astype(np.float64)
        n = np.rint(wide * TWO_OVER_PI)
        r = ((wide - n * HALF_PI_HIGH) - n * HALF_PI_LOW).astype(np.float32)
    turn = n.astype(np.int64) + quarters
    square = r * r
    odd, even = np.full_like(r, SIN_TERMS[0]), np.full_like(r, COS_TERMS[0])
    for term in SIN_TERMS[1:]:
        odd = odd * square + term
    for term in COS_TERMS[1:]:
        even = even * square + term
    found = np.where(turn & 1 != 0, even * square + np.float32(1), (r * square) * odd + r)
    found = np.where(turn & 2 != 0, -found, found)
    return np.where(np.isfinite(x), found, np.where(np.isnan(x), x, np.float32(np.nan)))


def keep_nan(function: Function) -> Function:
    """Wrap a function so that NaN maps to NaN; the function itself sees 0 instead."""

    def wide(x: FloatArray) -> FloatArray:
        unknown = np.isnan(x)
        return np.where(unknown, x, function(np.where(unknown, np.float32(0), x)))

    return wide


def maximum(a: FloatArray, b: FloatArray) -> FloatArray:
    """Return the larger of both elementwise; NaN if either is NaN."""
    return np.where((a > b) | np.isnan(a), a, b)


def minimum(a: FloatArray, b: FloatArray) -> FloatArray:
    """Return the smaller of both elementwise; NaN if either is NaN."""
    return np.where((a < b) | np.isnan(a), a, b)


def sign(x: np.ndarray) -> np.ndarray:
    """Return -1, 0 or 1 in the element type of x; 0 for NaN."""
    return np.subtract(x > 0, x < 0, dtype=x.dtype)


def reduce_in_lanes(x: FloatArray, start: float, join: Callable[[FloatArray, FloatArray], FloatArray]) -> FloatArray:
    """Reduce f32[..., C] to f32[..., 1] in the order of a 16-lane vector loop.

    Element i is joined to lane ``i % 16`` in order; then the upper half of the lanes is joined to the lower half until
    one lane remains.
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


def reduce_sum(x: FloatArray) -> FloatArray:
    """Return the sum f32[..., 1] of f32[..., C] over the last axis."""
    return reduce_in_lanes(x, 0.0, np.add)


def reduce_mean(x: FloatArray) -> FloatArray:
    """Return the mean f32[..., 1] of f32[..., C]: the sum over the last axis divided by ``float32(C)``."""
    with np.errstate(invalid="ignore", divide="ignore"):
        result: FloatArray = reduce_sum(x) / np.float32(x.shape[-1])
    return result


def reduce_max(x: FloatArray) -> FloatArray:
    """Return the maximum f32[..., 1] of f32[..., C] over the last axis; -inf if C is 0."""
    return reduce_in_lanes(x, -np.inf, lambda lanes, part: maximum(part, lanes))


def reduce_min(x: FloatArray) -> FloatArray:
    """Return the minimum f32[..., 1] of f32[..., C] over the last axis; inf if C is 0."""
    return reduce_in_lanes(x, np.inf, lambda lanes, part: minimum(part, lanes))


def to_bfloat16(x: ArrayLike) -> FloatArray:
    """Round f32 to the nearest bfloat16 value, ties to even; NaN stays NaN."""
    x = np.asarray(x, np.float32)
    bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), np.float32(np.nan), rounded.view(np.float32))


def gather_rows(table: NDArray[np.float32], ids: NDArray[np.int64]) -> FloatArray:
    """Look up rows of the table f32[V, D] by ids i64[..., 1]; return f32[..., D].

    Raises:
        IndexError: An id is out of range, with PyTorch's message.
    """
    return table[_known(ids, len(table))[..., 0]]


def gather_quantized_rows(
    quantized: NDArray[np.uint8], ids: NDArray[np.int64], scales: FloatArray, zeros: FloatArray
) -> FloatArray:
    """Look up rows of a quantized table u8[V, D] by ids i64[..., 1] and dequantize them to f32[..., D].

    ``scales`` and ``zeros`` are f32[V], one per row of the table. Ids are checked as by `gather_rows`.
    """
    found = _known(ids, len(quantized))[..., 0]
    return numerics.dequantize_table(quantized[found], scales[found], zeros[found])


def _known(ids: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the ids if all are in [0, count); raise `IndexError` otherwise."""
    if ids.size and (ids.min() < 0 or ids.max() >= count):
        raise IndexError(INDEX_OUT_OF_RANGE)
    return ids


def dequantize_groups(quantized: NDArray[np.int8], steps: FloatArray, group: int) -> FloatArray:
    """Return the float32 weight of integers whose scales, and offsets if there are any, belong to groups of inputs.

    ``w = float32(q) * scale + offset``, in this order.

    Args:
        quantized: s8[N, ...], a row for each output.
        steps: f32[1, N, G], the scales, or f32[2, N, G], the scales and the offsets.
        group: number of neighbours in a row that share a step. The last group of a row may be smaller.
    """
    rows = quantized.reshape(len(quantized), -1).astype(np.float32)
    with np.errstate(all="ignore"):
        for index, step in enumerate(np.repeat(steps, group, axis=2)[:, :, : rows.shape[1]]):
            rows = rows + step if index else rows * step
    return rows.reshape(quantized.shape)


def linear(
    x: FloatArray,
    weight: NDArray[np.float16 | np.int8] | FloatArray,
    scales: FloatArray | None = None,
    bias: FloatArray | None = None,
) -> FloatArray:
    """Return ``x @ weight.T`` of f32[..., K] and a weight [N, K] of integers or floats as f32[..., N].

    Products are accumulated from 0, one input after the other, with the weights as they are stored. The sum is then
    multiplied by ``scales`` of the outputs, and ``bias`` is added.
    """
    total = np.zeros((*x.shape[:-1], len(weight)), np.float32)
    with np.errstate(all="ignore"):
        for k, column in enumerate(weight.T.astype(np.float32)):
            total = total + x[..., k, None] * column
        total = total if scales is None else total * scales
        return total if bias is None else total + bias
