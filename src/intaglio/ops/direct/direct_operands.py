"""Limits and checks of the operands of operators that take tensors as the model has them."""

from __future__ import annotations

from collections.abc import Sequence

from intaglio.ir import Attrs, Graph, Op, Shape
from intaglio.ir.types import BF16, BOOL, F32, I64
from intaglio.ops.opdef import Call

MAX_INDEXED_AXES = 6
"""Largest rank of the operand and of the result; ``INDEXED_AXES`` of native/sequences/indexing.h is their sum."""
ELEMENTS = (F32, BF16, I64, BOOL)


def bind_axis(call: Call) -> Attrs:
    """Return the axis."""
    return {"axis": int(call.arguments["dim"]) % max(len(call.shape()), 1)}


def check_ranks(op: Op, graph: Graph) -> None:
    """Raise `ValueError` for too many axes, a result of another element type than the first operand, or values with
    several scales."""
    if max(len(graph.types[name].shape) for name in (*op.inputs, *op.outputs)) > MAX_INDEXED_AXES:
        raise ValueError(f"{op.kind}: an operand or the result has more than {MAX_INDEXED_AXES} axes")
    given, made = graph.types[op.inputs[0]], graph.types[op.output]
    if made.dtype is not given.dtype or made.q != given.q or (made.q is not None and made.q.axis is not None):
        raise ValueError(f"{op.kind} keeps the element type, but makes {made}")


def check_integers(op: Op, graph: Graph, names: Sequence[str]) -> None:
    """Raise `ValueError` unless these operands are i64."""
    if any(graph.types[name].dtype is not I64 for name in names):
        raise ValueError(f"{op.kind} takes i64 indices, but got {[str(graph.types[name]) for name in names]}")


def check_axis(op: Op, shape: Shape) -> None:
    """Raise `ValueError` unless the attribute ``axis`` is an axis of a tensor with this shape."""
    axis = op.attrs["axis"]
    if not isinstance(axis, int) or not 0 <= axis < len(shape) <= MAX_INDEXED_AXES:
        raise ValueError(f"{op.kind} along axis {axis} of a tensor with {len(shape)} axes")
