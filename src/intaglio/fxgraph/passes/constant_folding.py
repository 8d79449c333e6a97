"""Constant folding."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from intaglio.fxgraph.node_info import constant_path, info, set_info, tensor_type
from intaglio.fxgraph.nodes import is_constant, operator
from intaglio.fxgraph.unique_names import add_constant

PARAMETRIZED = re.compile(r"\.parametrizations\.(\w+)\..*")
"""Matches paths of parametrizations: ``conv.parametrizations.weight.original0`` belongs to ``conv.weight``."""

DEQUANTIZE_TARGETS = "quantized_decomposed.dequantize"


def fold_constants(module: fx.GraphModule) -> int:
    """Replace operators that read only constants, such as weight norm or a cast of a weight, by their result.

    Capture does not run this pass, because weights are not constant in training.
    """
    values: dict[fx.Node, Any] = {}
    paths: dict[fx.Node, str] = {}
    for node in module.graph.nodes:
        if is_constant(node):
            values[node], paths[node] = getattr(module, str(node.target)), constant_path(node)
        elif _folds(node) and all(source in values for source in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            with torch.no_grad():
                values[node], paths[node] = node.target(*args, **kwargs), paths[node.all_input_nodes[0]]
    hits = [n for n, value in values.items() if not is_constant(n) and isinstance(value, torch.Tensor)]
    hits = [node for node in hits if any(user not in values for user in node.users)]
    for index, node in enumerate(hits):
        name = add_constant(module, f"constant{index}", values[node])
        with module.graph.inserting_before(node):
            constant = module.graph.get_attr(name)
        set_info(constant, type=tensor_type(node), path=PARAMETRIZED.sub(r".\1", paths[node]))
        node.replace_all_uses_with(constant)
        module.graph.erase_node(node)
    return len(hits)


def _folds(node: fx.Node) -> bool:
    """Return whether a node with constant operands has a constant value: it has operands and is not random."""
    if node.op != "call_function" or not node.all_input_nodes or info(node).dim is not None:
        return False
    if operator(node).startswith(DEQUANTIZE_TARGETS):  # weights of parts that are already quantized stay integers
        return False
    return torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())
