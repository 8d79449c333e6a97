"""Sums, cumulative sums, places of extrema, and the order of elements along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from intaglio.ir import Attrs, Dim, Graph, Op, Shape, TensorType
from intaglio.ir.types import BOOL, F32, I64
from intaglio.ir.verify import TypeRule
from intaglio.ops.direct.direct_operands import MAX_INDEXED_AXES, bind_axis, check_axis
from intaglio.ops.opdef import Call, OpDef

COMPARED_TYPES = (F32, I64, BOOL)
"""Element types that are added, compared and sorted."""


def cumsum_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Return the sums of the elements up to each one, added to 0 in order; floats in float32, i64 with wrap-around."""
    if out.dtype is not F32:
        return np.cumsum(args[0], op.attrs["axis"], dtype=np.int64)
    sums: np.ndarray = np.cumsum(args[0], op.attrs["axis"], dtype=np.float32) + np.float32(0)  # -0.0 becomes 0.0
    return sums


def require_summable(call: Call) -> str | None:
    """Return why a sum stays in PyTorch: it takes a tensor with axes, and no other element type of the result."""
    if not 1 <= len(call.shape()) <= MAX_INDEXED_AXES:
        return f"the operand has {len(call.shape())} axes; the kernel supports 1 to {MAX_INDEXED_AXES}"
    return None


def check_cumsum(op: Op, graph: Graph) -> None:
    """Raise `ValueError` unless f32 makes f32, and i64 or booleans make i64."""
    x, y = graph.types[op.inputs[0]], graph.types[op.output]
    check_axis(op, x.shape)
    if (x.dtype, y.dtype) not in ((F32, F32), (I64, I64), (BOOL, I64)) or y.q is not None:
        raise ValueError(f"cumsum of {x} cannot make {y}")


def bind_sum(call: Call) -> Attrs:
    """Return the axis, and whether it stays with one element."""
    (axis,) = call.arguments["dim"]
    return {"axis": int(axis) % len(call.shape()), "keepdim": bool(call.arguments.get("keepdim"))}


def shape_without_axis(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape without the axis, or with one element along it."""
    (shape,), axis = shapes, attrs["axis"]
    return (*shape[:axis], *((1,) if attrs["keepdim"] else ()), *shape[axis + 1 :])


def sum_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Return the sums of integers or booleans along an axis, with wrap-around."""
    return np.asarray(np.sum(args[0], op.attrs["axis"], np.int64, keepdims=op.attrs["keepdim"]))


def require_summed_axis(call: Call) -> str | None:
    """Return why a sum stays in PyTorch: it is along one axis."""
    axes = call.arguments.get("dim")
    if not isinstance(axes, (list, tuple)) or len(axes) != 1:
        return "the sum is along several axes; the kernel adds along one"
    return require_summable(call)


def bind_extremum(call: Call) -> Attrs:
    """Return the axis, whether it stays with one element, and whether the largest element is looked for."""
    axis = int(call.arguments["dim"]) % max(len(call.shape()), 1)
    return {"axis": axis, "keepdim": bool(call.arguments.get("keepdim")), "largest": "argmax" in call.target}


def extremum_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Return the first place of the largest or smallest element along an axis; a NaN precedes all others."""
    function = np.argmax if op.attrs["largest"] else np.argmin
    return np.asarray(function(args[0], op.attrs["axis"], keepdims=op.attrs["keepdim"]), np.int64)


def require_one_axis(call: Call) -> str | None:
    """Return why a search stays in PyTorch: it takes one axis."""
    if not isinstance(call.arguments.get("dim"), int):
        return "it searches all axes; the kernel searches one"
    return require_summable(call)


def check_operand_axis(op: Op, graph: Graph) -> None:
    """Raise `ValueError` unless the attribute ``axis`` is an axis of the operand."""
    check_axis(op, graph.types[op.inputs[0]].shape)


def some_elements(op: Op, graph: Graph) -> Any:
    """Yield the requirement that the axis has an element."""
    size: Dim = graph.types[op.inputs[0]].shape[op.attrs["axis"]]
    yield size - 1, "an axis without elements is searched"


# ---- order ----------------------------------------------------------------------------------------------------------


def bind_argsort(call: Call) -> Attrs:
    """Return the axis, whether the largest element comes first, and how many places are wanted; ``None`` for all."""
    return {**bind_axis(call), "descending": bool(call.arguments.get("descending")), "count": None}


def argsort_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape with the number of places along the axis."""
    (shape,), axis, count = shapes, attrs["axis"], attrs["count"]
    return (*shape[:axis], shape[axis] if count is None else count, *shape[axis + 1 :])


def argsort_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Return the places of the elements along an axis in ascending or descending order.

    Equal elements keep their order. A NaN counts as larger than all others, as in PyTorch.
    """
    (x,), axis = args, op.attrs["axis"]
    if op.attrs["descending"]:
        reversed_order = np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
        order = x.shape[axis] - 1 - reversed_order
    else:
        order = np.argsort(x, axis, kind="stable")
    wanted = tuple(slice(op.attrs["count"] if at == axis else None) for at in range(x.ndim))
    return np.ascontiguousarray(order[wanted].astype(np.int64))


def check_argsort(op: Op, graph: Graph) -> None:
    """Raise `ValueError` for attributes that the kernel does not support."""
    shape, count = graph.types[op.inputs[0]].shape, op.attrs["count"]
    check_axis(op, shape)
    if type(op.attrs["descending"]) is not bool or not (count is None or (type(count) is int and count >= 0)):
        raise ValueError(f"argsort of {graph.types[op.inputs[0]]} with {dict(op.attrs)}")


def argsort_inside(op: Op, graph: Graph) -> Any:
    """Yield the requirement that the axis has as many elements as are wanted."""
    count = op.attrs["count"]
    if count is not None:
        size: Dim = graph.types[op.inputs[0]].shape[op.attrs["axis"]]
        yield size - count, f"the first {count} elements are wanted of an axis of {size}"


CUMSUM = OpDef(
    name="cumsum",
    targets=("aten.cumsum.default",),
    direct=True,
    bind=bind_axis,
    check=require_summable,
    reference=cumsum_reference,
    types=TypeRule((COMPARED_TYPES,), (F32, I64)),
    validate=check_cumsum,
    emit="cumsum",
    kernel="indexing",
)
INTEGER_SUM = OpDef(
    name="integer_sum",
    targets=("aten.nansum.default",),  # loops compute aten.sum, of floats; no integer is NaN
    direct=True,
    bind=bind_sum,
    check=require_summed_axis,
    infer=shape_without_axis,
    reference=sum_reference,
    types=TypeRule(((I64, BOOL),), (I64,)),
    validate=check_operand_axis,
    emit="integer_sum",
    kernel="indexing",
)
EXTREMUM = OpDef(
    name="extremum",
    targets=("aten.argmax.default", "aten.argmin.default"),
    direct=True,
    bind=bind_extremum,
    check=require_one_axis,
    infer=shape_without_axis,
    reference=extremum_reference,
    types=TypeRule((COMPARED_TYPES,), (I64,)),
    validate=check_operand_axis,
    needs=some_elements,
    emit="extremum",
    kernel="indexing",
)
ARGSORT = OpDef(
    name="argsort",
    targets=("aten.argsort.stable",),
    direct=True,
    bind=bind_argsort,
    check=require_summable,
    infer=argsort_shape,
    reference=argsort_reference,
    types=TypeRule((COMPARED_TYPES,), (I64,)),
    validate=check_argsort,
    needs=argsort_inside,
    emit="argsort",
    kernel="indexing",
)
ALONG_AXIS_OPS = (CUMSUM, INTEGER_SUM, EXTREMUM, ARGSORT)
