"""Rows that a condition selects, as graph networks select edges, without sizes that depend on values.

The edges of a node with itself are removed, and one for each node is added, before values of nodes are gathered along
edges and added up at their ends. The number of the edges that are left depends on the values of the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import getitem

import torch
from torch import fx

from intaglio.fxgraph.float_forms import data_movement_of, has_float_form
from intaglio.fxgraph.node_info import info, known_type, tensor_type
from intaglio.fxgraph.nodes import (
    arguments,
    call_before,
    operator,
    replace_node,
    replace_symbols,
    reshape_before,
    size_along,
)
from intaglio.fxgraph.overloads import LINEAR_TARGET
from intaglio.fxgraph.passes.constant_folding import fill_value
from intaglio.ir import Dim, DType, TensorType, numel, symbol, symbols_of
from intaglio.ops.movement.shape import END

aten = torch.ops.aten
INDEX_TARGETS = ("aten.index.Tensor", "aten.index_select.default")
SCATTERS = {
    "aten.scatter_add.default": "src",
    "aten.scatter_reduce.two": "src",
    "aten.scatter.src": "src",
    "aten.index_add.default": "source",
}
"""Name of the operand whose elements are put to indices, by operator."""
MOVES = tuple(
    f"aten.{name}"
    for name in ("reshape.default", "view.default", "expand.default", "unsqueeze.default", "squeeze.dim", "select.int")
)
"""Operators that keep the order of rows if the result has an axis of as many rows."""


@dataclass(frozen=True)
class Part:
    """Neighbouring rows, all of which are computed, or those that a condition selects.

    Attributes:
        rows: number of rows, selected or not.
        condition: bool[rows] that is true for the selected rows; ``None`` if all are.
        value: a value that has the rows if all are selected.
        axis: their axis in it.
    """

    rows: Dim
    condition: fx.Node | None
    value: fx.Node = field(compare=False)
    axis: int = field(compare=False)


@dataclass(frozen=True)
class Rows:
    """Rows of a value, some of which are selected: their axis, and their parts, ``None`` if all rows are alike."""

    axis: int
    parts: tuple[Part, ...] | None


Scatters = dict[fx.Node, tuple[Part, ...]]
"""Scatters, and the rows that they put to indices."""


def keep_unselected_rows(module: fx.GraphModule) -> int:
    """Compute all rows instead of selected ones, and leave the others out where rows are put to indices.

    This needs to know every operator in between: gathering, arithmetic row by row, concatenation, and scattering at
    last, for which the other rows have an index that is dropped.
    """
    count = 0
    for node in [node for node in module.graph.nodes if _selected_axis(node) is not None]:
        axis = _selected_axis(node)
        if axis is None or (found := _follow(node, axis)) is None:
            continue
        selections, scatters = found
        count += len(selections)
        replace_symbols(module, {str(known_type(node).shape[axis]): known_type(node.args[0]).shape[axis]})
        for scatter, parts in scatters.items():
            _drop_unselected(scatter, parts)
        for selection in selections:
            replace_node(selection, selection.args[0])
    return count


def _selected_axis(node: fx.Node) -> int | None:
    """Return the axis along which a node selects rows by a condition; ``None`` if it does anything else."""
    if operator(node) != "aten.index.Tensor":
        return None
    given = [(axis, index) for axis, index in enumerate(node.args[1]) if index is not None]
    if len(given) != 1 or known_type(given[0][1]).dtype is not DType.BOOL:
        return None
    (axis, condition), shape = given[0], known_type(node).shape
    if known_type(condition).shape != known_type(node.args[0]).shape[axis : axis + 1] or isinstance(shape[axis], int):
        return None
    return axis if shape[axis] == symbol(str(shape[axis])) else None


def _follow(first: fx.Node, axis: int) -> tuple[list[fx.Node], Scatters] | None:
    """Return the nodes that select the same rows, and the scatters that read them, with their rows.

    Args:
        first: node that selects rows.
        axis: their axis.

    Returns:
        ``None`` if another operator depends on their number.
    """
    name, condition = str(known_type(first).shape[axis]), first.args[1][axis]
    rows: dict[fx.Node, Rows] = {}
    selections: list[fx.Node] = []
    scatters: Scatters = {}
    for node in first.graph.nodes:
        if info(node).dim is not None:
            continue
        at = _selected_axis(node)
        if at is not None and node.args[1][at] is condition and known_type(node).shape[at] == symbol(name):
            selections.append(node)
            rows[node] = Rows(at, (Part(known_type(condition).shape[0], condition, node, at),))
            continue
        has_rows, reads_number = _row_axes(node, name), _reads_number(node, name)
        fills = fill_value(node) is not None  # such as zeros of the element type of an operand
        reads = not fills and any(source in rows for source in node.all_input_nodes)
        if not has_rows and not reads_number and not reads:
            continue
        if reads_number and operator(node) not in MOVES and not fills:
            return None
        if operator(node) in SCATTERS and not has_rows:
            parts = _scattered(node, rows)
            if parts is None:
                return None
            scatters[node] = parts
            continue
        if operator(node) == "aten.unbind.int" and node.args[0] in rows:
            rows[node] = rows[node.args[0]]  # its parts are looked at one by one
            continue
        found = _rows_after(node, has_rows[0], rows) if len(has_rows) == 1 else None
        if found is None:
            return None
        rows[node] = found
    return selections, scatters


def _row_axes(node: fx.Node, name: str) -> list[int]:
    """Return the axes of a tensor whose size depends on a symbol."""
    kind = tensor_type(node)
    return [] if kind is None else [axis for axis, size in enumerate(kind.shape) if name in symbols_of(size)]


def _reads_number(node: fx.Node, name: str) -> bool:
    """Return whether a node reads a size that depends on a symbol."""
    sizes = [info(source).dim for source in node.all_input_nodes]
    return any(size is not None and name in symbols_of(size) for size in sizes)


def _rows_after(node: fx.Node, axis: int, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    """Return the rows of a node that reads selected rows or has as many; ``None`` if it does not keep their order."""
    name, read = operator(node), [source for source in node.all_input_nodes if source in rows]
    if fill_value(node) is not None:
        return Rows(axis, None)
    if name == "aten.cat.default":
        return _joined(node, axis, rows)
    if name in INDEX_TARGETS:
        index = node.args[2] if "select" in name else node.args[1][0]
        gathers = node.args[0] not in rows and read == [index] and len(known_type(index).shape) == 1
        return Rows(axis, rows[index].parts) if gathers else None
    if node.target is getitem:
        return Rows(axis, rows[read[0]].parts)
    if name in MOVES:
        (source,) = read
        old, new, at = known_type(source).shape, known_type(node).shape, rows[source].axis
        kept = "reshape" not in name and "view" not in name
        kept = kept or (old[at] == new[axis] and numel(old[at + 1 :]) == numel(new[axis + 1 :]))
        return Rows(axis, rows[source].parts) if kept else None
    module, rank = node.graph.owning_module, len(known_type(node).shape)
    by_row = name == LINEAR_TARGET and read == [node.args[0]] and axis != rank - 1
    if not by_row and (data_movement_of(node) is not None or not has_float_form(node, module)):
        return None
    aligned = all(rows[source].axis - len(known_type(source).shape) == axis - rank for source in read)
    kinds = {rows[source].parts for source in read} - {None}
    return Rows(axis, kinds.pop() if kinds else None) if aligned and len(kinds) <= 1 else None


def _joined(node: fx.Node, axis: int, rows: Mapping[fx.Node, Rows]) -> Rows | None:
    """Return the rows of a concatenation along the axis of the rows."""
    values, given = node.args[0], arguments(node)["dim"]
    if given % len(known_type(node).shape) != axis:
        return None
    parts: list[Part] = []
    for value in values:
        own = rows[value].parts if value in rows else (Part(known_type(value).shape[axis], None, value, axis),)
        if own is None:
            return None
        parts += own
    return Rows(axis, tuple(parts))


def _scattered(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> tuple[Part, ...] | None:
    """Return the rows that a scatter puts to indices along their axis, if its indices belong to the same rows."""
    given = arguments(node)
    index, source, axis = given["index"], given[SCATTERS[operator(node)]], given["dim"]
    if given["self"] in rows or index not in rows or source not in rows:
        return None
    axis %= len(known_type(node).shape)
    parts, others = rows[index].parts, rows[source].parts
    of_rows = rows[source].axis == axis and rows[index].axis == (axis if len(known_type(index).shape) > 1 else 0)
    return parts if of_rows and others in (parts, None) else None


def _drop_unselected(node: fx.Node, parts: tuple[Part, ...]) -> None:
    """Put the rows that are not selected to an element in front of the others, which is dropped."""
    given = arguments(node)
    index, value, axis = given["index"], given["self"], given["dim"] % len(known_type(node).shape)
    kind, whole = known_type(index), known_type(node)
    at = axis if len(kind.shape) > 1 else 0
    count = kind.shape[at]
    selected = call_before(
        node, TensorType((count,), DType.BOOL), aten.cat.default, [_condition(node, part) for part in parts]
    )
    selected = call_before(node, TensorType((count,), DType.I64), aten._to_copy.default, selected, dtype=torch.int64)
    selected = reshape_before(node, selected, tuple(count if i == at else 1 for i in range(len(kind.shape))))
    index = call_before(node, kind, aten.mul.Tensor, call_before(node, kind, aten.add.Tensor, index, 1), selected)
    wide = TensorType((*whole.shape[:axis], whole.shape[axis] + 1, *whole.shape[axis + 1 :]), whole.dtype)
    pads = [0, 0] * (len(whole.shape) - axis - 1) + [1, 0]
    value = call_before(node, wide, aten.constant_pad_nd.default, value, pads)
    made = call_before(node, wide, node.target, value, given["dim"], index, *node.args[3:], **node.kwargs)
    replace_node(node, call_before(node, whole, aten.slice.Tensor, made, axis, 1, END))


def _condition(node: fx.Node, part: Part) -> fx.Node:
    """Return the condition of some rows, which is inserted in front of a node if all are selected."""
    if part.condition is not None:
        return part.condition
    kind = TensorType((part.rows,), DType.BOOL)
    return call_before(node, kind, aten.ones.default, [size_along(node, part.value, part.axis)], dtype=torch.bool)
