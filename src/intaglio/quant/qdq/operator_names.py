"""Names of a reference's operators for reports: as the user wrote them in the float model."""

from __future__ import annotations

import re
from functools import cached_property

import torch
from torch import fx

from intaglio.fxgraph.node_info import info, origin, tensor_type
from intaglio.fxgraph.nodes import name_of, operator
from intaglio.ir import DType
from intaglio.quant.annotate.sites import Site
from intaglio.quant.qdq.convert import Reference
from intaglio.quant.recipes.choices import Role

EQUALIZED = (torch.ops.aten.addcmul.default,)
"""Operators that equalization inserts after inputs, or in place of additions."""
PROJECTIONS = {
    "q_proj_weight": "query",
    "k_proj_weight": "key",
    "v_proj_weight": "value",
    "out_proj_weight": "output projection",
}
"""Projections by the end of the name of a weight of `nn.MultiheadAttention`."""
FLOATING = (DType.F16, DType.BF16, DType.F32, DType.F64)


class OperatorNames:
    """The inputs and operators of a reference that have a floating-point tensor as their value.

    Attributes:
        reference: the reference.
        named: nodes of the float graph by name.
        nodes: nodes of the reference by their name in the float graph, in execution order.
        sites: sites of activations by the name of the value.
    """

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.named: dict[str, fx.Node] = {node.name: node for node in reference.annotations.module.graph.nodes}
        found = [node for node in reference.module.graph.nodes if name_of(node) in self.named and _is_of_model(node)]
        self.nodes: dict[str, fx.Node] = {name_of(node): node for node in found}
        self.sites: dict[str, Site] = {
            site.value: site for site in reference.annotations.sites if site.role == Role.ACTIVATION
        }

    def owner(self, name: str) -> tuple[str, str, str]:
        """Return module path and operator of the float model that a node belongs to, and what tells it apart from
        others of the same module and operator."""
        path, kind, detail = self._owner(name)
        return path, kind, ", ".join(filter(None, (detail, self._projection(name))))

    def folded(self, name: str) -> tuple[str, ...]:
        """Return the paths of the batch norms that were folded into a node."""
        return tuple(part for part in info(self.named[name]).folded if part)

    def is_replaced(self, name: str) -> bool:
        """Return whether equalization scales the value before anything reads it, so that its own row says nothing."""
        node = self.named[name]
        readers = [user for user in node.users if info(user).dim is None]
        return name not in self.sites and bool(readers) and all(_scales_a_value(user) for user in readers)

    @cached_property
    def selectors(self) -> dict[str, str]:
        """Return for every node in a region the selector that leaves the region in float: the path of the region's
        first operator if that module has no submodules with operators, else the type of the operator."""
        paths = {origin(node).path.partition("@")[0] for node in self.nodes.values() if operator(node)}
        found = {}
        for region in self.reference.annotations.regions:
            where = origin(region.anchor)
            path = ".".join(part.partition("@")[0] for part in where.path.split("."))
            alone = path and not any(other.startswith(f"{path}.") for other in paths)
            found.update({node.name: path if alone else f"op:{where.operator}" for node in region.computed})
        return found

    def _owner(self, name: str) -> tuple[str, str, str]:
        """Return path, operator and detail. A per-channel product that equalization inserted belongs to the value that
        it scales."""
        node = self.named[name]
        if _scales_a_value(node):
            path, kind, _ = self._owner(name_of(node.args[1]))
            return path, kind, "smoothed" if info(node).divides_by_smoothing else ""
        if node.op == "placeholder":
            return name, "input", ""
        where = origin(node)
        if (part := info(node).part) is not None:
            return where.path, part.operator, part.label
        if not where.operator or _packet(where.operator) == _packet(operator(node)):
            return where.path, operator(node), ""
        if node.target in EQUALIZED:
            return where.path, where.operator, ""
        return where.path, operator(node), f"part of {where.operator}"

    def _projection(self, name: str) -> str:
        """Return which projection of an `nn.MultiheadAttention` a linear operator computes, or ""."""
        node = self.named[name]
        weight = node.args[1] if operator(node) == "aten.linear.default" else None
        return projection_of(str(weight.target)) if isinstance(weight, fx.Node) else ""


def projection_of(weight: str) -> str:
    """Return the projection of an `nn.MultiheadAttention` that a weight belongs to, by its name, or "".

    `in_proj_weight` has the rows of query, key and value, in this order. ``in_proj_weight_64_128`` are its rows from 64
    to 127, those of the key: as many rows come before them. Corrections append a word to the names of new weights.
    """
    weight = re.sub(r"(_(smoothed|equalized|fitted))+$", "", weight)
    for end, projection in PROJECTIONS.items():
        if weight.endswith(end):
            return projection
    rows = re.search(r"in_proj_weight_(\d+)_(\d+)$", weight)
    if rows is None:
        return ""
    start, stop = int(rows[1]), int(rows[2])
    part, rest = divmod(start, stop - start)
    return "" if rest or part > 2 else ("query", "key", "value")[part]


def _scales_a_value(node: fx.Node) -> bool:
    """Return whether equalization inserted the node to multiply a value by one factor per channel."""
    return node.target in EQUALIZED and (info(node).divides_by_smoothing or not origin(node).operator)


def _packet(name: str) -> str:
    """Return ``aten.relu`` for ``aten.relu_.default``: an operator without its overload and in-place mark."""
    return ".".join(name.split(".")[:2]).rstrip("_")


def _is_of_model(node: fx.Node) -> bool:
    """Return whether a node is an input or an operator of the model with a floating-point tensor as its value."""
    kind = tensor_type(node)
    is_inserted = operator(node).startswith(("quantized_decomposed.", "intaglio."))
    known = node.op == "placeholder" or (node.op == "call_function" and not is_inserted)
    part = info(node).part
    whole = part is None or not part.label
    return known and whole and kind is not None and kind.q is None and kind.dtype in FLOATING
