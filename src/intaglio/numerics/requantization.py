"""Integer operators between quantized tensors: requantize, add, affine, layer norm, lookup tables, 16-bit values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from intaglio.numerics.rounding import Affine, FloatArray, Int32Array, dequantize, quantize, reciprocal, round_clamp_i32


def requantize(acc: ArrayLike, factor: ArrayLike, zero_point: int, low: int, high: int) -> Int32Array:
    """Requantize i32 accumulators: ``clamp(rne(float32(acc) * factor) + zero_point, low, high)``; factor broadcasts.

    Products beyond +-2^30 are clamped in float first, which cannot change the result.
    """
    with np.errstate(over="ignore"):
        steps = np.asarray(acc, np.int32).astype(np.float32) * np.asarray(factor, np.float32)
    return round_clamp_i32(steps, zero_point, low, high)


def add_requantize(
    a: ArrayLike, factor_a: ArrayLike, b: ArrayLike, factor_b: ArrayLike, zero_point: int, low: int, high: int
) -> Int32Array:
    """Return ``clamp(rne(float32(a) * factor_a + float32(b) * factor_b) + zero_point, low, high)`` as i32.

    The sum is computed without fused multiply-add.

    Args:
        a: An accumulator or ``q_a - zp_a``.
        factor_a: The `multiplier` of ``scale * alpha`` in float64, where alpha is that of ``a + alpha * b``: one number
            or one per channel.
        b: ``q_b - zp_b``.
        factor_b: As ``factor_a``.
        zero_point: Zero point of the result.
        low: Smallest quantized value of the result.
        high: Largest quantized value of the result.
    """
    with np.errstate(over="ignore"):
        left = np.asarray(a, np.int32).astype(np.float32) * np.asarray(factor_a, np.float32)
        right = np.asarray(b, np.int32).astype(np.float32) * np.asarray(factor_b, np.float32)
        return round_clamp_i32(left + right, zero_point, low, high)


def affine_requantize(
    x: ArrayLike, factor: ArrayLike, offset: ArrayLike, zero_point: int, low: int, high: int
) -> Int32Array:
    """Return ``clamp(rne(float32(x) * factor + offset) + zero_point, low, high)``; x is ``q - zp``.

    Product and sum are rounded separately (no fused multiply-add).
    """
    with np.errstate(over="ignore"):
        steps = np.asarray(x, np.int32).astype(np.float32) * np.asarray(factor, np.float32)
        return round_clamp_i32(steps + np.asarray(offset, np.float32), zero_point, low, high)


def layer_norm(
    x: ArrayLike, factor: ArrayLike, offset: ArrayLike, eps: ArrayLike, zero_point: int, low: int, high: int
) -> Int32Array:
    """Return the layer norm of i32[..., C], quantized values less their zero point, as quantized values of the result.

    ``n1 = sum(x)`` and ``n2 = sum(x * x)`` are exact. The mean is ``float32(n1) / float32(C)``, the variance
    ``float32(C * n2 - n1 * n1) / float32(C * C)``, ``inverse = 1 / sqrt(variance + eps)``, and the result
    ``clamp(rne((x - mean) * inverse * factor + offset) + zero_point, low, high)``, evaluated from left to right.
    ``eps`` is in squared steps of x, ``factor`` and ``offset`` are in steps of the result. Ba et al. 2016.
    """
    wide = np.asarray(x, np.int64)
    count = wide.shape[-1]
    first, second = wide.sum(-1, keepdims=True), (wide * wide).sum(-1, keepdims=True)
    mean = first.astype(np.float32) / np.float32(count)
    variance = (count * second - first * first).astype(np.float32) / np.float32(count * count)
    inverse = np.float32(1) / np.sqrt(variance + np.asarray(eps, np.float32))
    with np.errstate(over="ignore", invalid="ignore"):
        normal = (wide.astype(np.float32) - mean) * inverse
        return round_clamp_i32(
            normal * np.asarray(factor, np.float32) + np.asarray(offset, np.float32), zero_point, low, high
        )


def activate(
    acc: ArrayLike,
    factor: ArrayLike,
    function: Callable[[FloatArray], FloatArray],
    scale: ArrayLike,
    zero_point: int,
    low: int,
    high: int,
    gain: ArrayLike = 1,
) -> Int32Array:
    """Apply a float function to dequantized i32 accumulators and quantize the result, rounding once.

    ``clamp(rne((function(float32(acc) * factor) * gain) * (1 / scale)) + zero_point, low, high)``; ``factor`` and
    ``gain`` broadcast.
    """
    with np.errstate(over="ignore"):
        real = np.asarray(acc, np.int32).astype(np.float32) * np.asarray(factor, np.float32)
        value = function(real) * np.asarray(gain, np.float32)
        return round_clamp_i32(value * reciprocal(scale), zero_point, low, high)


QUANT_STEPS = 255
"""Steps of a 16-bit value in one step of its 8-bit value. It is odd, so that no 16-bit value is halfway between two."""


def widen_to_16bit(scale: float, zero_point: int) -> Affine:
    """Return the 16-bit parameters for a value with the 8-bit parameters (scale, zero_point).

    A 16-bit value is ``q16 = 255 * q8 + remainder`` with a remainder in 0..254. Its scale is ``float32(scale / 255)``,
    its zero point ``255 * zero_point + 127``. Quantizing ``dequantize(q16)`` with the 8-bit parameters gives ``q16 //
    255``.
    """
    return Affine(
        float(np.float32(np.float64(np.float32(scale)) / QUANT_STEPS)), QUANT_STEPS * zero_point + QUANT_STEPS // 2
    )


def split_16bit(q16: ArrayLike) -> tuple[Int32Array, Int32Array]:
    """Split 16-bit values into their 8-bit value ``q16 // 255`` and the remainder ``q16 % 255``."""
    quantized, remainder = np.divmod(np.asarray(q16, np.int32), np.int32(QUANT_STEPS))
    return quantized, remainder


def join_16bit(quantized: ArrayLike, remainder: ArrayLike) -> Int32Array:
    """Return ``255 * quantized + remainder``, the inverse of `split_16bit`.

    Given differences from the zero points of both parts, the result is the difference from the 16-bit zero point.
    """
    together: Int32Array = QUANT_STEPS * np.asarray(quantized, np.int32) + np.asarray(remainder, np.int32)
    return together


def requantize_lut(scale_x: float, zero_x: int, scale_y: float, zero_y: int, low: int, high: int) -> NDArray[np.uint8]:
    """Return the lookup table u8[256] that changes quantization parameters: `quantize` of `dequantize`."""
    quantized = np.arange(256, dtype=np.int32)
    return quantize(dequantize(quantized, scale_x, zero_x), scale_y, zero_y, low, high).astype(np.uint8)


class GridParameters(Protocol):
    """Quantization parameters that a lookup table is computed from; `intaglio.ir.QParams` implements the protocol."""

    @property
    def step(self) -> float:
        """Return the scale."""

    @property
    def zero(self) -> int:
        """Return the zero point."""

    @property
    def qmin(self) -> int:
        """Return the smallest quantized value."""

    @property
    def qmax(self) -> int:
        """Return the largest quantized value."""


def function_lut(
    function: Callable[[NDArray[np.float64]], ArrayLike], x: GridParameters, y: GridParameters
) -> NDArray[np.uint8]:
    """Return the lookup table u8[256] of an elementwise function between two quantized tensors.

    ``function`` is evaluated in float64 at the dequantized float32 values of ``x``; its results are quantized for
    ``y``.
    """
    quantized = np.arange(256, dtype=np.int32)
    with np.errstate(all="ignore"):
        result = np.asarray(function(dequantize(quantized, x.step, x.zero).astype(np.float64))).astype(np.float32)
    return quantize(result, y.step, y.zero, y.qmin, y.qmax).astype(np.uint8)
