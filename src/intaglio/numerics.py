"""The law of numbers, once, in NumPy. `native/numerics.h` is its one twin in C++, with
`native/functions.h` for the functions of activations.

Everything that runs is IEEE float32 ``+ - * /``, comparison and conversion in the written order, ties to even:
no fused multiply-add, no reciprocal estimates. Parameters (scales, multipliers, biases) are made here in
float64 and stored in float32 or int32. Integers of kernels wrap as unsigned 32-bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

SMALLEST_SCALE = 2.0**-126
"""Below this a float32 scale is denormal and its reciprocal may be infinite."""
BIAS_LIMIT = 2**30
ZERO_WEIGHT_STEPS = 2**20
CONVERTIBLE = 2.0**30
"""Products below this survive conversion to int32 with any zero point added; above, kernels clamp in float first."""


class Affine(NamedTuple):
    """A scale (a float32 value held as a Python float) and a zero point."""

    scale: float
    zero_point: int


def reciprocal(scale: ArrayLike) -> F32:
    """``float32(1) / scale``: what `quantize` multiplies by. Exact twin of torch's ``1.0 / scale``."""
    return np.float32(1) / np.asarray(scale, np.float32)


def quantize(x: ArrayLike, scale: ArrayLike, zero_point: ArrayLike, low: int, high: int) -> I32:
    """f32[...] -> i32[...] in steps of ``scale``: ``clamp(rne(x * (1/scale)) + zero_point, low, high)``.

    Bit-equal to ``quantized_decomposed.quantize_per_tensor.default`` for finite and infinite x; NaN gives the
    zero point (torch: 0). Parameters broadcast against x.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        steps = np.rint(np.asarray(x, np.float32) * reciprocal(scale))
        shifted = np.where(np.isnan(steps), np.float32(0), steps) + np.asarray(zero_point, np.float32)
    levels: I32 = np.clip(shifted, np.float32(low), np.float32(high)).astype(np.int32)
    return levels


def dequantize(q: ArrayLike, scale: ArrayLike, zero_point: ArrayLike) -> F32:
    """i[...] -> f32[...]: ``float32(q - zero_point) * scale``."""
    return (np.asarray(q, np.int32) - np.asarray(zero_point, np.int32)).astype(np.float32) * np.asarray(
        scale, np.float32
    )


def affine(low: float, high: float, qmin: int, qmax: int) -> Affine:
    """Scale and zero point for the range [low, high], widened to hold 0; computed in float64, stored float32.

    The zero point is rounded, so zero is exact and the range may shift by half a step. All-zero gives (1, qmin
    clamped towards 0).
    """
    low, high = min(float(low), 0.0), max(float(high), 0.0)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"range [{low}, {high}] is not finite")
    if low == high:
        return Affine(1.0, min(max(0, qmin), qmax))
    scale = float(np.float32(max((high - low) / (qmax - qmin), SMALLEST_SCALE)))
    if not math.isfinite(scale):
        raise ValueError(f"range [{low}, {high}] needs a scale that float32 cannot hold")
    zero_point = int(np.clip(np.rint(qmin - low / scale), qmin, qmax))
    return Affine(scale, zero_point)


def symmetric(absmax: ArrayLike, qmax: int) -> F32:
    """Scales ``absmax / qmax`` (float64, stored float32); an all-zero channel gets 1."""
    wide = np.asarray(absmax, np.float64)
    scale = np.maximum(wide / qmax, SMALLEST_SCALE).astype(np.float32)
    return np.where(wide == 0, np.float32(1), scale)


SHRINKS = tuple(1 - step / 40 for step in range(29))
"""Of the scale that reaches the largest value: what `least_squares` tries, the largest first."""


def least_squares(rows: ArrayLike, qmin: int, qmax: int) -> F32:
    """f32[..., K] -> f32[...]: of the scales ``shrink * absmax / qmax`` the one whose nearest levels in qmin..qmax are
    closest to the row, by squared distance; of equal ones the largest. A row of zeros gets 1."""
    rows = np.asarray(rows, np.float32)
    absmax = np.abs(rows).max(-1, initial=0).astype(np.float64)
    best, least = symmetric(absmax, qmax), np.full(absmax.shape, np.inf)
    for shrink in SHRINKS:
        scale = np.where(absmax == 0, np.float32(1), symmetric(absmax * shrink, qmax))
        error = _squares(rows, scale, qmin, qmax)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return best


def group_scale(groups: ArrayLike, qmin: int, qmax: int, most: int) -> F32:
    """f32[C, G, K] -> f32[C]: the scale of each channel whose groups have steps of 1..most times it.

    Every group's own step is that of `least_squares`. Tried is what makes the largest of them n times the scale, for n
    from ``most`` down to half of it, all others their nearest multiples; least squared error decides.
    """
    groups = np.asarray(groups, np.float32)
    own = np.where(np.abs(groups).max(-1, initial=0) == 0, 0, least_squares(groups, qmin, qmax)).astype(np.float64)
    largest = own.max(-1)
    best, least = symmetric(largest, most), np.full(largest.shape, np.inf)
    for parts in range(most, most // 2, -1):
        scale = symmetric(largest, parts)
        multiples = np.clip(np.rint(own / scale[:, None].astype(np.float64)), 1, most).astype(np.float32)
        error = _squares(groups, scale[:, None] * multiples, qmin, qmax).sum(-1)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return best


def group_multiples(groups: ArrayLike, scale: ArrayLike, qmin: int, qmax: int, most: int) -> I32:
    """f32[C, G, K], f32[C] -> i32[C, G]: the multiple in 1..most of its channel's scale that each group's steps are.

    The one whose nearest levels in qmin..qmax are closest to the group, by squared distance; the smallest of equal
    ones. Level times multiple is an exact integer in units of the channel's scale.
    """
    groups, scale = np.asarray(groups, np.float32), np.asarray(scale, np.float32)
    best, least = np.ones(groups.shape[:2], np.int32), np.full(groups.shape[:2], np.inf)
    for multiple in range(1, most + 1):
        steps = np.broadcast_to(scale[:, None] * np.float32(multiple), best.shape)
        error = _squares(groups, steps, qmin, qmax)
        best, least = np.where(error < least, np.int32(multiple), best), np.minimum(error, least)
    return best


def _squares(rows: F32, steps: F32, qmin: int, qmax: int) -> NDArray[np.float64]:
    """f32[..., K], f32[...] -> f64[...]: squared distance of a row to its nearest levels."""
    with np.errstate(over="ignore", invalid="ignore"):
        levels = np.clip(np.rint(rows * reciprocal(steps)[..., None]), qmin, qmax)
        total: NDArray[np.float64] = np.square(rows - levels * steps[..., None]).sum(-1, dtype=np.float64)
    return total


def accumulator_scale(scale_x: ArrayLike, scale_w: ArrayLike) -> NDArray[np.float64]:
    """float64 product of two stored float32 scales: the unit of an int32 accumulator."""
    return np.asarray(scale_x, np.float32).astype(np.float64) * np.asarray(scale_w, np.float32).astype(np.float64)


def bias_steps(bias: ArrayLike, scale_x: ArrayLike, scale_w: ArrayLike) -> I32:
    """f32[C] -> i32[C]: ``rne(float64(bias) / (float64(scale_x) * float64(scale_w)))``; raises when one overflows."""
    steps = np.rint(np.asarray(bias, np.float32).astype(np.float64) / accumulator_scale(scale_x, scale_w))
    if steps.size and np.abs(steps).max() > BIAS_LIMIT:
        raise OverflowError("a bias exceeds 2^30 accumulator steps")
    return steps.astype(np.int32)


def fit_weight_scale(scale_w: ArrayLike, absmax: ArrayLike, bias: ArrayLike | None, scale_x: float) -> F32:
    """f32[C] weight scales made fit for an int32 bias, per channel.

    An all-zero channel takes the scale that puts its bias at 2^20 steps; a bias of 2^30 steps or more enlarges the
    scale by the least factor that avoids it.
    """
    scale = np.array(scale_w, np.float32)
    if bias is None:
        return scale
    wide_bias = np.abs(np.asarray(bias, np.float32).astype(np.float64))
    wide_x = np.float64(np.float32(scale_x))
    zero = np.asarray(absmax) == 0
    carried = np.maximum(wide_bias / (wide_x * ZERO_WEIGHT_STEPS), SMALLEST_SCALE).astype(np.float32)
    scale = np.where(zero & (wide_bias > 0), carried, scale)
    least = (wide_bias / (wide_x * (BIAS_LIMIT - 1))).astype(np.float32)
    short = least.astype(np.float64) * wide_x * (BIAS_LIMIT - 1) < wide_bias
    least = np.where(short, np.nextafter(least, np.inf), least)
    return np.where(wide_bias >= scale.astype(np.float64) * wide_x * BIAS_LIMIT, least, scale).astype(np.float32)


def multiplier(accumulator: ArrayLike, scale_y: ArrayLike) -> F32:
    """``float32(accumulator / float64(scale_y))``, the factor of `requantize`; Jacob et al. 2018, eq. 4, in float."""
    return (np.asarray(accumulator, np.float64) / np.asarray(scale_y, np.float32).astype(np.float64)).astype(np.float32)


def finish(steps: F32, zero_point: int, low: int, high: int) -> I32:
    """Steps in float32 -> levels: ``clamp(rne(steps) + zero_point, low, high)``; steps beyond +-2^30 count as those."""
    shifted = np.rint(np.clip(steps, -CONVERTIBLE, CONVERTIBLE)).astype(np.int64) + zero_point
    return np.clip(shifted, low, high).astype(np.int32)


def requantize(acc: ArrayLike, factor: ArrayLike, zero_point: int, low: int, high: int) -> I32:
    """i32 accumulators -> i32 levels: ``clamp(rne(float32(acc) * factor) + zero_point, low, high)``; factor broadcasts.

    Products beyond +-2^30 are clamped in float first, which cannot change the result.
    """
    with np.errstate(over="ignore"):
        steps = np.asarray(acc, np.int32).astype(np.float32) * np.asarray(factor, np.float32)
    return finish(steps, zero_point, low, high)


def add_requantize(
    a: ArrayLike, factor_a: ArrayLike, b: ArrayLike, factor_b: ArrayLike, zero_point: int, low: int, high: int
) -> I32:
    """``clamp(rne(float32(a) * factor_a + float32(b) * factor_b) + zero_point, low, high)``, no fused multiply-add.

    ``a`` is an accumulator or ``q_a - zp_a``; ``b`` is ``q_b - zp_b``. Factors are `multiplier` of ``scale * alpha`` in
    float64; alpha, of ``a + alpha * b``, is one number or one for every channel.
    """
    with np.errstate(over="ignore"):
        left = np.asarray(a, np.int32).astype(np.float32) * np.asarray(factor_a, np.float32)
        right = np.asarray(b, np.int32).astype(np.float32) * np.asarray(factor_b, np.float32)
        return finish(left + right, zero_point, low, high)


def affine_requantize(x: ArrayLike, factor: ArrayLike, offset: ArrayLike, zero_point: int, low: int, high: int) -> I32:
    """``clamp(rne(float32(x) * factor + offset) + zero_point, low, high)``, no fused multiply-add; x is ``q - zp``."""
    with np.errstate(over="ignore"):
        steps = np.asarray(x, np.int32).astype(np.float32) * np.asarray(factor, np.float32)
        return finish(steps + np.asarray(offset, np.float32), zero_point, low, high)


def layer_norm(
    x: ArrayLike, factor: ArrayLike, offset: ArrayLike, eps: ArrayLike, zero_point: int, low: int, high: int
) -> I32:
    """i32[..., C], levels less their zero point -> levels of the normalised rows.

    With ``n1 = sum(x)`` and ``n2 = sum(x * x)`` exact: mean ``float32(n1) / float32(C)``, variance ``float32(C * n2 -
    n1 * n1) / float32(C * C)``, ``inverse = 1 / sqrt(variance + eps)``; then ``clamp(rne((x - mean) * inverse * factor
    + offset) + zero_point, low, high)`` from left to right. ``eps`` is in squared steps of x, ``factor`` and ``offset``
    in steps of the result. Ba et al. 2016.
    """
    wide = np.asarray(x, np.int64)
    count = wide.shape[-1]
    first, second = wide.sum(-1, keepdims=True), (wide * wide).sum(-1, keepdims=True)
    mean = first.astype(np.float32) / np.float32(count)
    variance = (count * second - first * first).astype(np.float32) / np.float32(count * count)
    inverse = np.float32(1) / np.sqrt(variance + np.asarray(eps, np.float32))
    with np.errstate(over="ignore", invalid="ignore"):
        normal = (wide.astype(np.float32) - mean) * inverse
        return finish(normal * np.asarray(factor, np.float32) + np.asarray(offset, np.float32), zero_point, low, high)


STEPS = 255
"""Steps of a value of 16 bits in a step of its level. An odd number: no value lies in the middle between two levels."""


def widen(scale: float, zero_point: int) -> Affine:
    """Parameters of 16 bits for a value whose levels have these: ``q16 = 255 * level + rest``, rest in 0..254.

    The scale is ``float32(scale / 255)``, the zero point ``255 * zero_point + 127``. Quantizing ``dequantize(q16)``
    with the parameters of the levels gives ``q16 // 255``.
    """
    return Affine(float(np.float32(np.float64(np.float32(scale)) / STEPS)), STEPS * zero_point + STEPS // 2)


def split(q16: ArrayLike) -> tuple[I32, I32]:
    """Level and rest of values of 16 bits: ``q16 // 255`` and ``q16 % 255``."""
    level, rest = np.divmod(np.asarray(q16, np.int32), np.int32(STEPS))
    return level, rest


def joined(level: ArrayLike, rest: ArrayLike) -> I32:
    """``255 * level + rest``, the inverse of `split`; of differences from both zero points, that from its own."""
    together: I32 = STEPS * np.asarray(level, np.int32) + np.asarray(rest, np.int32)
    return together


def clamp_levels(
    low: float | None, high: float | None, scale: float, zero_point: int, qmin: int, qmax: int
) -> tuple[int, int]:
    """Integer bounds of a float clamp: each bound is quantized (rounded, not truncated), so fused equals unfused."""

    def level(bound: float | None, fallback: int) -> int:
        return fallback if bound is None else int(quantize(np.float32(bound), scale, zero_point, qmin, qmax))

    bottom, top = level(low, qmin), level(high, qmax)
    return min(bottom, top), top


def pool_multipliers(scale_x: float, scale_y: float, counts: Sequence[int]) -> F32:
    """Factor of `requantize` for a mean over n values, for every n in ``counts``: ``float32(s_x / (n * s_y))``."""
    return (pool_ratio(scale_x, scale_y) / np.asarray(counts, np.float64)).astype(np.float32)


def pool_ratio(scale_x: float, scale_y: float) -> np.float64:
    """What `pool_multipliers` divides by every count, in float64."""
    return np.float64(np.float32(scale_x)) / np.float64(np.float32(scale_y))


def requantize_table(
    scale_x: float, zero_x: int, scale_y: float, zero_y: int, low: int, high: int
) -> NDArray[np.uint8]:
    """u8[256]: level of x -> level of y for a plain change of parameters: `quantize` of `dequantize`."""
    levels = np.arange(256, dtype=np.int32)
    return quantize(dequantize(levels, scale_x, zero_x), scale_y, zero_y, low, high).astype(np.uint8)


class Levels(Protocol):
    """What a table needs of quantization parameters: `intaglio.ir.QParams` has it."""

    @property
    def step(self) -> float: ...

    @property
    def zero(self) -> int: ...

    @property
    def qmin(self) -> int: ...

    @property
    def qmax(self) -> int: ...


def function_table(function: Callable[[NDArray[np.float64]], ArrayLike], x: Levels, y: Levels) -> NDArray[np.uint8]:
    """u8[256]: level of x -> level of ``function(x)``; the function is taken in float64 of the float32 value."""
    levels = np.arange(256, dtype=np.int32)
    with np.errstate(all="ignore"):
        result = np.asarray(function(dequantize(levels, x.step, x.zero).astype(np.float64))).astype(np.float32)
    return quantize(result, y.step, y.zero, y.qmin, y.qmax).astype(np.uint8)


LOWEST_EXPONENT = np.float32(-87)
"""Below this `exp_negative` is 0; float32 would soon be denormal."""
LOG2_E = np.float32(1.44269502162933349609375)
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194441701285541057586669921875e-4)
"""ln 2 in two parts: products of the high one with whole numbers up to 2^15 are exact."""
EXP_TERMS = tuple(
    np.float32(float.fromhex(term))
    for term in ("0x1.6a23cep-10", "0x1.123a2p-7", "0x1.5558f2p-5", "0x1.555492p-3", "0x1.fffffcp-2")
)
"""Coefficients of r^6 ... r^2 in exp(r), least relative error on |r| <= ln(2)/2."""
LANES = 16


def exp_negative(x: ArrayLike) -> F32:
    """f32 -> f32: exp(x) for x <= 0, within 1e-7 of it; 0 below -87.

    ``2^n * exp(x - n * ln 2)`` with ``n = rne(x / ln 2)`` and a polynomial in float32, no fused multiply-add.
    """
    x = np.asarray(x, np.float32)
    rise, power = _exp_parts(x)
    return np.where(x < LOWEST_EXPONENT, np.float32(0), (rise + np.float32(1)) * power)


def expm1_negative(x: ArrayLike) -> F32:
    """f32 -> f32: exp(x) - 1 for x <= 0, within 1e-7 of it, relative to it; the parts of `exp_negative`."""
    rise, power = _exp_parts(np.asarray(x, np.float32))
    result: F32 = rise * power + (power - np.float32(1))
    return result


def _exp_parts(x: F32) -> tuple[F32, F32]:
    """``r`` and a power of two with ``exp(x) = (r + 1) * power``, for x from -87 to 0; below as for -87."""
    bounded = np.maximum(x, LOWEST_EXPONENT)
    n: F32 = np.rint(bounded * LOG2_E)
    r: F32 = (bounded - n * LN2_HIGH) - n * LN2_LOW
    total = np.full_like(r, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        total = total * r + term
    return total * (r * r) + r, ((n.astype(np.int32) + 127) << 23).view(np.float32)


LARGEST = np.float32(np.finfo(np.float32).max)
LOWEST_SCORE = np.float32(-12)
"""Scores so far below the largest of their row, or farther, have the level 0: 255 * 2^-12 is less than 0.07."""
LEVEL_TERMS = tuple(
    np.float32(float.fromhex(term)) for term in ("0x1.c232b0p+3", "0x1.eeed58p+5", "0x1.61902ap+7", "0x1.fdf69cp+7")
)
"""Coefficients of f^3 ... f^0 in 255 * 2^f, least relative error (7.5e-5) on |f| <= 1/2."""


def probability_levels(x: ArrayLike) -> NDArray[np.uint8]:
    """f32[..., keys] -> u8[..., keys]: ``rne(255 * 2^(x - max(x)))``, within 0.02 of it before rounding.

    A NaN is no score: it is never the largest, and its level is 0. So are all levels of a row whose largest score is
    infinite, and of one without keys.
    """
    x = np.asarray(x, np.float32)
    top = np.fmax.reduce(x, axis=-1, keepdims=True, initial=np.float32(-np.inf))
    with np.errstate(invalid="ignore", over="ignore"):
        below = x - top
        power = np.where(below > LOWEST_SCORE, below, LOWEST_SCORE)
    n = np.rint(power)
    f = power - n
    total = np.full_like(f, LEVEL_TERMS[0])
    for term in LEVEL_TERMS[1:]:
        total = total * f + term
    levels: NDArray[np.uint8] = np.rint(np.ldexp(total, n.astype(np.int32))).astype(np.uint8)
    return levels


def attention_factors(inputs: Sequence[float], scale_y: float, scale: float) -> tuple[np.float32, np.float32]:
    """``float32(s_q * s_k * scale / ln 2)`` and ``float32(s_v / s_y)``, both from float64: see `attention`.

    ``inputs``: scales of q, k and v; ``scale``: what scores are multiplied by.
    """
    scale_q, scale_k, scale_v = inputs
    factor = np.float32(accumulator_scale(scale_q, scale_k) * np.float64(scale) / math.log(2))
    return factor, np.float32(multiplier(np.float64(np.float32(scale_v)), scale_y))


def mask_powers(mask: NDArray[Any]) -> F32:
    """What a mask adds to scores in powers of two: ``mask * LOG2_E`` of floats, no less than the least finite one but
    for -inf; 0 for True, -inf for False."""
    if mask.dtype == np.bool_:
        return np.where(mask, np.float32(0), np.float32(-np.inf))
    given = mask.astype(np.float32)
    with np.errstate(over="ignore"):
        wide = given * LOG2_E
    return np.where(given == -np.inf, given, np.where(wide > -LARGEST, wide, -LARGEST))


def attention_scores(q: ArrayLike, k: ArrayLike, factor: ArrayLike, mask: NDArray[Any] | None, causal: bool) -> F32:
    """i[..., queries, D], i[..., keys, D] -> f32[..., queries, keys] in powers of two: ``float32(q . k) * factor``,
    plus `mask_powers`; with ``causal`` -inf for keys behind the query of their number."""
    products = np.asarray(q, np.float64) @ np.swapaxes(np.asarray(k, np.float64), -1, -2)
    with np.errstate(over="ignore", invalid="ignore"):
        scores: F32 = products.astype(np.float32) * np.asarray(factor, np.float32)
        if mask is not None:
            scores = scores + mask_powers(mask)
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=np.bool_), scores, np.float32(-np.inf))
    return scores


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    mask: NDArray[Any] | None,
    causal: bool,
    factor: ArrayLike,
    ratio: ArrayLike,
    zero_point: int,
    low: int,
    high: int,
) -> I32:
    """i[B, H, queries, D], i[B, G, keys, D], i[B, G, keys, V] -> i32[B, H, queries, V]: levels of
    ``softmax(q k^T * scale + mask) v``; operands are differences from their zero points, ``H / G`` heads share a k, v.

    ``p = probability_levels(scores)`` and ``p v`` is exact in int32; the result is ``clamp(rne(float32(p v) * (ratio /
    float32(sum(p)))) + zero_point, low, high)``, the zero point where no key has a level. factor and ratio: see
    `attention_factors`.
    """
    q, k, v = (np.asarray(x) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    levels = probability_levels(attention_scores(q, k, factor, mask, causal))
    sums = levels.sum(-1, dtype=np.int32, keepdims=True)
    products = (levels.astype(np.float64) @ v.astype(np.float64)).astype(np.int64).astype(np.int32)
    with np.errstate(over="ignore", divide="ignore"):
        share = np.where(sums > 0, np.asarray(ratio, np.float32) / sums.astype(np.float32), np.float32(0))
        return finish(products.astype(np.float32) * share, zero_point, low, high)


SIXTH = np.float32(1 / 6)
NORMAL_RATE = np.float32(0.3275911 / math.sqrt(2))
NORMAL_TERMS = tuple(np.float32(a / 2) for a in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592))
"""Half the complementary error function, Abramowitz and Stegun 7.1.26: highest power of ``1 / (1 + p z)`` first."""
GELU_LINEAR = np.float32(2 * math.sqrt(2 / math.pi))
GELU_CUBIC = np.float32(2 * math.sqrt(2 / math.pi) * 0.044715)

# The functions take infinities: a factor that goes to 0 meets one that is bounded.


def leaky_relu(x: ArrayLike, slope: float) -> F32:
    """f32 -> f32: x above 0, else ``x * float32(slope)``."""
    x = np.asarray(x, np.float32)
    with np.errstate(over="ignore"):
        return np.where(x > 0, x, np.maximum(x, -LARGEST) * np.float32(slope))


def hardsigmoid(x: ArrayLike) -> F32:
    """f32 -> f32: ``min(max(x + 3, 0), 6) * float32(1 / 6)``, within 1e-7 of it."""
    result: F32 = np.clip(np.asarray(x, np.float32) + np.float32(3), np.float32(0), np.float32(6)) * SIXTH
    return result


def hardswish(x: ArrayLike) -> F32:
    """f32 -> f32: ``x * hardsigmoid(x)``, within 2e-7 of it, relative to it."""
    x = np.asarray(x, np.float32)
    result: F32 = np.maximum(x, np.float32(-3)) * hardsigmoid(x)
    return result


def sigmoid(x: ArrayLike) -> F32:
    """f32 -> f32: ``1 / (1 + exp(-x))``, within 2e-7 of it, relative to it; 0 below -87."""
    x = np.asarray(x, np.float32)
    power = exp_negative(-np.abs(x))
    result: F32 = np.where(x < 0, power, np.float32(1)) / (power + np.float32(1))
    return result


def silu(x: ArrayLike) -> F32:
    """f32 -> f32: ``x * sigmoid(x)``, within 3e-7 of it, relative to it; 0 below -87."""
    x = np.asarray(x, np.float32)
    result: F32 = np.maximum(x, LOWEST_EXPONENT) * sigmoid(x)
    return result


def hyperbolic_tangent(x: ArrayLike) -> F32:
    """f32 -> f32: tanh(x) by `expm1_negative` of ``-2 |x|``, within 2e-7 of it, relative to it."""
    x = np.asarray(x, np.float32)
    with np.errstate(over="ignore"):
        fall = expm1_negative(np.float32(-2) * np.abs(x))
    result: F32 = np.where(x < 0, fall, -fall) / (fall + np.float32(2))
    return result


def gelu(x: ArrayLike) -> F32:
    """f32 -> f32: x times the normal distribution up to x, within ``3e-7 * |x|`` of it.

    The tail beyond |x| is ``exp(-x * x / 2)`` times a polynomial in ``1 / (1 + p |x|)``.
    """
    x = np.asarray(x, np.float32)
    with np.errstate(over="ignore"):
        near = np.float32(1) / (np.abs(x) * NORMAL_RATE + np.float32(1))
        power = exp_negative((x * np.float32(-0.5)) * x)
    total = NORMAL_TERMS[0]
    for term in NORMAL_TERMS[1:]:
        total = total * near + term
    tail = (total * near) * power
    result: F32 = np.maximum(x, LOWEST_EXPONENT) * np.where(x < 0, tail, np.float32(1) - tail)
    return result


NEAR_RATE = np.float32(3)
"""Pieces of `near_gelu` in 1."""
NEAR_RATE = np.float32(3)
"""Pieces of `near_gelu` in 1."""
NEAR_END = np.float32(5)
"""Magnitudes from here on count as this, in the middle of the last of 16 pieces."""
NEAR_TERMS = np.array(
    [
        [float.fromhex(term) for term in line.split(",")]
        for line in (
            """
    0x1p-1, 0x1.000f98p-1, 0x1.01ecd2p-1, 0x1.0ab202p-1, 0x1.1b66bap-1, 0x1.289444p-1, 0x1.1ff3b6p-1, 0x1.f0e2c2p-2,
    0x1.74f3f2p-2, 0x1.e385e4p-3, 0x1.0e9182p-3, 0x1.05fe04p-4, 0x1.b8628p-6, 0x1.424da6p-7, 0x1.9c0f8p-9, 0
    """,
            """
    -0x1.988574p-2, -0x1.9a1c52p-2, -0x1.af5682p-2, -0x1.ede6ap-2, -0x1.22322p-1, -0x1.3d3ac4p-1, -0x1.2fc148p-1,
    -0x1.f2b8ccp-2, -0x1.5def9cp-2, -0x1.a53244p-3, -0x1.b50dccp-4, -0x1.88ef62p-5, -0x1.33719p-6, -0x1.a445aep-8,
    -0x1.f77208p-10, 0
    """,
            """
    0x1.d55798p-14, 0x1.c2a298p-8, 0x1.7f84ccp-5, 0x1.eb377ep-4, 0x1.8b5e6ep-3, 0x1.d56cb6p-3, 0x1.b96528p-3,
    0x1.55745ap-3, 0x1.bc9252p-4, 0x1.ee4768p-5, 0x1.d9fa66p-6, 0x1.8ad01p-7, 0x1.1f2dd4p-8, 0x1.6e4604p-10,
    0x1.9ad56ep-12, 0
    """,
            """
    0x1.0d194ap-4, 0x1.c77edep-5, 0x1.e3a5a8p-6, 0x1.5e20acp-13, -0x1.5825ap-6, -0x1.df94bep-6, -0x1.b8c1d8p-6,
    -0x1.3e3a12p-6, -0x1.7dbe26p-7, -0x1.864754p-8, -0x1.58db46p-9, -0x1.09a4b4p-10, -0x1.66ced2p-12,
    -0x1.aa9c26p-14, -0x1.bfc994p-16, 0
    """,
        )
    ],
    np.float32,
)
"""[power, piece]: ``1 - normal distribution of t`` around ``t = piece / NEAR_RATE`` as a polynomial in t, lowest power
first: the least largest error, below 2.3e-6, and 0 in the last piece, where 7e-7 and less are left."""


def near_gelu(x: ArrayLike) -> F32:
    """f32 -> f32: x times the normal distribution up to x, within ``3e-6 * |x|`` of it, for results that become levels.

    That is x or 0, the larger, less the tail beyond |x| times |x|. Of 16 pieces of |x| each has its own polynomial: a
    table of 16 numbers is one register, and looking them up takes less time than the higher powers that one polynomial
    for all would need.
    """
    x = np.asarray(x, np.float32)
    size = np.minimum(np.abs(x), NEAR_END)
    *lower, total = NEAR_TERMS[:, np.rint(size * NEAR_RATE).astype(np.int32)]
    for term in reversed(lower):
        total = total * size + term
    result: F32 = np.where(x < 0, np.float32(0), x) - size * total
    return result


def gelu_tanh(x: ArrayLike) -> F32:
    """f32 -> f32: ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))``, within ``2e-7 * |x|`` of it.

    That is ``x * sigmoid(2 * ...)``.
    """
    x = np.asarray(x, np.float32)
    with np.errstate(over="ignore"):
        inner = x * ((x * x) * GELU_CUBIC + GELU_LINEAR)
    result: F32 = np.maximum(x, LOWEST_EXPONENT) * sigmoid(inner)
    return result


def activate(
    acc: ArrayLike,
    factor: ArrayLike,
    function: Callable[[F32], F32],
    scale: ArrayLike,
    zero_point: int,
    low: int,
    high: int,
    gain: ArrayLike = 1,
) -> I32:
    """i32 accumulators -> i32 levels of a function, rounded once:
    ``clamp(rne((function(float32(acc) * factor) * gain) * (1 / scale)) + zero_point, low, high)``; factor and gain
    broadcast."""
    with np.errstate(over="ignore"):
        real = np.asarray(acc, np.int32).astype(np.float32) * np.asarray(factor, np.float32)
        value = function(real) * np.asarray(gain, np.float32)
        return finish(value * reciprocal(scale), zero_point, low, high)


ROW_STEPS = 127
SMALLEST_ROW = np.float32(2.0**-100)
"""The largest magnitude of a row counts as at least this: both a row's scale and its inverse stay normal."""
ROW_ZERO = 128


def row_peaks(x: ArrayLike) -> F32:
    """f32[..., K] -> f32[..., 1]: the largest magnitude of each row, `SMALLEST_ROW` at least; NaN where the row has a
    NaN or an infinity."""
    magnitudes = np.abs(np.asarray(x, np.float32)).max(-1, keepdims=True, initial=0)
    peaks: F32 = np.where(np.isfinite(magnitudes), np.maximum(magnitudes, SMALLEST_ROW), np.float32(np.nan))
    return peaks


def quantize_rows(x: ArrayLike, peaks: ArrayLike) -> tuple[NDArray[np.uint8], F32]:
    """f32[..., K] and the largest magnitude a of each row -> levels u8[..., K], scales f32[..., 1], made at run time.

    ``a / 127``, and ``clamp(rne(x * (127 / a)), -127, 127) + 128``. Where a is NaN the scale is, and all levels 128:
    everything that is computed of the row is NaN.
    """
    x, peaks = np.asarray(x, np.float32), np.asarray(peaks, np.float32)
    known = np.isfinite(peaks)
    inverse = np.float32(ROW_STEPS) / np.where(known, peaks, np.float32(1))
    steps = np.rint(np.where(known, x, np.float32(0)) * inverse)
    levels = np.clip(steps, np.float32(-ROW_STEPS), np.float32(ROW_STEPS)).astype(np.int32) + ROW_ZERO
    return levels.astype(np.uint8), np.divide(peaks, np.float32(ROW_STEPS), dtype=np.float32)


def dequantize_rows(acc: ArrayLike, rows: ArrayLike, columns: ArrayLike, bias: ArrayLike) -> F32:
    """i32[..., C] of a product with rows of levels -> f32[..., C]: ``float32(acc) * rows * columns + bias``, left to
    right; scales of rows f32[..., 1], of columns f32[C] or one, bias f32[C]."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.asarray(acc, np.int32).astype(np.float32) * np.asarray(rows, np.float32)
        result: F32 = scaled * np.asarray(columns, np.float32) + np.asarray(bias, np.float32)
    return result


TABLE_STEPS = 255
FLATTEST_ROW = np.float32(2.0**-23)
"""A row of a table whose values lie in less than 255 times this has steps of 1."""


def quantize_table(table: ArrayLike) -> tuple[NDArray[np.uint8], F32, F32]:
    """f32[V, D] -> u8[V, D], scales f32[V], zero points f32[V]: every row from its least to its largest value.

    ``s = (most - least) / 255``, 1 where that is no more than `FLATTEST_ROW`; ``z = -least / s``, which is no whole
    number; ``q = clamp(rne(x * (1 / s) + z), 0, 255)``. Bit-equal to torch's per-channel float parameters (tests/ops/
    test_embedding.py). The range of a row need not include 0.
    """
    table = np.asarray(table, np.float32)
    least, most = table.min(1), table.max(1)
    with np.errstate(over="ignore"):
        steps = (most - least) / np.float32(TABLE_STEPS)
    scales: F32 = np.where(steps > FLATTEST_ROW, steps, np.float32(1))
    zeros: F32 = -least / scales
    real = table * (np.float32(1) / scales)[:, None] + zeros[:, None]
    return np.clip(np.rint(real), np.float32(0), np.float32(TABLE_STEPS)).astype(np.uint8), scales, zeros


def dequantize_table(levels: ArrayLike, scales: ArrayLike, zeros: ArrayLike) -> F32:
    """u8[..., D], scales and zero points f32[...] of its rows -> f32[..., D]: ``(float32(q) - z) * s``."""
    real = np.asarray(levels).astype(np.float32) - np.asarray(zeros, np.float32)[..., None]
    result: F32 = real * np.asarray(scales, np.float32)[..., None]
    return result


def zero_point_term(weight: ArrayLike, zero_points: int | Sequence[int], groups: int = 1) -> NDArray[np.int64]:
    """i64[C]: ``sum(zero_point * w)`` of each output channel, for one zero point or one per input channel.

    The weight is [outputs, inputs of a group, taps...].
    """
    w, different = np.asarray(weight), np.unique(zero_points)
    if len(different) == 1:  # one pass over the weight, which is most of the time it takes to load a model
        once: NDArray[np.int64] = int(different[0]) * w.reshape(len(w), -1).sum(1, np.int64)
        return once
    sums = w.reshape(*w.shape[:2], -1).sum(2, np.int64)
    zeros = np.broadcast_to(np.asarray(zero_points, np.int64), groups * sums.shape[1])
    total: NDArray[np.int64] = (sums.reshape(groups, -1, sums.shape[1]) * zeros.reshape(groups, 1, -1)).sum(2).ravel()
    return total


def accumulator_bound(
    weight: ArrayLike, bias: ArrayLike, qmin: int, qmax: int, zero_points: int | Sequence[int], groups: int = 1
) -> NDArray[np.int64]:
    """i64[C]: the largest |accumulator| a channel can reach, zero-point term folded into the bias or not.

    ``|bias - zp * sum(w)| + max|q| * sum|w|`` bounds the folded form that kernels use, ``|bias| + max|q - zp| *
    sum|w|`` the plain one. Below 2^31 the result is exact, though partial sums may wrap.
    """
    w, b = np.asarray(weight).reshape(np.shape(weight)[0], -1), np.asarray(bias, np.int64)
    above, below = np.maximum(w, 0).sum(1, np.int64), np.minimum(w, 0).sum(1, np.int64)
    total = above - below
    folded = np.abs(b - zero_point_term(weight, zero_points, groups)) + max(abs(qmin), abs(qmax)) * total
    plain = np.abs(b) + max(abs(qmin - np.max(zero_points)), abs(qmax - np.min(zero_points))) * total
    bound: NDArray[np.int64] = np.maximum(folded, plain)
    return bound
