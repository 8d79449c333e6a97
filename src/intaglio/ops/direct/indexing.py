"""Elements at computed places: index, gather and scatter.

Indices are i64; one that is not inside of its axis is reported like an id outside of its table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from intaglio.errors import INDEX_OUT_OF_RANGE
from intaglio.ir import Attrs, Graph, Op, Shape, TensorType
from intaglio.ir.types import F32, I64
from intaglio.ops.direct.direct_operands import MAX_INDEXED_AXES, bind_axis, check_integers, check_ranks
from intaglio.ops.loop_ops.primitives import broadcast
from intaglio.ops.opdef import Call, OpDef

MAX_INDICES = 4
"""Largest number of index tensors."""


def bind_index(call: Call) -> Attrs:
    """Return the indexed axes, and the axis of the result where those of the indices begin.

    Indices of neighbouring axes replace these in place; others come first, as in NumPy.
    """
    axes = tuple(int(axis) for axis in call.arguments["axes"])
    neighbours = axes == tuple(range(axes[0], axes[0] + len(axes)))
    return {"axes": axes, "place": axes[0] if neighbours else 0}


def index_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the operand's shape with the indexed axes replaced by those that the indices broadcast to."""
    x, *indices = shapes
    rest = tuple(size for axis, size in enumerate(x) if axis not in attrs["axes"])
    return (*rest[: attrs["place"]], *broadcast(*indices), *rest[attrs["place"] :])


def index_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Return the elements at the indices; negative indices count from the end.

    Raises:
        IndexError: An index is outside of its axis.
    """
    x, *indices = args
    axes, found = op.attrs["axes"], np.broadcast_arrays(*indices)
    for axis, index in zip(axes, found, strict=True):
        if (index < -x.shape[axis]).any() or (index >= x.shape[axis]).any():
            raise IndexError(INDEX_OUT_OF_RANGE)
    rest = [axis for axis in range(x.ndim) if axis not in axes]
    taken = x.transpose(*axes, *rest)[tuple(found)]
    count, place = found[0].ndim, op.attrs["place"]
    order = [*range(count, count + place), *range(count), *range(count + place, taken.ndim)]
    return taken.transpose(order)


def require_indexable(call: Call) -> str | None:
    """Return why a call stays in PyTorch: the kernel takes a few axes, and i64 indices of at least one element."""
    if any(shape is None or len(shape) > MAX_INDEXED_AXES for shape in (*call.shapes, call.result)):
        return f"an operand or the result has more than {MAX_INDEXED_AXES} axes"
    if not 1 <= len(call.shapes) - 1 <= MAX_INDICES:
        return f"there are {len(call.shapes) - 1} indices; the kernel supports 1 to {MAX_INDICES}"
    return None


def check_index(op: Op, graph: Graph) -> None:
    """Raise `ValueError` for attributes or operands that the kernel cannot read."""
    axes, rank = op.attrs["axes"], len(graph.types[op.inputs[0]].shape)
    place, count = op.attrs["place"], len(op.inputs) - 1
    inside = all(isinstance(axis, int) and 0 <= axis < rank for axis in axes) and len({*axes}) == len(axes) == count
    if not inside or not 1 <= count <= MAX_INDICES or not 0 <= place <= rank - count:
        raise ValueError(f"index of axes {axes} at {place} of an operand with {rank} axes and {count} indices")
    check_ranks(op, graph)
    check_integers(op, graph, op.inputs[1:])


def gather_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the index."""
    return shapes[1]


def gather_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Return, along an axis, the elements at the indices; the other axes of the index begin where the operand's do.

    Raises:
        IndexError: An index is outside of its axis.
    """
    (x, index), axis = args, op.attrs["axis"]
    if (index < 0).any() or (index >= x.shape[axis]).any():
        raise IndexError(INDEX_OUT_OF_RANGE)
    part = tuple(slice(None) if at == axis else slice(size) for at, size in enumerate(index.shape))
    return np.take_along_axis(x[part], index, axis)


def require_gatherable(call: Call) -> str | None:
    """Return why a gather stays in PyTorch: it takes tensors of the same rank, which is at least 1."""
    ranks = {len(shape) for shape in call.shapes if shape is not None}
    if len(ranks) != 1 or not 1 <= max(ranks) <= MAX_INDEXED_AXES:
        return f"the operands have {ranks} axes; the kernel takes the same number, up to {MAX_INDEXED_AXES}"
    return None


def check_gather(op: Op, graph: Graph) -> None:
    """Raise `ValueError` for operands of different ranks, or an index that is larger than the operand."""
    (x, index), axis = (graph.types[name].shape for name in op.inputs), op.attrs["axis"]
    if len(x) != len(index) or not isinstance(axis, int) or not 0 <= axis < len(x):
        raise ValueError(f"gather along axis {axis} of {x} with indices {index}")
    check_ranks(op, graph)
    check_integers(op, graph, op.inputs[1:])


def gather_inside(op: Op, graph: Graph) -> Any:
    """Yield the requirement that the index is not larger than the operand along the other axes."""
    x, index = (graph.types[name].shape for name in op.inputs)
    for at, (size, read) in enumerate(zip(x, index, strict=True)):
        if at != op.attrs["axis"] and size != read:
            yield size - read, f"a gather would read {read} elements of an axis of {size}"


# ---- scattering -----------------------------------------------------------------------------------------------------

SCATTER_MODES = ("set", "sum", "amax", "amin")


def bind_scatter(call: Call) -> Attrs:
    """Return the axis and what happens to an element that is met: it is set, added to, or the larger or smaller one."""
    mode = call.arguments.get("reduce") or ("sum" if "add" in call.target else "set")
    return {"axis": int(call.arguments["dim"]) % max(len(call.shape()), 1), "mode": mode}


def require_scatterable(call: Call) -> str | None:
    """Return why a scatter stays in PyTorch: its mode must be known, and operands may only differ along the axis."""
    x, index, source = (call.shape(operand) for operand in range(3))
    axis, mode = (bind_scatter(call)[name] for name in ("axis", "mode"))
    if mode not in SCATTER_MODES or call.arguments.get("include_self") is False or call.arguments.get("alpha", 1) != 1:
        return f"its mode is {mode} with {dict(call.arguments)}"
    if not 1 <= len(x) == len(source) <= MAX_INDEXED_AXES or (len(index) > 1 and index != source):
        return f"the operands have {len(x)}, {len(index)} and {len(source)} axes, or other sizes of index and source"
    same = all(a == b for at, (a, b) in enumerate(zip(x, source, strict=True)) if at != axis)
    return None if same else "the operands have other sizes along an axis that is not scattered"


def scatter_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Return the first operand with the elements of the third put to the indices along an axis, in order.

    An index with one axis selects whole slices.

    Raises:
        IndexError: An index is outside of its axis.
    """
    (x, index, source), axis = args, op.attrs["axis"]
    if (index < 0).any() or (index >= x.shape[axis]).any():
        raise IndexError(INDEX_OUT_OF_RANGE)
    if index.ndim == 1:
        index = index.reshape([-1 if at == axis else 1 for at in range(x.ndim)])
    result, index = x.copy(), np.broadcast_to(index, source.shape)
    places: list[np.ndarray] = list(np.indices(source.shape, sparse=True))
    places[axis] = index
    join = {"sum": np.add, "amax": np.maximum, "amin": np.minimum}
    if op.attrs["mode"] == "set":
        for place in np.ndindex(source.shape):
            result[(*place[:axis], index[place], *place[axis + 1 :])] = source[place]
    else:
        with np.errstate(all="ignore"):
            join[op.attrs["mode"]].at(result, tuple(places), source)
    return result


def check_scatter(op: Op, graph: Graph) -> None:
    """Raise `ValueError` for other attributes, types or shapes than `require_scatterable` accepts."""
    x, index, source = (graph.types[name] for name in op.inputs)
    arguments, shapes = {"dim": op.attrs["axis"], "reduce": op.attrs["mode"]}, (x.shape, index.shape, source.shape)
    call = Call("aten.scatter_reduce.two", arguments, shapes, (), (), x.shape)
    if not isinstance(op.attrs["axis"], int) or not 0 <= op.attrs["axis"] < len(x.shape) or require_scatterable(call):
        raise ValueError(f"scatter with {dict(op.attrs)} of {x}, {index} and {source}")
    if source.dtype is not x.dtype or x.dtype not in (F32, I64):
        raise ValueError(f"scatter of {source} into {x}")
    check_ranks(op, graph)
    check_integers(op, graph, op.inputs[1:2])


INDEX = OpDef(
    name="index",
    targets=("aten.index.Tensor", "aten.index_select.default"),
    operands=("self", "indices"),
    direct=True,
    infer=index_shape,
    reference=index_reference,
    validate=check_index,
    check=require_indexable,
    bind=bind_index,
    emit="index",
    kernel="indexing",
)
GATHER = OpDef(
    name="gather_elements",
    targets=("aten.gather.default",),
    operands=("self", "index"),
    direct=True,
    bind=bind_axis,
    check=require_gatherable,
    infer=gather_shape,
    reference=gather_reference,
    validate=check_gather,
    needs=gather_inside,
    emit="gather_elements",
    kernel="indexing",
)
SCATTER = OpDef(
    name="scatter",
    targets=(
        "aten.scatter_add.default",
        "aten.index_add.default",
        "aten.scatter.src",
        "aten.scatter_reduce.two",
    ),
    operands=("self", "index", "src"),
    direct=True,
    bind=bind_scatter,
    check=require_scatterable,
    infer=lambda attrs, shapes: shapes[0],
    reference=scatter_reference,
    validate=check_scatter,
    emit="scatter",
    kernel="indexing",
)
INDEXING_OPS = (INDEX, GATHER, SCATTER)
