"""Activation functions in float32, in the order of operations that `native/base/functions.h` repeats bit for bit."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from intaglio.numerics.rounding import LARGEST, FloatArray

LOWEST_EXPONENT = np.float32(-87)
"""`exp_negative` returns 0 below this; the results would soon be denormal float32."""

LOG2_E = np.float32(1.44269502162933349609375)

LN2_HIGH = np.float32(0.693359375)

LN2_LOW = np.float32(-2.12194441701285541057586669921875e-4)
"""ln 2 in two parts: products of `LN2_HIGH` with integers up to 2^15 are exact."""

EXP_TERMS = tuple(
    np.float32(float.fromhex(term))
    for term in ("0x1.6a23cep-10", "0x1.123a2p-7", "0x1.5558f2p-5", "0x1.555492p-3", "0x1.fffffcp-2")
)
"""Coefficients of r^6 ... r^2 of the polynomial for exp(r) with the least relative error on |r| <= ln(2)/2."""

LANES = 16


def exp_negative(x: ArrayLike) -> FloatArray:
    """Return exp(x) for f32 x <= 0, with a relative error of at most 1e-7; 0 below -87.

    ``2^n * exp(x - n * ln 2)`` with ``n = rne(x / ln 2)`` and a polynomial in float32, without fused multiply-add.
    """
    x = np.asarray(x, np.float32)
    rise, power = _exp_parts(x)
    return np.where(x < LOWEST_EXPONENT, np.float32(0), (rise + np.float32(1)) * power)


def expm1_negative(x: ArrayLike) -> FloatArray:
    """Return exp(x) - 1 for f32 x <= 0, with a relative error of at most 1e-7."""
    rise, power = _exp_parts(np.asarray(x, np.float32))
    result: FloatArray = rise * power + (power - np.float32(1))
    return result


def _exp_parts(x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return ``r`` and a power of two with ``exp(x) = (r + 1) * power``, for x in [-87, 0]; smaller x count as -87."""
    bounded = np.maximum(x, LOWEST_EXPONENT)
    n: FloatArray = np.rint(bounded * LOG2_E)
    r: FloatArray = (bounded - n * LN2_HIGH) - n * LN2_LOW
    total = np.full_like(r, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        total = total * r + term
    return total * (r * r) + r, ((n.astype(np.int32) + 127) << 23).view(np.float32)


SIXTH = np.float32(1 / 6)

NORMAL_RATE = np.float32(0.3275911 / math.sqrt(2))

NORMAL_TERMS = tuple(np.float32(a / 2) for a in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592))
"""Coefficients of half the complementary error function, Abramowitz and Stegun 7.1.26, highest power of ``1 / (1 + p
z)`` first.
"""

GELU_LINEAR = np.float32(2 * math.sqrt(2 / math.pi))

GELU_CUBIC = np.float32(2 * math.sqrt(2 / math.pi) * 0.044715)


def leaky_relu(x: ArrayLike, slope: float) -> FloatArray:
    """Return f32 x where it is positive, else ``x * float32(slope)``."""
    x = np.asarray(x, np.float32)
    with np.errstate(over="ignore"):
        return np.where(x > 0, x, np.maximum(x, -LARGEST) * np.float32(slope))


def hardsigmoid(x: ArrayLike) -> FloatArray:
    """Return ``min(max(x + 3, 0), 6) * float32(1 / 6)`` of f32 x, within 1e-7 of hardsigmoid."""
    result: FloatArray = np.clip(np.asarray(x, np.float32) + np.float32(3), np.float32(0), np.float32(6)) * SIXTH
    return result


def hardswish(x: ArrayLike) -> FloatArray:
    """Return ``x * hardsigmoid(x)`` of f32 x, with a relative error of at most 2e-7."""
    x = np.asarray(x, np.float32)
    result: FloatArray = np.maximum(x, np.float32(-3)) * hardsigmoid(x)
    return result


def sigmoid(x: ArrayLike) -> FloatArray:
    """Return ``1 / (1 + exp(-x))`` of f32 x, with a relative error of at most 2e-7; 0 below -87."""
    x = np.asarray(x, np.float32)
    power = exp_negative(-np.abs(x))
    result: FloatArray = np.where(x < 0, power, np.float32(1)) / (power + np.float32(1))
    return result


def silu(x: ArrayLike) -> FloatArray:
    """Return ``x * sigmoid(x)`` of f32 x, with a relative error of at most 3e-7; 0 below -87."""
    x = np.asarray(x, np.float32)
    result: FloatArray = np.maximum(x, LOWEST_EXPONENT) * sigmoid(x)
    return result


def tanh_f32(x: ArrayLike) -> FloatArray:
    """Return tanh(x) of f32 x from `expm1_negative` of ``-2 |x|``, with a relative error of at most 2e-7."""
    x = np.asarray(x, np.float32)
    with np.errstate(over="ignore"):
        exp_minus_1 = expm1_negative(np.float32(-2) * np.abs(x))
    result: FloatArray = np.where(x < 0, exp_minus_1, -exp_minus_1) / (exp_minus_1 + np.float32(2))
    return result


def gelu(x: ArrayLike) -> FloatArray:
    """Return x times the standard normal CDF at x, f32, within ``3e-7 * |x|`` of it.

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
    result: FloatArray = np.maximum(x, LOWEST_EXPONENT) * np.where(x < 0, tail, np.float32(1) - tail)
    return result


GELU_APPROX_PIECES = np.float32(3)
"""Number of pieces of `gelu_approx` per unit of |x|."""

GELU_APPROX_END = np.float32(5)
"""Larger magnitudes are clamped to this, the middle of the last of 16 pieces."""

GELU_APPROX_TERMS = np.array(
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
"""[power, piece]: coefficients of ``1 - normal CDF`` near ``t = piece / GELU_APPROX_PIECES`` as a polynomial in t.

Powers ascend. The polynomials minimize the largest error, which is below 2.3e-6. The last piece is 0, where the true
value is at most 7e-7.
"""


def gelu_approx(x: ArrayLike) -> FloatArray:
    """Return an approximation of `gelu` within ``3e-6 * |x|``, for results that are then quantized to 8 bits.

    It is ``max(x, 0)`` less |x| times the tail beyond |x|. Each of 16 pieces of |x| has its own polynomial: a table of
    16 numbers fits into one vector register, and a lookup costs less than the higher powers that a single polynomial
    would need.
    """
    x = np.asarray(x, np.float32)
    size = np.minimum(np.abs(x), GELU_APPROX_END)
    *lower, total = GELU_APPROX_TERMS[:, np.rint(size * GELU_APPROX_PIECES).astype(np.int32)]
    for term in reversed(lower):
        total = total * size + term
    result: FloatArray = np.where(x < 0, np.float32(0), x) - size * total
    return result


def gelu_tanh(x: ArrayLike) -> FloatArray:
    """Return ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`` of f32 x, within ``2e-7 * |x|`` of it.

    It is computed as ``x * sigmoid(2 * ...)``.
    """
    x = np.asarray(x, np.float32)
    with np.errstate(over="ignore"):
        inner = x * ((x * x) * GELU_CUBIC + GELU_LINEAR)
    result: FloatArray = np.maximum(x, LOWEST_EXPONENT) * sigmoid(inner)
    return result
