"""Removal of permutations that move the batch axis away and back."""

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
class Atom:
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
        source: the atoms of each source axis.
        axes: the atoms of each axis, outermost first; empty for axes of size 1.
        roams: whether the batch left the first position at some step.
    """

    source: list[list[Atom]]
    axes: list[list[Atom]] = field(default_factory=list)
    roams: bool = False

    def moved(self) -> bool:
        """Return whether the first axis no longer starts with the source's first axis."""
        batch = any(atom.count != 1 for atom in self.source[0])
        return batch and next(axis[0] for axis in self.axes if axis).axis != 0


def batch_first(module: fx.GraphModule) -> int:
    """Keep the batch first in linear layers and shorten the data movement around them.

    ``torch.nn.MultiheadAttention`` permutes the sequence to the front: [n, s, c] -> [s, n, c] -> linear -> ... -> [n,
    heads, s, d]. A linear layer commutes with every permutation of the axes before its last.
    """
    hits = sum(_hoist(node) for node in list(module.graph.nodes) if operator(node) == LINEAR_TARGET)
    ends = [
        n
        for n in module.graph.nodes
        if operator(n) in PERMUTING_TARGETS and any(operator(u) not in PERMUTING_TARGETS for u in n.users)
    ]
    return hits + sum(_shorten(node) for node in ends)


# ---- layout after a chain of data movement ---------------------------------------------------------------------------


def _chain(end: fx.Node) -> tuple[fx.Node, AxisOrder] | None:
    """Return the farthest source of the data movement that ends here, and the resulting axis order."""
    moves: list[fx.Node] = []
    while operator(end) in PERMUTING_TARGETS:
        moves.insert(0, end)
        end = end.args[0]
    for start, first in enumerate(moves):
        if (layout := _follow(moves[start:])) is not None:
            return first.args[0], layout
    return None


def _follow(moves: Sequence[fx.Node]) -> AxisOrder | None:
    """Return the axis order of the last node relative to the input of the first; ``None`` if it is unknown."""
    shape = known_type(moves[0].args[0]).shape
    source = [[Atom(axis, size)] if size != 1 else [] for axis, size in enumerate(shape)]
    layout = AxisOrder(source, [list(axis) for axis in source])
    for node in moves:
        name, rank = operator(node), len(layout.axes)
        if name in RESHAPES:
            fits = _reshape(layout, known_type(node).shape)
        elif name == SLICE_TARGET:
            fits = _slice(layout, node)
        else:
            given = node.args[1] if name == "aten.permute.default" else _swapped(rank, *node.args[1:3])
            layout.axes = [layout.axes[axis % rank] for axis in given]
            fits = True
        if not fits:
            return None
        layout.roams |= layout.moved()
    return layout


def _swapped(rank: int, a: int, b: int) -> list[int]:
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return order


def _slice(layout: AxisOrder, node: fx.Node) -> bool:
    given = arguments(node)
    axis = layout.axes[given["dim"] % len(layout.axes)]
    start, stop = given["start"] or 0, given["end"]
    if len(axis) != 1 or given["step"] != 1 or not isinstance(start, int) or not isinstance(stop, int):
        return False
    (atom,) = axis
    if not isinstance(atom.size, int) or atom.count != atom.size:
        return False
    start, stop, _ = slice(start, stop).indices(atom.size)
    atom.start, atom.count = start, stop - start
    if atom.count == 1:
        axis.clear()
    return atom.count > 0


def _reshape(layout: AxisOrder, shape: Shape) -> bool:
    """Distribute the atoms over a new shape, and split those that are too large for an axis."""
    waiting = [atom for axis in layout.axes for atom in axis]
    axes: list[list[Atom]] = []
    for size in shape:
        taken: list[Atom] = []
        rest: Dim = size
        while rest != 1:
            if not waiting:
                return False
            atom = waiting[0]
            smaller = divide(rest, atom.count) or None
            if smaller is None:
                if not _split(layout, waiting, rest):
                    return False
                continue
            taken.append(waiting.pop(0))
            rest = smaller
        axes.append(taken)
    layout.axes = axes
    return not waiting


def _split(layout: AxisOrder, waiting: list[Atom], outer: Dim) -> bool:
    """Split the first waiting atom in two, with an outer one of size `outer`."""
    atom = waiting[0]
    inner = divide(atom.size, outer) or None
    if inner is None or atom.count != atom.size:
        return False
    parts = [Atom(atom.axis, outer), Atom(atom.axis, inner)]
    own = layout.source[atom.axis]
    place = own.index(atom)
    own[place : place + 1] = parts
    waiting[:1] = parts
    return True


# ---- shortest chain to a layout -------------------------------------------------------------------------------------


def _steps(layout: AxisOrder, source: Shape, shape: Shape) -> list[tuple[Any, Shape, tuple[Any, ...]]] | None:
    """Return the shortest data movement to an axis order: slices, a reshape, a permutation and a reshape.

    Returns:
        Tuples of operator, shape of the result and arguments; ``None`` if a slice is not supported.
    """
    steps: list[tuple[Any, Shape, tuple[Any, ...]]] = []
    current = list(source)
    for axis, atoms in enumerate(layout.source):
        cut = [place for place, atom in enumerate(atoms) if atom.count != atom.size]
        if cut and (cut != [0] or not all(isinstance(atom.size, int) for atom in atoms)):
            return None
        if cut:
            inner = 1
            for atom in atoms[1:]:
                inner *= evaluate(atom.size, {})
            bounds = atoms[0].start * inner, (atoms[0].start + evaluate(atoms[0].count, {})) * inner
            current[axis] = bounds[1] - bounds[0]
            steps.append((aten.slice.Tensor, tuple(current), (axis, *bounds)))
    there = [atom for atoms in layout.source for atom in atoms if atom.count != 1]
    wanted = [atom for axis in layout.axes for atom in axis]
    order = [there.index(atom) for atom in wanted]
    if order == sorted(order):
        return steps if tuple(current) == shape else [*steps, (aten.reshape.default, shape, ())]
    if tuple(current) != (split := tuple(atom.count for atom in there)):
        steps.append((aten.reshape.default, split, ()))
    steps.append((aten.permute.default, tuple(atom.count for atom in wanted), (order,)))
    return steps if steps[-1][1] == shape else [*steps, (aten.reshape.default, shape, ())]


def _emit(before: fx.Node, value: fx.Node, steps: Sequence[tuple[Any, Shape, tuple[Any, ...]]]) -> fx.Node | None:
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


def _shorten(end: fx.Node) -> bool:
    """Replace data movement that moves the batch away and back by the shortest equivalent."""
    found = _chain(end)
    if found is None or not found[1].roams or found[1].moved():
        return False
    source, layout = found
    steps = _steps(layout, known_type(source).shape, known_type(end).shape)
    value = None if steps is None else _emit(end, source, steps)
    if value is None:
        return False
    replace_node(end, value)
    return True


def _hoist(linear: fx.Node) -> bool:
    """Move permutations of the batch from the input of a linear layer to its output."""
    found, shape = _chain(linear.args[0]), known_type(linear).shape
    if found is None or not found[1].moved() or not found[1].axes[-1]:
        return False
    source, layout = found
    leading = {id(atom) for axis in layout.axes[:-1] for atom in axis}
    ahead = [[atom for atom in atoms if id(atom) in leading] for atoms in layout.source]
    ahead = [atoms for atoms in ahead if atoms]
    base = AxisOrder(layout.source, [*ahead, layout.axes[-1]])
    if base.moved():  # the source's first axis is among the layer's input channels
        return False
    sizes = tuple(_product(atoms) for atoms in base.axes)
    steps = _steps(base, known_type(source).shape, sizes)
    x = None if steps is None else _emit(linear, source, steps)
    if x is None:
        return False
    kind = TensorType((*sizes[:-1], shape[-1]), known_type(linear).dtype)
    y = call_before(linear, kind, linear.target, x, *linear.args[1:], **linear.kwargs)
    copy_info(y, linear, type=kind)
    behind = _steps(_behind(layout, ahead, shape[-1]), kind.shape, shape)
    z = None if behind is None else _emit(linear, y, behind)
    if z is None:
        return False
    replace_node(linear, z)
    return True


def _behind(layout: AxisOrder, ahead: Sequence[Sequence[Atom]], channels: Dim) -> AxisOrder:
    """Return the axis order behind a layer that reads its input in the order of the source."""
    anew = {id(atom): Atom(axis, atom.count) for axis, atoms in enumerate(ahead) for atom in atoms}
    last = [Atom(len(ahead), channels)] if channels != 1 else []
    axes = [[anew[id(atom)] for atom in axis] for axis in layout.axes[:-1]]
    return AxisOrder([*[[anew[id(atom)] for atom in atoms] for atoms in ahead], last], [*axes, last])


def _product(atoms: Sequence[Atom]) -> Dim:
    total: Dim = 1
    for atom in atoms:
        total = total * atom.count
    return total
