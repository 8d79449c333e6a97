"""Sums and products of tensors with more axes than kernels take, computed over merged axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from intaglio.fxgraph.node_info import known_type, tensor_type
from intaglio.fxgraph.nodes import operator, replace_node
from intaglio.fxgraph.passes.decompositions.movement import call_like, reshape_like
from intaglio.ir import Dim, Shape
from intaglio.ops.movement.shape import MAX_AXES

MERGED_TARGETS = ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor")


def merge_pointwise_axes(module: fx.GraphModule) -> int:
    """Merge neighbouring axes of sums and products with more than six of them, as in positions of a video's tokens.

    Axes are merged if each operand has all of them, or one element along each of them.
    """
    hits = 0
    for node in [node for node in module.graph.nodes if _has_many_axes(node)]:
        shape, operands = known_type(node).shape, node.args[:2]
        shapes = [_padded(known_type(operand).shape, len(shape)) for operand in operands]
        groups = _groups(shape, shapes)
        if len(groups) > MAX_AXES:
            continue
        merged = [_reshaped(node, x, _merged(own, groups)) for x, own in zip(operands, shapes, strict=True)]
        if None in merged:
            continue
        found = call_like(node, _merged(shape, groups), node.target, *merged)
        found.kwargs = node.kwargs
        if (whole := reshape_like(node, found, shape)) is not None:
            replace_node(node, whole)
            hits += 1
    return hits


def _reshaped(old: fx.Node, value: fx.Node, shape: Shape) -> fx.Node | None:
    """Return a value with a shape: itself, a reshape in front of ``old``, or ``None`` if its sizes are unavailable."""
    return value if known_type(value).shape == shape else reshape_like(old, value, shape)


def _has_many_axes(node: fx.Node) -> bool:
    """Return whether a node is a sum or product of two tensors whose result has too many axes."""
    if operator(node) not in MERGED_TARGETS or len(known_type(node).shape) <= MAX_AXES:
        return False
    return all(isinstance(operand, fx.Node) and tensor_type(operand) is not None for operand in node.args[:2])


def _padded(shape: Shape, rank: int) -> Shape:
    """Return a shape with axes of size 1 in front of it."""
    return (*(1,) * (rank - len(shape)), *shape)


def _groups(shape: Shape, operands: Sequence[Shape]) -> list[list[int]]:
    """Return the axes that are merged, in order; axes of size 1 belong to any group."""
    groups: list[list[int]] = []
    kinds: list[tuple[bool, ...]] = []
    for axis, size in enumerate(shape):
        kind = tuple(operand[axis] == size for operand in operands)
        if groups and (size == 1 or kind == kinds[-1]):
            groups[-1].append(axis)
        elif groups and all(shape[place] == 1 for place in groups[-1]):
            groups[-1].append(axis)
            kinds[-1] = kind
        else:
            groups.append([axis])
            kinds.append(kind)
    return groups


def _merged(shape: Shape, groups: Sequence[Sequence[int]]) -> Shape:
    """Return a shape with each group of axes as one."""

    def size(group: Sequence[int]) -> Dim:
        return math.prod((shape[axis] for axis in group), start=1)

    return tuple(map(size, groups))
