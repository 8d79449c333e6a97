"""Quantize each row of a tensor by itself: activations per token at run time, embedding tables per row."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from intaglio.numerics.rounding import FloatArray

ROW_STEPS = 127

SMALLEST_ROW = np.float32(2.0**-100)
"""The largest magnitude of a row counts as at least this: both a row's scale and its inverse stay normal."""

ROW_ZERO = 128


def row_peaks(x: ArrayLike) -> FloatArray:
    """f32[..., K] -> f32[..., 1]: the largest magnitude of each row, `SMALLEST_ROW` at least; NaN where the row has a
    NaN or an infinity.
    """
    magnitudes = np.abs(np.asarray(x, np.float32)).max(-1, keepdims=True, initial=0)
    peaks: FloatArray = np.where(np.isfinite(magnitudes), np.maximum(magnitudes, SMALLEST_ROW), np.float32(np.nan))
    return peaks


def quantize_rows(x: ArrayLike, peaks: ArrayLike) -> tuple[NDArray[np.uint8], FloatArray]:
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


def dequantize_rows(acc: ArrayLike, rows: ArrayLike, columns: ArrayLike, bias: ArrayLike) -> FloatArray:
    """i32[..., C] of a product with rows of levels -> f32[..., C]: ``float32(acc) * rows * columns + bias``, left to
    right; scales of rows f32[..., 1], of columns f32[C] or one, bias f32[C].
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.asarray(acc, np.int32).astype(np.float32) * np.asarray(rows, np.float32)
        result: FloatArray = scaled * np.asarray(columns, np.float32) + np.asarray(bias, np.float32)
    return result


TABLE_STEPS = 255

FLATTEST_ROW = np.float32(2.0**-23)
"""A row of a table whose values lie in less than 255 times this has steps of 1."""


def quantize_table(table: ArrayLike) -> tuple[NDArray[np.uint8], FloatArray, FloatArray]:
    """f32[V, D] -> u8[V, D], scales f32[V], zero points f32[V]: every row from its least to its largest value.

    ``s = (most - least) / 255``, 1 where that is no more than `FLATTEST_ROW`; ``z = -least / s``, which is no whole
    number; ``q = clamp(rne(x * (1 / s) + z), 0, 255)``. Bit-equal to torch's per-channel float parameters (tests/ops/
    test_embedding.py). The range of a row need not include 0.
    """
    table = np.asarray(table, np.float32)
    least, most = table.min(1), table.max(1)
    with np.errstate(over="ignore"):
        steps = (most - least) / np.float32(TABLE_STEPS)
    scales: FloatArray = np.where(steps > FLATTEST_ROW, steps, np.float32(1))
    zeros: FloatArray = -least / scales
    real = table * (np.float32(1) / scales)[:, None] + zeros[:, None]
    return np.clip(np.rint(real), np.float32(0), np.float32(TABLE_STEPS)).astype(np.uint8), scales, zeros


def dequantize_table(levels: ArrayLike, scales: ArrayLike, zeros: ArrayLike) -> FloatArray:
    """u8[..., D], scales and zero points f32[...] of its rows -> f32[..., D]: ``(float32(q) - z) * s``."""
    real = np.asarray(levels).astype(np.float32) - np.asarray(zeros, np.float32)[..., None]
    result: FloatArray = real * np.asarray(scales, np.float32)[..., None]
    return result
