"""Other biases for a graph, whether its anchors had one or not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.names import add_constant
from intaglio.fxgraph.node_info import origin, set_info
from intaglio.ir import DType, TensorType
from intaglio.torch_private import schema_of


def with_biases(module: fx.GraphModule, biases: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    """A copy of a graph with these biases, by anchor."""
    module = copy_graph(module)
    nodes = {node.name: node for node in module.graph.nodes}
    for anchor, values in biases.items():
        node = nodes[anchor]
        name = add_constant(module, f"{anchor}_bias", values)
        with module.graph.inserting_before(next(iter(module.graph.nodes))):
            constant = module.graph.get_attr(name)
        set_info(constant, type=TensorType(tuple(values.shape), DType.F32), path=f"{origin(node).path}.bias")
        place = [argument.name for argument in schema_of(node.target).arguments].index("bias")
        if place < len(node.args):
            node.update_arg(place, constant)
        else:
            node.update_kwarg("bias", constant)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module
