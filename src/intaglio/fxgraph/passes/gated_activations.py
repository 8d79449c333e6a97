"""Fusion of decomposed gated activations, by the rows of `intaglio.fusion.table`, and of GELU written with erf."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from intaglio.fusion.fusion_record import Fusion, match_rows
from intaglio.fusion.table import GATE_FUSIONS
from intaglio.fxgraph.fx_graph_view import FxGraphView
from intaglio.fxgraph.node_info import known_type
from intaglio.fxgraph.nodes import arguments, call_before, operator, overload_of, replace_node


def fuse_gated_activations(module: fx.GraphModule) -> int:
    """Replace the operators of every match by the function that its row names."""
    view = FxGraphView(module.graph)

    def accept(row: Fusion, nodes: tuple[fx.Node, ...]) -> tuple[Fusion, fx.Node, fx.Node]:
        return row, nodes[0], nodes[-1]

    found = match_rows(GATE_FUSIONS, module.graph.nodes, view, accept, set())
    for row, first, product in sorted(found, key=lambda match: view.position(match[2])):
        with module.graph.inserting_before(product):
            joined = module.graph.call_function(overload_of(row.becomes), (first.args[0],))
        joined.meta = dict(first.meta)
        replace_node(product, joined)
    return len(found)


def fuse_gelu(module: fx.GraphModule) -> int:
    """Replace ``x * 0.5 * (1 + erf(x / sqrt(2)))``, with its factors in any order, by GELU."""
    hits = 0
    for node in [node for node in module.graph.nodes if operator(node) == "aten.erf.default"]:
        source, factor = _scaled(node.args[0])
        one = _only_user(node, "aten.add.")
        if one is None or not math.isclose(factor, math.sqrt(0.5), rel_tol=1e-6) or _other(one, node) != 1:
            continue
        if arguments(one).get("alpha", 1) != 1:
            continue
        last = _half_of(one, source)
        if last is not None and known_type(last) == known_type(source):
            replace_node(last, call_before(last, known_type(last), torch.ops.aten.gelu.default, source))
            hits += 1
    module.graph.eliminate_dead_code()
    return hits


def _half_of(value: fx.Node, source: fx.Node) -> fx.Node | None:
    """Return the product of a value with half of ``source``, found behind it, or ``None``."""
    number, times = 1.0, 0
    while not (times == 1 and number == 0.5):
        product = _only_user(value, "aten.mul.")
        if product is None:
            return None
        other = _other(product, value)
        if isinstance(other, fx.Node):
            other, factor = _scaled(other) if other is not source else (other, 1.0)
            if other is not source or times:
                return None
            times, number = 1, number * factor
        elif isinstance(other, (int, float)):
            number *= other
        else:
            return None
        value = product
    return value


def _scaled(node: fx.Node) -> tuple[fx.Node, float]:
    """Return a value and the number that a node multiplies it by; the node itself and 1 for other operators."""
    name = operator(node)
    if name.startswith(("aten.mul.", "aten.div.")) and len(node.all_input_nodes) == 1:
        a, b = node.args[:2]
        if isinstance(a, fx.Node) and isinstance(b, (int, float)):
            return a, 1 / b if "div" in name and b else float(b)
        if isinstance(b, fx.Node) and isinstance(a, (int, float)) and "mul" in name:
            return b, float(a)
    return node, 1.0


def _only_user(node: fx.Node, prefix: str) -> fx.Node | None:
    """Return the only reader of a node if its operator begins so."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    return user if user is not None and operator(user).startswith(prefix) else None


def _other(node: fx.Node, operand: fx.Node) -> Any:
    """Return the other one of two operands."""
    a, b = node.args[:2]
    return b if a is operand else a
