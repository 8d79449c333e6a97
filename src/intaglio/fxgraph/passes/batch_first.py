"""Shorter data movement: permutations that move the batch axis away and back, and permutations of many axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from intaglio.fxgraph.node_info import copy_info, known_type
from intaglio.fxgraph.nodes import arguments, call_before, operator, replace_node, size_of
from intaglio.fxgraph.overloads import LINEAR_TARGET, SLICE_TARGET
from intaglio.ir import Dim, Shape, TensorType, evaluate
from intaglio.ir.dims import divide
from intaglio.ops.movement.shape import MAX_AXES

aten = torch.ops.aten
RESHAPES = (
    "aten.reshape.default",
    "aten.unsqueeze.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.flatten.using_ints",
)
PERMUTING_TARGETS = (*RESHAPES, "aten.transpose.int", "aten.permute.default", SLICE_TARGET)


@dataclass(eq=False)
class AxisFactor:
    """A factor of a source axis that no reshape splits further.

    Attributes:
        axis: axis of the source.
        size: number of elements.
        start: first element that a slice keeps.
        count: number of elements kept; by default all.
    """

    axis: int
    size: Dim
    start: int = 0
    count: Dim = 0

    def __post_init__(self) -> None:
        self.count = self.count or self.size


@dataclass
class AxisOrder:
    """Axes of a value as factors of the axes of its source.

    Attributes:
        source: the factors of each source axis.
        axes: the factors of each axis, outermost first; empty for axes of size 1.
        batch_ever_moved: whether the batch left the first position at some step.
        most_axes: largest number of axes at any step.
    """

    source: list[list[AxisFactor]]
    axes: list[list[AxisFactor]] = field(default_factory=list)
    batch_ever_moved: bool = False
    most_axes: int = 0

    def batch_moved(self) -> bool:
        """Return whether the first axis no longer starts with the source's first axis."""
        batch = any(factor.count != 1 for axis in self.source[:1] for factor in axis)  # a number has no axis
        return batch and next(axis[0] for axis in self.axes if axis).axis != 0


def keep_batch_first(module: fx.GraphModule) -> int:
    """Keep the batch first in linear layers and shorten the data movement around them.

    ``torch.nn.MultiheadAttention`` permutes the sequence to the front: [n, s, c] -> [s, n, c] -> linear -> ... -> [n,
    heads, s, d]. A linear layer commutes with every permutation of the axes before its last.
    """
    hits = sum(_sink_permutation(node) for node in list(module.graph.nodes) if operator(node) == LINEAR_TARGET)
    ends = [
        n
        for n in module.graph.nodes
        if operator(n) in PERMUTING_TARGETS and any(operator(u) not in PERMUTING_TARGETS for u in n.users)
    ]
    return hits + sum(_shorten_movement(node) for node in ends)


# ---- layout after a chain of data movement ---------------------------------------------------------------------------


def _movement_source(end: fx.Node) -> tuple[fx.Node, AxisOrder] | None:
    """Return the farthest source of the data movement that ends here, and the resulting axis order."""
    moves: list[fx.Node] = []
    while operator(end) in PERMUTING_TARGETS:
        moves.insert(0, end)
        end = end.args[0]
    for start, first in enumerate(moves):
        if (axis_order := _axis_order_after(moves[start:])) is not None:
            return first.args[0], axis_order
    return None


def _axis_order_after(moves: Sequence[fx.Node]) -> AxisOrder | None:
    """Return the axis order of the last node relative to the input of the first; ``None`` if it is unknown."""
    shape = known_type(moves[0].args[0]).shape
    source = [[AxisFactor(axis, size)] if size != 1 else [] for axis, size in enumerate(shape)]
    axis_order = AxisOrder(source, [list(axis) for axis in source])
    for node in moves:
        name, rank = operator(node), len(axis_order.axes)
        if name in RESHAPES:
            is_known = _reshape(axis_order, known_type(node).shape)
        elif name == SLICE_TARGET:
            is_known = _slice(axis_order, node)
        else:
            given = node.args[1] if name == "aten.permute.default" else _swapped(rank, *node.args[1:3])
            axis_order.axes = [axis_order.axes[axis % rank] for axis in given]
            is_known = True
        if not is_known:
            return None
        axis_order.batch_ever_moved |= axis_order.batch_moved()
        axis_order.most_axes = max(axis_order.most_axes, len(axis_order.axes))
    return axis_order


def _swapped(rank: int, a: int, b: int) -> list[int]:
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return order


def _slice(axis_order: AxisOrder, node: fx.Node) -> bool:
    given = arguments(node)
    axis = axis_order.axes[given["dim"] % len(axis_order.axes)]
    start, stop = given["start"] or 0, given["end"]
    if len(axis) != 1 or given["step"] != 1 or not isinstance(start, int) or not isinstance(stop, int):
        return False
    (factor,) = axis
    if not isinstance(factor.size, int) or factor.count != factor.size:
        return False
    start, stop, _ = slice(start, stop).indices(factor.size)
    factor.start, factor.count = start, stop - start
    if factor.count == 1:
        axis.clear()
    return factor.count > 0


def _reshape(axis_order: AxisOrder, shape: Shape) -> bool:
    """Distribute the factors over a new shape, and split those that are too large for an axis."""
    waiting = [factor for axis in axis_order.axes for factor in axis]
    axes: list[list[AxisFactor]] = []
    for size in shape:
        taken: list[AxisFactor] = []
        rest: Dim = size
        while rest != 1:
            if not waiting:
                return False
            factor = waiting[0]
            smaller = divide(rest, factor.count) or None
            if smaller is None:
                if not _split(axis_order, waiting, rest):
                    return False
                continue
            taken.append(waiting.pop(0))
            rest = smaller
        axes.append(taken)
    axis_order.axes = axes
    return not waiting


def _split(axis_order: AxisOrder, waiting: list[AxisFactor], outer: Dim) -> bool:
    """Split the first waiting factor in two, with an outer one of size `outer`."""
    factor = waiting[0]
    inner = divide(factor.size, outer) or None
    if inner is None or factor.count != factor.size:
        return False
    parts = [AxisFactor(factor.axis, outer), AxisFactor(factor.axis, inner)]
    own = axis_order.source[factor.axis]
    place = own.index(factor)
    own[place : place + 1] = parts
    waiting[:1] = parts
    return True


# ---- shortest chain to a layout -------------------------------------------------------------------------------------


def _shortest_movement(
    axis_order: AxisOrder, source: Shape, shape: Shape
) -> list[tuple[Any, Shape, tuple[Any, ...]]] | None:
    """Return the shortest data movement to an axis order: slices, a reshape, a permutation and a reshape.

    Returns:
        Tuples of operator, shape of the result and arguments; ``None`` if a slice is not supported.
    """
    steps: list[tuple[Any, Shape, tuple[Any, ...]]] = []
    current = list(source)
    for axis, factors in enumerate(axis_order.source):
        sliced = [place for place, factor in enumerate(factors) if factor.count != factor.size]
        if sliced and (sliced != [0] or not all(isinstance(factor.size, int) for factor in factors)):
            return None
        if sliced:
            inner = 1
            for factor in factors[1:]:
                inner *= evaluate(factor.size, {})
            bounds = factors[0].start * inner, (factors[0].start + evaluate(factors[0].count, {})) * inner
            current[axis] = bounds[1] - bounds[0]
            steps.append((aten.slice.Tensor, tuple(current), (axis, *bounds)))
    there = [factor for factors in axis_order.source for factor in factors if factor.count != 1]
    wanted = [factor for axis in axis_order.axes for factor in axis]
    permutation = [there.index(factor) for factor in wanted]
    if permutation == sorted(permutation):
        return steps if tuple(current) == shape else [*steps, (aten.reshape.default, shape, ())]
    runs = _runs(permutation)
    in_order = sorted(runs)
    if tuple(current) != (split := tuple(_product([there[place] for place in run]) for run in in_order)):
        steps.append((aten.reshape.default, split, ()))
    order = [in_order.index(run) for run in runs]
    steps.append((aten.permute.default, tuple(split[place] for place in order), (order,)))
    return steps if steps[-1][1] == shape else [*steps, (aten.reshape.default, shape, ())]


def _runs(permutation: Sequence[int]) -> list[list[int]]:
    """Return the axes of a permutation; neighbours that stay neighbours are one axis if there are too many."""
    if len(permutation) <= MAX_AXES:
        return [[place] for place in permutation]
    runs: list[list[int]] = []
    for place in permutation:
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def _insert_movement(
    before: fx.Node, value: fx.Node, steps: Sequence[tuple[Any, Shape, tuple[Any, ...]]]
) -> fx.Node | None:
    dtype = known_type(value).dtype
    for target, shape, given in steps:
        if target is aten.reshape.default:
            free = [axis for axis, size in enumerate(shape) if not isinstance(size, int)][-1:]
            sizes = [-1 if axis in free else size_of(before, size) for axis, size in enumerate(shape)]
            if None in sizes:
                return None
            given = (sizes,)
        value = call_before(before, TensorType(shape, dtype), target, value, *given)
    return value


def _shorten_movement(end: fx.Node) -> bool:
    """Replace data movement that moves the batch away and back, or has too many axes, by the shortest equivalent."""
    found = _movement_source(end)
    if found is None:
        return False
    source, axis_order = found
    there_and_back = axis_order.batch_ever_moved and not axis_order.batch_moved()
    if not there_and_back and axis_order.most_axes <= MAX_AXES:
        return False
    steps = _shortest_movement(axis_order, known_type(source).shape, known_type(end).shape)
    if not there_and_back and any(len(shape) > MAX_AXES for _, shape, _ in steps or ()):
        return False
    value = None if steps is None else _insert_movement(end, source, steps)
    if value is None:
        return False
    replace_node(end, value)
    return True


def _sink_permutation(linear: fx.Node) -> bool:
    """Move permutations of the batch from the input of a linear layer to its output."""
    found, shape = _movement_source(linear.args[0]), known_type(linear).shape
    if found is None or not found[1].batch_moved() or not found[1].axes[-1]:
        return False
    source, axis_order = found
    leading = {id(factor) for axis in axis_order.axes[:-1] for factor in axis}
    leading_axes = [[factor for factor in factors if id(factor) in leading] for factors in axis_order.source]
    leading_axes = [factors for factors in leading_axes if factors]
    base = AxisOrder(axis_order.source, [*leading_axes, axis_order.axes[-1]])
    if base.batch_moved():  # the source's first axis is among the layer's input channels
        return False
    sizes = tuple(_product(factors) for factors in base.axes)
    steps = _shortest_movement(base, known_type(source).shape, sizes)
    x = None if steps is None else _insert_movement(linear, source, steps)
    if x is None:
        return False
    kind = TensorType((*sizes[:-1], shape[-1]), known_type(linear).dtype)
    y = call_before(linear, kind, linear.target, x, *linear.args[1:], **linear.kwargs)
    copy_info(y, linear, type=kind)
    behind = _shortest_movement(_order_after_layer(axis_order, leading_axes, shape[-1]), kind.shape, shape)
    z = None if behind is None else _insert_movement(linear, y, behind)
    if z is None:
        return False
    replace_node(linear, z)
    return True


def _order_after_layer(axis_order: AxisOrder, leading_axes: Sequence[Sequence[AxisFactor]], channels: Dim) -> AxisOrder:
    """Return the axis order behind a layer that reads its input in the order of the source."""
    anew = {
        id(factor): AxisFactor(axis, factor.count) for axis, factors in enumerate(leading_axes) for factor in factors
    }
    last = [AxisFactor(len(leading_axes), channels)] if channels != 1 else []
    axes = [[anew[id(factor)] for factor in axis] for axis in axis_order.axes[:-1]]
    return AxisOrder([*[[anew[id(factor)] for factor in factors] for factors in leading_axes], last], [*axes, last])


def _product(factors: Sequence[AxisFactor]) -> Dim:
    total: Dim = 1
    for factor in factors:
        total = total * factor.count
    return total
