"""Gates written out -> the functions they are, which have kernels behind convolutions and linear layers."""

from __future__ import annotations

import torch
from torch import fx

from intaglio.fxgraph.node_info import tensor_type
from intaglio.fxgraph.nodes import operator, replace_node

GATE_REWRITES = {
    "aten.sigmoid.default": torch.ops.aten.silu.default,
    "aten.hardsigmoid.default": torch.ops.aten.hardswish.default,
}
"""g -> what ``x * g(x)`` is."""


def join_gates(module: fx.GraphModule) -> int:
    """``x * sigmoid(x)`` -> silu, ``x * hardsigmoid(x)`` -> hardswish, where nobody else reads the gate."""
    hits = 0
    for node in list(module.graph.nodes):
        if operator(node) != "aten.mul.Tensor":
            continue
        for value, gate in (node.args[:2], node.args[1::-1]):
            made = GATE_REWRITES.get(operator(gate)) if isinstance(gate, fx.Node) and len(gate.users) == 1 else None
            if made is not None and gate.args[0] is value and tensor_type(value) == tensor_type(node):
                with module.graph.inserting_before(node):
                    joined = module.graph.call_function(made, (value,))
                joined.meta = dict(gate.meta)
                replace_node(node, joined)
                hits += 1
                break
    return hits
