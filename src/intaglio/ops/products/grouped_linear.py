"""Linear layers of mixtures of experts: rows of the operand are in groups, and each group has a weight of its own.

Group ``g`` is the rows from ``ends[g - 1]``, or 0, to ``ends[g]``, exclusive. They are multiplied by the rows ``g * N``
to ``(g + 1) * N`` of a weight s8[groups * N, K]. Ends are data: one before that of the group in front of it is moved to
there, and one past the rows to the last row. Results of rows behind all groups are 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from intaglio import numerics
from intaglio.ir import Attrs, DType, Graph, NumberArray, Op, PerRowGroup, QParams, Shape, TensorType, evaluate
from intaglio.ir.types import F32, I32, I64
from intaglio.ir.verify import TypeRule
from intaglio.ops.opdef import Call, Layout, OpDef, Tail, first_reason, rank
from intaglio.ops.products.conv import (
    CONV_ROLES,
    linear_macs,
    require_bounded_accumulator,
    require_constant_weight,
    require_fixed_last_axis,
)

ENDS = 3
"""Position of the ends of the groups among the operands."""


def rows_of_groups(ends: np.ndarray, rows: int) -> list[slice]:
    """Return the rows of each group, of ``rows`` in all."""
    found, start = [], 0
    for end in ends.tolist():
        stop = min(max(end, start), rows)
        found.append(slice(start, stop))
        start = stop
    return found


def of_each_row(values: np.ndarray, ends: np.ndarray, rows: int) -> np.ndarray:
    """Return the values [groups * N], or [1] for all, of the group of each row: [rows, N]; 0 behind all groups."""
    if values.size == 1:
        values = np.repeat(values, len(ends))
    by_group = values.reshape(len(ends), -1)
    found = np.zeros((rows, by_group.shape[1]), values.dtype)
    for own, group in zip(by_group, rows_of_groups(ends, rows), strict=True):
        found[group] = own
    return found


def grouped_linear_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the result."""
    (rows, _), (outputs, _), (groups,) = shapes[0], shapes[1], shapes[ENDS]
    return rows, evaluate(outputs, {}) // evaluate(groups, {})


def grouped_linear_reference(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> np.ndarray:
    """Compute the exact int32 accumulator of each row with the weight and the bias of its group."""
    x, weight, bias, ends = args
    centred, outputs = x.astype(np.float64) - types[0].qparams.zero, len(weight) // len(ends)
    acc = np.zeros((len(x), outputs), np.int32)
    for group, rows in enumerate(rows_of_groups(ends, len(x))):
        own = slice(group * outputs, (group + 1) * outputs)
        acc[rows] = (centred[rows] @ weight[own].astype(np.float64).T).astype(np.int64).astype(np.int32) + bias[own]
    return acc


def dequantize_groups_reference(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> np.ndarray:
    """Dequantize an accumulator with the scale of each row's group: ``float32(acc) * float32(s_x * s_w)``."""
    acc, ends = args
    return numerics.dequantize(acc, of_each_row(np.array(types[0].qparams.scales), ends, len(acc)), 0)


def group_accumulator_qparams(scales: tuple[float, ...] | NumberArray[float]) -> QParams:
    """Return the parameters of an accumulator with scales for each output of each group, or with one scale."""
    axis = PerRowGroup() if len(scales) > 1 else None
    return QParams(scales, (0,) * len(scales), -(2**31), 2**31 - 1, axis)


def require_float_rows(call: Call) -> str | None:
    """Return why a call is refused: rows, weight and bias must be floating point."""
    return "an operand is not floating point" if False in call.floating[:ENDS] else None


def require_groups(call: Call) -> str | None:
    """Return why a call is refused: there must be a known number of groups, with as many outputs each."""
    weight, ends = call.sizes(1), call.shape(ENDS)
    whole = len(ends) == 1 and isinstance(ends[0], int) and ends[0] > 0 and weight[0] % ends[0] == 0
    return None if whole else f"a weight with {weight[0]} outputs cannot be divided among groups of the shape {ends}"


def check_grouped_linear(op: Op, graph: Graph) -> None:
    """Raise `ValueError` for operands that do not fit, or an accumulator that is read with other groups."""
    x, weight, bias, ends = (graph.types[name] for name in op.inputs)
    fixed = set(op.inputs[1:ENDS]) <= set(graph.constants)
    fits = len(x.shape) == len(weight.shape) == 2 and x.shape[1] == weight.shape[1] and bias.shape == weight.shape[:1]
    count, outputs = (ends.shape[0] if len(ends.shape) == 1 else 0), weight.shape[0]
    divided = isinstance(count, int) and isinstance(outputs, int) and 0 < count <= outputs and outputs % count == 0
    if not (fixed and fits and divided) or op.attrs:
        raise ValueError(
            f"grouped_linear expects x [rows, K], constants [groups * N, K] and [groups * N], and the end of each "
            f"group, but got {x}, {weight}, {bias} and {ends}"
        )
    readers = graph.users()[op.output]
    if not all(reader.inputs[-1] == op.inputs[ENDS] and reader.kind in GROUP_READERS for reader in readers):
        raise ValueError(f"%{op.output}: only dequantization with the same groups may read this accumulator")


def is_read_by_groups(acc: str, ends: str, graph: Graph) -> bool:
    """Return whether an accumulator is that of a grouped linear layer with these ends of groups."""
    maker = graph.makers().get(acc)
    return maker is not None and maker.kind == GROUPED_LINEAR.name and maker.inputs[ENDS] == ends


def check_dequantize_groups(op: Op, graph: Graph) -> None:
    """Raise `ValueError` for an accumulator of other groups, or without scales for each of them."""
    acc, ends = (graph.types[name] for name in op.inputs)
    q, made = acc.qparams, is_read_by_groups(op.inputs[0], op.inputs[1], graph)
    wanted = (1, acc.shape[1] * ends.shape[0]) if made else ()
    if not made or len(q.scales) not in wanted or q != group_accumulator_qparams(q.scales):
        raise ValueError(f"%{op.output}: {acc} is not an accumulator of the groups %{op.inputs[1]} {ends}")


GROUPED_LINEAR = OpDef(
    name="grouped_linear",
    targets=("intaglio.grouped_linear.default",),
    operands=("input", "weight", "bias", "ends"),
    roles=CONV_ROLES,
    anchor=True,
    check=first_reason(
        require_float_rows,
        rank(2),
        require_constant_weight,
        require_fixed_last_axis,
        require_bounded_accumulator,
        require_groups,
    ),
    infer=grouped_linear_shape,
    reference=grouped_linear_reference,
    types=TypeRule(((DType.U8,), (DType.S8,), (I32,), (I64,)), (I32,)),
    validate=check_grouped_linear,
    accumulates=True,
    row_groups=True,
    macs=linear_macs,
    computed_in_float32=True,
    layout=Layout.ROW_MAJOR,
    kernel="matmul",
)
DEQUANTIZE_GROUPS = OpDef(
    name="dequantize_groups",
    operands=("acc", "ends"),
    reference=dequantize_groups_reference,
    types=TypeRule(((I32,), (I64,)), (F32,)),
    validate=check_dequantize_groups,
    layout=Layout.ROW_MAJOR,
    tail=Tail.DEQUANTIZE,
    kernel="matmul",
)
GROUP_READERS = (DEQUANTIZE_GROUPS.name, "dequantize_rows")
GROUPED_LINEAR_OPS = (GROUPED_LINEAR, DEQUANTIZE_GROUPS)
