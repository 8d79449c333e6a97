"""Precomputation of constants that are sliced to a dynamic size."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.node_info import known_type, set_info, tensor_type
from intaglio.fxgraph.nodes import arguments, call_before, is_constant, operator, replace_node, resolve_dims
from intaglio.fxgraph.overloads import ARITHMETIC_TARGETS, EMBEDDING_TARGET, SLICE_TARGET
from intaglio.fxgraph.passes.constant_folding import fold_constants
from intaglio.ir import TensorType

aten = torch.ops.aten
MAX_CONSTANT_BYTES = 64 << 20
"""Maximum size of a new constant in bytes; larger tables are looked up in every call."""
EXPAND_TARGET = "aten.expand.default"


def lift_slices(module: fx.GraphModule) -> int:
    """Move slices of constants behind the embedding, gather and pointwise operators that read them.

    ``embedding(table, ids[:, :n])`` becomes ``embedding(table, ids)[:, :n]``, whose embedding is constant. Position and
    token type embeddings with equal slices are added first, which rounds once less than ``(word + type) + position``.
    The pass runs after `fold_constants`, which removes operators on whole constants.
    """
    hits = 0
    while found := sum(
        step(module) for step in (_sink_expand, _drop_expand, _sink_slices, _reassociate_sums, fold_constants)
    ):
        hits += found
        module.graph.eliminate_dead_code()
    return hits


@dataclass(frozen=True)
class ConstantSlice:
    """A slice of a constant tensor along one axis.

    Attributes:
        tensor: the whole constant.
        axis: the sliced axis.
        bounds: start, end and step.
    """

    tensor: torch.Tensor
    axis: int
    bounds: tuple[Any, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """Return a key that is equal for slices with the same axis, rank and bounds."""
        return self.axis, self.tensor.dim(), resolve_dims(self.bounds)


def _constant_slice(module: fx.GraphModule, node: Any) -> ConstantSlice | None:
    if not isinstance(node, fx.Node) or operator(node) != SLICE_TARGET or not is_constant(node.args[0]):
        return None
    given, kind = arguments(node), known_type(node)
    axis = given["dim"] % len(kind.shape)
    if isinstance(kind.shape[axis], int):
        return None
    return ConstantSlice(getattr(module, node.args[0].target), axis, (given["start"] or 0, given["end"], given["step"]))


def _is_constant_or_slice(module: fx.GraphModule, value: Any) -> bool:
    """Return whether a value is a constant or a slice of one."""
    return isinstance(value, fx.Node) and (is_constant(value) or _constant_slice(module, value) is not None)


def _replace_by_slice(
    module: fx.GraphModule, node: fx.Node, tensor: torch.Tensor, part: ConstantSlice, shape: tuple[Any, ...]
) -> None:
    """Replace a node by a slice of a new constant."""
    name = add_constant(module, f"part_{node.name}", tensor)
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        constant = module.graph.get_attr(name)
    kind = known_type(node)
    set_info(constant, type=TensorType(tuple(tensor.shape), kind.dtype), path=name)
    bounds = (constant, part.axis, *part.bounds)
    replace_node(node, call_before(node, TensorType(shape, kind.dtype), aten.slice.Tensor, *bounds))


def _sink_expand(module: fx.GraphModule) -> int:
    """Move expand from the ids to the result of an embedding."""
    hits = [n for n in module.graph.nodes if operator(n) == EMBEDDING_TARGET and operator(n.args[1]) == EXPAND_TARGET]
    hits = [node for node in hits if is_constant(node.args[0]) and _is_constant_or_slice(module, node.args[1].args[0])]
    for node in hits:
        table, wide = node.args[:2]
        ids, sizes = wide.args[:2]
        kind, width = known_type(node), known_type(table).shape[1]
        rows = call_before(
            node, TensorType((*known_type(ids).shape, width), kind.dtype), aten.embedding.default, table, ids
        )
        replace_node(node, call_before(node, kind, aten.expand.default, rows, [*sizes, -1]))
    return len(hits)


def _drop_expand(module: fx.GraphModule) -> int:
    """Replace ``x + expand(slice)`` by ``x + slice`` if x has the shape of the sum."""
    hits = 0
    for node in list(module.graph.nodes):
        if operator(node) not in ARITHMETIC_TARGETS or not all(isinstance(value, fx.Node) for value in node.args[:2]):
            continue
        for index in (0, 1):
            value, other = node.args[index], node.args[1 - index]
            kind = tensor_type(other)
            same_shape = kind is not None and kind.shape == known_type(node).shape
            if same_shape and operator(value) == EXPAND_TARGET and _is_constant_or_slice(module, value.args[0]):
                node.update_arg(index, value.args[0])
                hits += 1
    return hits


def _sink_slices(module: fx.GraphModule) -> int:
    """Move slices from the operands of gather, embedding and pointwise operators to the result."""
    hits = 0
    for node in list(module.graph.nodes):
        if (part := _commuting_slice(module, node)) is None:
            continue
        values = {}
        for source in node.all_input_nodes:
            found = _constant_slice(module, source)
            values[source] = found.tensor if found else getattr(module, source.target)
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        with torch.no_grad():
            tensor = node.target(*args, **kwargs)
        _replace_by_slice(module, node, tensor.contiguous(), part, known_type(node).shape)
        hits += 1
    return hits


def _commuting_slice(module: fx.GraphModule, node: fx.Node) -> ConstantSlice | None:
    """Return the slice that commutes with this operator, or ``None``."""
    name, kind = operator(node), tensor_type(node)
    parts = [part for value in node.all_input_nodes if (part := _constant_slice(module, value)) is not None]
    others = [value for value in node.all_input_nodes if _constant_slice(module, value) is None]
    if not parts or kind is None or not all(map(is_constant, others)):
        return None
    if len({part.key for part in parts}) != 1:
        return None
    part = parts[0]
    length = part.tensor.shape[part.axis]
    sizes = [length if axis == part.axis else size for axis, size in enumerate(kind.shape)]
    fixed = [size for size in sizes if isinstance(size, int)]
    if len(fixed) < len(sizes) or prod(fixed) * kind.dtype.bytes > MAX_CONSTANT_BYTES:
        return None
    if name == EMBEDDING_TARGET:
        return part if _constant_slice(module, node.args[1]) else None
    if name == "aten.gather.default":
        source, _, ids = node.args[:3]
        if not is_constant(source) or _constant_slice(module, ids) is None:
            return None
        room = getattr(module, source.target).shape
        return part if all(size <= most for size, most in zip(fixed, room, strict=True)) else None
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or name == "aten._to_copy.default"
    return part if pointwise and len(fixed) == part.tensor.dim() and _constant_along_slice(part, others) else None


def _constant_along_slice(part: ConstantSlice, others: list[fx.Node]) -> bool:
    """Return whether the other constants do not vary along the sliced axis."""
    back = part.tensor.dim() - part.axis
    shapes = [known_type(value).shape for value in others]
    return all(len(shape) < back or shape[-back] == 1 for shape in shapes)


def _reassociate_sums(module: fx.GraphModule) -> int:
    """Replace ``(x + slice) + slice`` by ``x + (slice + slice)``."""
    hits = 0
    for node in list(module.graph.nodes):
        outer_sum = _sum_with_slice(module, node)
        inner_sum = None if outer_sum is None else _sum_with_slice(module, outer_sum[0])
        if outer_sum is None or inner_sum is None:
            continue
        (inner, second), (value, first) = outer_sum, inner_sum
        if len(inner.users) != 1 or tensor_type(inner) != tensor_type(node):
            continue
        a, b = _constant_slice(module, first), _constant_slice(module, second)
        if tensor_type(first) == tensor_type(second) and (a and a.key) == (b and b.key):
            both = call_before(node, known_type(second), aten.add.Tensor, first, second)
            replace_node(node, call_before(node, known_type(node), aten.add.Tensor, value, both))
            hits += 1
    return hits


def _sum_with_slice(module: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the other operand of an addition and its slice of a constant; ``None`` for any other node."""
    if operator(node) != "aten.add.Tensor" or arguments(node)["alpha"] != 1:
        return None
    for value, other in (node.args[:2], node.args[1::-1]):
        if (
            isinstance(value, fx.Node)
            and not _is_constant_or_slice(module, value)
            and _is_constant_or_slice(module, other)
        ):
            return value, other
    return None
