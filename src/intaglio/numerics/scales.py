"""Quantization parameters: scales, zero points, integer biases, requantization multipliers, accumulator bounds.

Everything is computed in float64 and stored in float32 or int32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from intaglio.numerics.rounding import Affine, FloatArray, Int32Array, reciprocal

MIN_SCALE = 2.0**-126
"""Smallest scale. A float32 scale below it is denormal, and its reciprocal may be infinite."""

BIAS_LIMIT = 2**30

ZERO_WEIGHT_STEPS = 2**20


def affine_qparams(low: float, high: float, qmin: int, qmax: int) -> Affine:
    """Return scale and zero point for the range [low, high], widened to contain 0.

    They are computed in float64, and the scale is stored in float32. The zero point is rounded, so that zero is exact
    and the range may shift by half a step. An all-zero range gives scale 1 and the value of qmin..qmax nearest to 0.

    Raises:
        ValueError: The range is not finite, or its scale exceeds float32.
    """
    low, high = min(float(low), 0.0), max(float(high), 0.0)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"the range [{low}, {high}] is not finite")
    if low == high:
        return Affine(1.0, min(max(0, qmin), qmax))
    scale = float(np.float32(max((high - low) / (qmax - qmin), MIN_SCALE)))
    if not math.isfinite(scale):
        raise ValueError(f"the range [{low}, {high}] needs a scale that float32 cannot represent")
    zero_point = int(np.clip(np.rint(qmin - low / scale), qmin, qmax))
    return Affine(scale, zero_point)


def symmetric_zero_point(qmin: int, qmax: int) -> int:
    """Return the zero point of ranges that are symmetric around zero."""
    return int(np.rint((qmin + qmax) / 2))


def symmetric_qparams(most: float, qmin: int, qmax: int) -> Affine:
    """Return scale and zero point for the range [-most, most], as `affine_qparams` does, with the zero point in the
    middle of qmin..qmax, also if the range holds nothing but zeros or is below the smallest scale.

    Raises:
        ValueError: as for `affine_qparams`.
    """
    return Affine(affine_qparams(-most, most, qmin, qmax).scale, symmetric_zero_point(qmin, qmax))


def symmetric_scale(absmax: ArrayLike, qmax: int) -> FloatArray:
    """Return the scales ``absmax / qmax``, computed in float64 and stored in float32; an all-zero channel gets 1."""
    wide = np.asarray(absmax, np.float64)
    scale = np.maximum(wide / qmax, MIN_SCALE).astype(np.float32)
    return np.where(wide == 0, np.float32(1), scale)


SquaredErrors = Callable[[FloatArray, FloatArray, int, int], NDArray[np.float64]]
"""A function with the arguments and the result of `squared_errors`, such as its compiled kernel."""


def squared_errors(rows: FloatArray, steps: FloatArray, qmin: int, qmax: int) -> NDArray[np.float64]:
    """Return the squared distance f64[...] of each row of f32[..., K] to its nearest quantized values.

    The scales ``steps`` are f32[...]. This is the reference implementation of `intaglio.native.scale_errors`.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        quantized = np.clip(np.rint(rows * reciprocal(steps)[..., None]), qmin, qmax)
        total: NDArray[np.float64] = np.square(rows - quantized * steps[..., None]).sum(-1, dtype=np.float64)
    return total


SHRINKS = tuple(1 - step / 40 for step in range(29))
"""Fractions of the scale ``absmax / qmax`` that `least_squares` tries, the largest first."""


def least_squares(rows: ArrayLike, qmin: int, qmax: int, errors: SquaredErrors = squared_errors) -> FloatArray:
    """Return the scale f32[...] of each row of f32[..., K] that minimizes the squared quantization error.

    The candidates are ``shrink * absmax / qmax`` for the fractions in `SHRINKS`, and values are rounded to the nearest
    in qmin..qmax. The largest of equally good scales wins. A row of zeros gets 1.
    """
    rows = np.asarray(rows, np.float32)
    absmax = np.abs(rows).max(-1, initial=0).astype(np.float64)
    best, least = symmetric_scale(absmax, qmax), np.full(absmax.shape, np.inf)
    for shrink in SHRINKS:
        scale = np.where(absmax == 0, np.float32(1), symmetric_scale(absmax * shrink, qmax))
        error = errors(rows, scale, qmin, qmax)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return best


def group_scale(
    groups: ArrayLike, qmin: int, qmax: int, most: int, errors: SquaredErrors = squared_errors
) -> FloatArray:
    """Return the scale f32[C] of each channel of f32[C, G, K] with group-wise quantization.

    The scale of a group is an integer multiple 1..most of its channel's scale. The ideal scale of each group is that of
    `least_squares`. The candidates make the largest of them n times the channel's scale, for n from ``most`` down to
    half of it, and round the other groups to the nearest multiple. The least squared error decides.
    """
    groups = np.asarray(groups, np.float32)
    own = np.where(np.abs(groups).max(-1, initial=0) == 0, 0, least_squares(groups, qmin, qmax, errors)).astype(
        np.float64
    )
    largest = own.max(-1)
    best, least = symmetric_scale(largest, most), np.full(largest.shape, np.inf)
    for parts in range(most, most // 2, -1):
        scale = symmetric_scale(largest, parts)
        multiples = np.clip(np.rint(own / scale[:, None].astype(np.float64)), 1, most).astype(np.float32)
        error = errors(groups, scale[:, None] * multiples, qmin, qmax).sum(-1)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return best


def group_multiples(
    groups: ArrayLike, scale: ArrayLike, qmin: int, qmax: int, most: int, errors: SquaredErrors = squared_errors
) -> Int32Array:
    """Return the multiple i32[C, G], in 1..most, of its channel's scale that each group uses as its own scale.

    Each is the multiple with the least squared error over the group when values are rounded to the nearest in
    qmin..qmax, the smallest of equally good ones. A quantized value times its multiple is an exact integer in units of
    the channel's scale.

    Args:
        groups: Weights f32[C, G, K].
        scale: Scale of each channel f32[C].
        qmin: Smallest quantized value.
        qmax: Largest quantized value.
        most: Largest multiple.
        errors: `squared_errors`, or a kernel that computes the same.
    """
    groups, scale = np.asarray(groups, np.float32), np.asarray(scale, np.float32)
    best, least = np.ones(groups.shape[:2], np.int32), np.full(groups.shape[:2], np.inf)
    for multiple in range(1, most + 1):
        steps = np.broadcast_to(scale[:, None] * np.float32(multiple), best.shape)
        error = errors(groups, steps, qmin, qmax)
        best, least = np.where(error < least, np.int32(multiple), best), np.minimum(error, least)
    return best


def accumulator_scale(scale_x: ArrayLike, scale_w: ArrayLike) -> NDArray[np.float64]:
    """Return the float64 product of two stored float32 scales, the scale of an int32 accumulator."""
    return np.asarray(scale_x, np.float32).astype(np.float64) * np.asarray(scale_w, np.float32).astype(np.float64)


def quantize_bias(bias: ArrayLike, scale_x: ArrayLike, scale_w: ArrayLike) -> Int32Array:
    """Quantize the bias f32[C] to i32[C]: ``rne(float64(bias) / (float64(scale_x) * float64(scale_w)))``.

    Raises:
        OverflowError: A bias exceeds 2^30 accumulator steps.
    """
    steps = np.rint(np.asarray(bias, np.float32).astype(np.float64) / accumulator_scale(scale_x, scale_w))
    if steps.size and np.abs(steps).max() > BIAS_LIMIT:
        raise OverflowError("a bias exceeds 2^30 steps of the int32 accumulator")
    return steps.astype(np.int32)


def fit_weight_scale(scale_w: ArrayLike, absmax: ArrayLike, bias: ArrayLike | None, scale_x: float) -> FloatArray:
    """Return the weight scales f32[C], enlarged per channel where the int32 bias would overflow.

    An all-zero channel takes the scale that puts its bias at 2^20 steps. Where the bias would have 2^30 steps or more,
    the scale is enlarged by the least factor that avoids it.
    """
    scale = np.array(scale_w, np.float32)
    if bias is None:
        return scale
    wide_bias = np.abs(np.asarray(bias, np.float32).astype(np.float64))
    wide_x = np.float64(np.float32(scale_x))
    zero = np.asarray(absmax) == 0
    carried = np.maximum(wide_bias / (wide_x * ZERO_WEIGHT_STEPS), MIN_SCALE).astype(np.float32)
    scale = np.where(zero & (wide_bias > 0), carried, scale)
    least = (wide_bias / (wide_x * (BIAS_LIMIT - 1))).astype(np.float32)
    short = least.astype(np.float64) * wide_x * (BIAS_LIMIT - 1) < wide_bias
    least = np.where(short, np.nextafter(least, np.inf), least)
    return np.where(wide_bias >= scale.astype(np.float64) * wide_x * BIAS_LIMIT, least, scale).astype(np.float32)


def multiplier(accumulator: ArrayLike, scale_y: ArrayLike) -> FloatArray:
    """Return ``float32(accumulator / float64(scale_y))``, the factor of `requantize`.

    This is the multiplier M of Jacob et al. 2018, eq. 4, as a float.
    """
    return (np.asarray(accumulator, np.float64) / np.asarray(scale_y, np.float32).astype(np.float64)).astype(np.float32)


def pool_multipliers(scale_x: float, scale_y: float, counts: Sequence[int]) -> FloatArray:
    """Return the `requantize` factors ``float32(s_x / (n * s_y))`` of means over n values, for all n in ``counts``."""
    return (pool_ratio(scale_x, scale_y) / np.asarray(counts, np.float64)).astype(np.float32)


def pool_ratio(scale_x: float, scale_y: float) -> np.float64:
    """Return ``scale_x / scale_y`` in float64, which `pool_multipliers` divides by every count."""
    return np.float64(np.float32(scale_x)) / np.float64(np.float32(scale_y))


def zero_point_term(weight: ArrayLike, zero_points: int | Sequence[int], groups: int = 1) -> NDArray[np.int64]:
    """Return ``sum(zero_point * w)`` i64[C] of each output channel, for one zero point or one per input channel.

    ``weight`` is [outputs, inputs per group, taps...].
    """
    w, different = np.asarray(weight), np.unique(zero_points)
    if len(different) == 1:  # a single pass over the weight, because this dominates the load time of a model
        once: NDArray[np.int64] = int(different[0]) * w.reshape(len(w), -1).sum(1, np.int64)
        return once
    sums = w.reshape(*w.shape[:2], -1).sum(2, np.int64)
    zeros = np.broadcast_to(np.asarray(zero_points, np.int64), groups * sums.shape[1])
    total: NDArray[np.int64] = (sums.reshape(groups, -1, sums.shape[1]) * zeros.reshape(groups, 1, -1)).sum(2).ravel()
    return total


def accumulator_bound(
    weight: ArrayLike, bias: ArrayLike, qmin: int, qmax: int, zero_points: int | Sequence[int], groups: int = 1
) -> NDArray[np.int64]:
    """Return i64[C]: the largest |accumulator| that each output channel can reach.

    ``|bias - zp * sum(w)| + max|q| * sum|w|`` bounds the form that kernels use, with the zero-point term folded into
    the bias; ``|bias| + max|q - zp| * sum|w|`` bounds the plain form. The result is the larger of both. If it is below
    2^31, the final accumulator is exact, though partial sums may wrap.
    """
    w, b = np.asarray(weight).reshape(np.shape(weight)[0], -1), np.asarray(bias, np.int64)
    above, below = np.maximum(w, 0).sum(1, np.int64), np.minimum(w, 0).sum(1, np.int64)
    total = above - below
    folded = np.abs(b - zero_point_term(weight, zero_points, groups)) + max(abs(qmin), abs(qmax)) * total
    plain = np.abs(b) + max(abs(qmin - np.max(zero_points)), abs(qmax - np.min(zero_points))) * total
    bound: NDArray[np.int64] = np.maximum(folded, plain)
    return bound
