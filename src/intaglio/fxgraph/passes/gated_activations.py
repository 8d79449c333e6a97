"""Gates written out -> the functions they are, by the rows of `intaglio.fusion.table`."""

from __future__ import annotations

from torch import fx

from intaglio.fusion.fusion_record import Fusion, match_rows
from intaglio.fusion.table import GATE_FUSIONS
from intaglio.fxgraph.fx_graph_view import FxGraphView
from intaglio.fxgraph.nodes import overload_of, replace_node


def join_gates(module: fx.GraphModule) -> int:
    """``x * sigmoid(x)`` -> silu, ``x * hardsigmoid(x)`` -> hardswish, where nothing else reads the gate."""
    view = FxGraphView(module.graph)

    def accept(row: Fusion, nodes: tuple[fx.Node, ...]) -> tuple[Fusion, fx.Node, fx.Node]:
        gate, product = nodes
        return row, gate, product

    found = match_rows(GATE_FUSIONS, module.graph.nodes, view, accept, set())
    for row, gate, product in sorted(found, key=lambda match: view.position(match[2])):
        with module.graph.inserting_before(product):
            joined = module.graph.call_function(overload_of(row.becomes), (gate.args[0],))
        joined.meta = dict(gate.meta)
        replace_node(product, joined)
    return len(found)
