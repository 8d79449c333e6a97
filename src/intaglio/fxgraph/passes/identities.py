"""Removal of copies, views, casts and assertions that do not change a value."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from intaglio.fxgraph.node_info import known_type, tensor_type
from intaglio.fxgraph.nodes import arguments, operator
from intaglio.ops.movement.shape import END

COPIES = (
    "aten.clone.default",
    "aten.alias.default",
    "aten.detach.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
    "aten.contiguous.default",
)

ASSERTIONS = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_constrain_range.default")

VIEW_TARGETS = ("aten.view.default", "aten._unsafe_view.default")

SAME_IF_EQUAL = (
    "aten._to_copy.default",
    "aten.expand.default",
    "aten.expand_as.default",
    "aten.reshape.default",
    "aten.to.dtype",
    "aten.type_as.default",
)


def drop_assertions(module: fx.GraphModule) -> int:
    """Remove assertions on types and sizes, which tracing inserts (for ``x.float()``, among others).

    Intaglio checks types itself, and each assertion would count as a reader of its value.
    """
    hits = [node for node in module.graph.nodes if operator(node) in ASSERTIONS and not node.users]
    for node in hits:
        module.graph.erase_node(node)
    return len(hits)


def view_to_reshape(module: fx.GraphModule) -> int:
    """Replace view by reshape: once copies are removed, the operand may no longer be contiguous."""
    hits = [node for node in module.graph.nodes if operator(node) in VIEW_TARGETS]
    for node in hits:
        node.target = torch.ops.aten.reshape.default
    return len(hits)


def drop_empty_parts(module: fx.GraphModule) -> int:
    """Remove operands without elements from concatenations, as rotary embeddings of whole heads have them."""
    hits = 0
    for node in module.graph.nodes:
        if operator(node) != "aten.cat.default":
            continue
        parts = [part for part in node.args[0] if 0 not in known_type(part).shape]
        if parts and len(parts) < len(node.args[0]):
            node.args = (parts, *node.args[1:])
            hits += 1
    if hits:
        module.graph.eliminate_dead_code()
    return hits


def drop_identity(module: fx.GraphModule) -> int:
    """Remove copies, full slices, casts and views that do not change a value, except returned copies of inputs."""
    hits = [node for node in module.graph.nodes if _is_identity(node) and not _returned_input(node)]
    for node in hits:
        node.replace_all_uses_with(_only_operand(node))
        module.graph.erase_node(node)
    return len(hits)


def _only_operand(node: fx.Node) -> fx.Node:
    return node.args[0][0] if isinstance(node.args[0], (list, tuple)) else node.args[0]


def _is_identity(node: fx.Node) -> bool:
    name = operator(node)
    if name in COPIES:
        return True
    if name == "aten.cat.default":
        return len(node.args[0]) == 1
    if name == "aten.dropout.default":
        return arguments(node)["train"] is False or arguments(node)["p"] == 0
    if name == "aten.slice.Tensor":
        given = arguments(node)
        return given["start"] in (None, 0) and (given["end"] is None or _to_end(given)) and given["step"] == 1
    return name in SAME_IF_EQUAL and tensor_type(node) == tensor_type(node.args[0]) is not None


def _to_end(given: dict[str, Any]) -> bool:
    return isinstance(given["end"], int) and given["end"] >= END


def _returned_input(node: fx.Node) -> bool:
    return _only_operand(node).op == "placeholder" and any(user.op == "output" for user in node.users)
