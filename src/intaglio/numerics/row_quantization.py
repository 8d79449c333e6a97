"""Per-row quantization: activations per token at run time (dynamic quantization), and embedding tables per row."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from intaglio.numerics.rounding import FloatArray

ROW_STEPS = 127

MIN_ROW_ABSMAX = np.float32(2.0**-100)
"""Lower bound of a row's largest magnitude; both the scale of a row and its inverse stay normal float32."""

ROW_ZERO = 128


def row_absmax(x: ArrayLike) -> FloatArray:
    """Return the largest magnitude f32[..., 1] of each row of f32[..., K], at least `MIN_ROW_ABSMAX`.

    It is NaN for a row with a NaN or an infinity.
    """
    magnitudes = np.abs(np.asarray(x, np.float32)).max(-1, keepdims=True, initial=0)
    peaks: FloatArray = np.where(np.isfinite(magnitudes), np.maximum(magnitudes, MIN_ROW_ABSMAX), np.float32(np.nan))
    return peaks


def quantize_rows(x: ArrayLike, peaks: ArrayLike) -> tuple[NDArray[np.uint8], FloatArray]:
    """Quantize each row of f32[..., K] with its own scale, as dynamic per-token quantization does.

    The scale is ``a / 127`` and the quantized values are ``clamp(rne(x * (127 / a)), -127, 127) + 128``, where a is the
    row's largest magnitude. If a is NaN, the scale is NaN and all quantized values are 128, so that every result
    computed from the row is NaN.

    Args:
        x: Values f32[..., K].
        peaks: Largest magnitude f32[..., 1] of each row, from `row_absmax`.

    Returns:
        Quantized values u8[..., K] and scales f32[..., 1].
    """
    x, peaks = np.asarray(x, np.float32), np.asarray(peaks, np.float32)
    known = np.isfinite(peaks)
    inverse = np.float32(ROW_STEPS) / np.where(known, peaks, np.float32(1))
    steps = np.rint(np.where(known, x, np.float32(0)) * inverse)
    quantized = np.clip(steps, np.float32(-ROW_STEPS), np.float32(ROW_STEPS)).astype(np.int32) + ROW_ZERO
    return quantized.astype(np.uint8), np.divide(peaks, np.float32(ROW_STEPS), dtype=np.float32)


def dequantize_rows(acc: ArrayLike, rows: ArrayLike, columns: ArrayLike, bias: ArrayLike) -> FloatArray:
    """Dequantize the i32[..., C] result of a GEMM with dynamically quantized rows to f32[..., C].

    ``float32(acc) * rows * columns + bias`` is evaluated from left to right. ``rows`` f32[..., 1] are the scales of
    tokens, ``columns`` f32[C] or one number those of output channels, ``bias`` is f32[C].
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.asarray(acc, np.int32).astype(np.float32) * np.asarray(rows, np.float32)
        result: FloatArray = scaled * np.asarray(columns, np.float32) + np.asarray(bias, np.float32)
    return result


TABLE_STEPS = 255
TABLE_ROWS = 1024
"""Rows of a table that are quantized at once, so that intermediate results stay small."""

MIN_TABLE_SCALE = np.float32(2.0**-23)
"""Smallest scale of a row of a table; a row with a smaller range gets scale 1."""


def quantize_table(table: ArrayLike) -> tuple[NDArray[np.uint8], FloatArray, FloatArray]:
    """Quantize each row of an embedding table f32[V, D] over its own range [least, most].

    ``s = (most - least) / 255``, or 1 if that is at most `MIN_TABLE_SCALE`; ``z = -least / s`` is a float zero point;
    ``q = clamp(rne(x * (1 / s) + z), 0, 255)``. The result is bit-equal to torch's per-channel float parameters
    (tests/ops/test_embedding.py). The range of a row need not include 0.

    Returns:
        Quantized values u8[V, D], scales f32[V] and zero points f32[V].
    """
    table = np.asarray(table, np.float32)
    least, most = table.min(1), table.max(1)
    with np.errstate(over="ignore"):
        steps = (most - least) / np.float32(TABLE_STEPS)
    scales: FloatArray = np.where(steps > MIN_TABLE_SCALE, steps, np.float32(1))
    zeros: FloatArray = -least / scales
    quantized, inverses = np.empty(table.shape, np.uint8), np.float32(1) / scales
    for start in range(0, len(table), TABLE_ROWS):
        here = slice(start, start + TABLE_ROWS)
        real = table[here] * inverses[here, None] + zeros[here, None]
        quantized[here] = np.clip(np.rint(real), np.float32(0), np.float32(TABLE_STEPS)).astype(np.uint8)
    return quantized, scales, zeros


def dequantize_table(quantized: ArrayLike, scales: ArrayLike, zeros: ArrayLike) -> FloatArray:
    """Dequantize rows u8[..., D] to f32[..., D]: ``(float32(q) - z) * s``; scales and zero points are f32[...]."""
    real = np.asarray(quantized).astype(np.float32) - np.asarray(zeros, np.float32)[..., None]
    result: FloatArray = real * np.asarray(scales, np.float32)[..., None]
    return result
