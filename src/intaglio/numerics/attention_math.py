"""Attention between quantized tensors: scores as base-2 exponents, 8-bit probabilities, exact sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from intaglio.numerics.activations import LOG2_E
from intaglio.numerics.rounding import LARGEST, FloatArray
from intaglio.numerics.scales import accumulator_scale, multiplier

LOWEST_SCORE = np.float32(-12)
"""Scores this far or farther below the largest of their row get probability 0: 255 * 2^-12 is less than 0.07."""

PROBABILITY_TERMS = tuple(
    np.float32(float.fromhex(term)) for term in ("0x1.c232b0p+3", "0x1.eeed58p+5", "0x1.61902ap+7", "0x1.fdf69cp+7")
)
"""Coefficients of f^3 ... f^0 in 255 * 2^f with the least relative error (7.5e-5) on |f| <= 1/2."""


def quantize_probabilities(x: ArrayLike) -> NDArray[np.uint8]:
    """Quantize the unnormalized softmax of scores f32[..., keys] to u8[..., keys]: ``rne(255 * 2^(x - max(x)))``.

    The error before rounding is at most 0.02. A NaN score is never the largest and gets probability 0. All
    probabilities of a row are 0 if its largest score is infinite or if it has no keys.
    """
    x = np.asarray(x, np.float32)
    top = np.fmax.reduce(x, axis=-1, keepdims=True, initial=np.float32(-np.inf))
    with np.errstate(invalid="ignore", over="ignore"):
        below = x - top
        power = np.where(below > LOWEST_SCORE, below, LOWEST_SCORE)
    n = np.rint(power)
    f = power - n
    total = np.full_like(f, PROBABILITY_TERMS[0])
    for term in PROBABILITY_TERMS[1:]:
        total = total * f + term
    quantized: NDArray[np.uint8] = np.rint(np.ldexp(total, n.astype(np.int32))).astype(np.uint8)
    return quantized


def attention_factors(inputs: Sequence[float], scale_y: float, scale: float) -> tuple[np.float32, np.float32]:
    """Return ``float32(s_q * s_k * scale / ln 2)`` and ``float32(s_v / s_y)``, computed in float64; see `attention`.

    Args:
        inputs: Scales of q, k and v.
        scale_y: Scale of the result; 1 for float results.
        scale: Factor that scores are multiplied by, usually ``1 / sqrt(D)``.
    """
    scale_q, scale_k, scale_v = inputs
    factor = np.float32(accumulator_scale(scale_q, scale_k) * np.float64(scale) / math.log(2))
    return factor, np.float32(multiplier(np.float64(np.float32(scale_v)), scale_y))


def mask_powers(mask: NDArray[Any]) -> FloatArray:
    """Return the term that a mask adds to base-2 scores: 0 or -inf for a bool mask, else ``mask * LOG2_E``.

    Products of a float mask are clamped at the least finite float32, except for -inf itself.
    """
    if mask.dtype == np.bool_:
        return np.where(mask, np.float32(0), np.float32(-np.inf))
    given = mask.astype(np.float32)
    with np.errstate(over="ignore"):
        wide = given * LOG2_E
    return np.where(given == -np.inf, given, np.where(wide > -LARGEST, wide, -LARGEST))


def attention_scores(
    q: ArrayLike, k: ArrayLike, factor: ArrayLike, mask: NDArray[Any] | None, causal: bool
) -> FloatArray:
    """Return base-2 scores f32[..., queries, keys]: ``float32(q . k) * factor`` plus `mask_powers`.

    With ``causal``, keys after the query of the same index get -inf.

    Args:
        q: Queries less their zero point, i[..., queries, D].
        k: Keys less their zero point, i[..., keys, D].
        factor: First of `attention_factors`.
        mask: Float or bool mask that broadcasts against the scores, or ``None``.
        causal: Mask keys after the query.
    """
    products = np.asarray(q, np.float64) @ np.swapaxes(np.asarray(k, np.float64), -1, -2)
    with np.errstate(over="ignore", invalid="ignore"):
        scores: FloatArray = products.astype(np.float32) * np.asarray(factor, np.float32)
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
) -> FloatArray:
    """Return ``softmax(q k^T * scale + mask) v`` as f32[B, H, queries, V], in units of the result's scale.

    ``p = quantize_probabilities(scores)``, and ``p v`` is exact in int32. The result is ``float32(p v) * (ratio /
    float32(sum(p)))``; it is 0 where every probability is 0.

    Args:
        q: Queries less their zero point, i[B, H, queries, D].
        k: Keys less their zero point, i[B, G, keys, D]; ``H / G`` heads share a key (grouped-query attention).
        v: Values less their zero point, i[B, G, keys, V].
        mask: Float or bool mask, or ``None``.
        causal: Mask keys after the query.
        factor: First of `attention_factors`.
        ratio: Second of `attention_factors`.
    """
    q, k, v = (np.asarray(x) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    quantized = quantize_probabilities(attention_scores(q, k, factor, mask, causal))
    sums = quantized.sum(-1, dtype=np.int32, keepdims=True)
    products = (quantized.astype(np.float64) @ v.astype(np.float64)).astype(np.int64).astype(np.int32)
    with np.errstate(over="ignore", divide="ignore"):
        share = np.where(sums > 0, np.asarray(ratio, np.float32) / sums.astype(np.float32), np.float32(0))
        result: FloatArray = products.astype(np.float32) * share
    return result
