"""Levels whose scales are made while the model runs, one for each row of the last axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from intaglio import numerics
from intaglio.ir import Op, QParams, Ref, Rows, Shape, TensorType
from intaglio.ops.opdef import Attrs, OpDef

ROW_MODES = ("token", "tensor")
"""What has a scale of its own: a row of the last axis, or an entry of the batch, whose rows then share one."""


def row_levels(scales: str) -> QParams:
    """Parameters of u8 levels whose scales are the value of this name."""
    zero = numerics.ROW_ZERO
    return QParams(Ref(scales), (zero,), zero - numerics.ROW_STEPS, zero + numerics.ROW_STEPS, Rows())


def row_accumulator(scales: str) -> QParams:
    """Parameters of an accumulator that such levels and a weight make."""
    return QParams(Ref(scales), (0,), -(2**31), 2**31 - 1, Rows())


def scales_shape(shape: Shape) -> Shape:
    return (*shape[:-1], 1)


def levels_of_rows(x: np.ndarray, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """f32[..., K] -> u8[..., K], f32[..., 1]. A row's levels depend on no other entry of the batch."""
    peaks = numerics.row_peaks(x)
    if mode == "tensor" and x.ndim > 2:
        peaks = np.broadcast_to(peaks.max(tuple(range(1, x.ndim)), keepdims=True, initial=0), peaks.shape)
    return numerics.quantize_rows(x, peaks)


def quantize_rows_meaning(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> tuple[np.ndarray, ...]:
    return levels_of_rows(args[0], op.attrs["mode"])


def dequantize_rows_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    return shapes[0]


def dequantize_rows_meaning(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> np.ndarray:
    return numerics.dequantize_rows(*args)


QUANTIZE_ROWS = OpDef(name="quantize_rows", meaning=quantize_rows_meaning, kernel="rows")
DEQUANTIZE_ROWS = OpDef(
    name="dequantize_rows",
    operands=("acc", "rows", "columns", "bias"),
    meaning=dequantize_rows_meaning,
    kernel="matmul",
)
OPS = (QUANTIZE_ROWS, DEQUANTIZE_ROWS)
