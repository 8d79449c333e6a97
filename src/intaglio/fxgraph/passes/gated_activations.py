"""Fusion of decomposed gated activations, by the rows of `intaglio.fusion.table`."""

from __future__ import annotations

from torch import fx

from intaglio.fusion.fusion_record import Fusion, match_rows
from intaglio.fusion.table import GATE_FUSIONS
from intaglio.fxgraph.fx_graph_view import FxGraphView
from intaglio.fxgraph.nodes import overload_of, replace_node


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
