"""Dynamic quantization: uint8 values whose scales are computed at run time, one per token (row of the last axis)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from intaglio import numerics
from intaglio.ir import Graph, Op, PerRow, QParams, Ref, Shape, TensorType
from intaglio.ir.types import F32, I32, I64, U8
from intaglio.ir.verify import TypeRule
from intaglio.ops.opdef import Layout, OpDef, Tail
from intaglio.ops.products.grouped_linear import is_read_by_groups, of_each_row

ROW_MODES = ("token", "tensor")
"""Granularity of the scales: one per token (row of the last axis), or one per entry of the batch."""


def per_token_qparams(scales: str) -> QParams:
    """Return the parameters of uint8 values whose scales are the value with this name."""
    zero = numerics.ROW_ZERO
    return QParams(Ref(scales), (zero,), zero - numerics.ROW_STEPS, zero + numerics.ROW_STEPS, PerRow())


def per_token_accumulator_qparams(scales: str) -> QParams:
    """Return the parameters of the accumulator of such values times a quantized weight."""
    return QParams(Ref(scales), (0,), -(2**31), 2**31 - 1, PerRow())


def scales_shape(shape: Shape) -> Shape:
    """Return the shape of the scales of a tensor, one per row of the last axis."""
    return (*shape[:-1], 1)


def quantize_dynamic(x: np.ndarray, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantize f32[..., K] dynamically; return u8[..., K] and scales f32[..., 1].

    The quantized values of a row do not depend on other entries of the batch.
    """
    peaks = numerics.row_absmax(x)
    if mode == "tensor" and x.ndim > 2:
        peaks = np.broadcast_to(peaks.max(tuple(range(1, x.ndim)), keepdims=True, initial=0), peaks.shape)
    return numerics.quantize_rows(x, peaks)


def quantize_rows_reference(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> tuple[np.ndarray, ...]:
    """Quantize dynamically; return quantized values and scales."""
    return quantize_dynamic(args[0], op.attrs["mode"])


def dequantize_rows_reference(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> np.ndarray:
    """Compute `numerics.dequantize_rows`; with ends of groups, with the scales and biases of each row's group."""
    acc, rows, columns, bias, *ends = args
    if not ends:
        return numerics.dequantize_rows(acc, rows, columns, bias)
    columns, bias = (of_each_row(values, ends[0], len(acc)) for values in (np.broadcast_to(columns, bias.shape), bias))
    inside = of_each_row(np.ones(1, bool), ends[0], len(acc))
    return np.where(inside, numerics.dequantize_rows(acc, rows, columns, bias), np.float32(0))


def valid_per_token_values(op: Op, graph: Graph) -> None:
    """Check that quantized values refer to the scales that are computed with them."""
    kinds = [graph.types[name] for name in (*op.inputs, *op.outputs)]
    shapes = [kind.shape for kind in kinds]
    expected = [shapes[0], scales_shape(shapes[0])]
    if not shapes[0] or shapes[1:] != expected or kinds[1].q != per_token_qparams(op.outputs[1]):
        raise ValueError(
            f"%{op.output}: quantize_rows expects quantized values and per-token scales of x {kinds[0]}, "
            f"but gives {kinds[1]} and {kinds[2]}"
        )
    if op.attrs.get("mode") not in ROW_MODES or not isinstance(shapes[0][-1], int):
        raise ValueError(
            f"quantize_rows expects a last axis of fixed size and a mode of {ROW_MODES}, "
            f"but got {kinds[0]} with {dict(op.attrs)}"
        )


def computes_row_scales(op: Op) -> bool:
    """Return whether an operator computes quantized values together with the scales of their rows."""
    return op.kind == QUANTIZE_ROWS.name


def valid_row_accumulator(op: Op, graph: Graph) -> None:
    """Check that an accumulator has the scales of its rows, and that there is a constant scale and bias per column."""
    acc, scales, columns, bias, *ends = (graph.types[name] for name in op.inputs)
    maker = graph.makers().get(op.inputs[1])
    made = maker is not None and computes_row_scales(maker) and maker.outputs[1] == op.inputs[1]
    if not made or acc.q != per_token_accumulator_qparams(op.inputs[1]) or scales.shape != scales_shape(acc.shape):
        raise ValueError(
            f"%{op.output}: the accumulator {acc} does not belong to the per-token scales %{op.inputs[1]} {scales}"
        )
    constant = all(name in graph.constants for name in op.inputs[2:4])
    wanted = (acc.shape[1] * ends[0].shape[0],) if ends else acc.shape[-1:]
    if not constant or bias.shape != wanted or columns.shape not in ((1,), bias.shape):
        raise ValueError(
            f"%{op.output}: expected a constant scale and bias per column of {acc}, but got {columns} and {bias}"
        )
    if ends and not is_read_by_groups(op.inputs[0], op.inputs[4], graph):
        raise ValueError(f"%{op.output}: {acc} is not an accumulator of the groups %{op.inputs[4]}")


QUANTIZE_ROWS = OpDef(
    name="quantize_rows",
    reference=quantize_rows_reference,
    types=TypeRule(((F32,),), (U8, F32), outputs=(2, 2)),
    validate=valid_per_token_values,
    results_differ=True,
    layout=Layout.ROW_MAJOR,
    reads_any_strides=True,
    kernel="rows",
)
DEQUANTIZE_ROWS = OpDef(
    name="dequantize_rows",
    operands=("acc", "rows", "columns", "bias", "ends"),
    reference=dequantize_rows_reference,
    types=TypeRule(((I32,), (F32,), (F32,), (F32,)), (F32,), optional=(I64,)),
    validate=valid_row_accumulator,
    layout=Layout.ROW_MAJOR,
    tail=Tail.DEQUANTIZE_ROWS,
    kernel="matmul",
)
DYNAMIC_QUANT_OPS = (QUANTIZE_ROWS, DEQUANTIZE_ROWS)
