"""Grouped products of mixtures of experts as grouped linear layers."""

from __future__ import annotations

import torch
from torch import fx

from intaglio.fxgraph.grouped_operator import grouped_linear
from intaglio.fxgraph.node_info import constant_path, known_type
from intaglio.fxgraph.nodes import arguments, call_before, constant_node, is_constant, operator, replace_node
from intaglio.ir import DType, TensorType

GROUPED_PRODUCTS = {
    "aten._grouped_mm.default": ("self", "mat2", "offs"),
    "transformers.grouped_mm_fallback.default": ("input", "weight", "offs"),
}
"""Names of the rows, the matrices and the ends of the groups among the arguments of an operator."""


def constant_grouped_mm_to_linear(module: fx.GraphModule) -> int:
    """Replace products of groups of rows with constant matrices [groups, K, N] by a grouped linear layer.

    Its weight is [groups * N, K], like that of one linear layer with the outputs of all groups.
    """
    count = 0
    for node in list(module.graph.nodes):
        if not _is_constant_product(node):
            continue
        count += 1
        x, matrices, ends = (arguments(node)[name] for name in GROUPED_PRODUCTS[operator(node)])
        name = f"{matrices.target}_outputs_first"
        if not hasattr(module, name):
            values = getattr(module, str(matrices.target)).transpose(1, 2)
            module.register_buffer(name, values.reshape(-1, values.shape[2]))
        weight = constant_node(module, name, constant_path(matrices, name))
        if known_type(ends).dtype is not DType.I64:
            wide = TensorType(known_type(ends).shape, DType.I64)
            ends = call_before(node, wide, torch.ops.aten._to_copy.default, ends, dtype=torch.int64)
        layer = call_before(node, known_type(node), grouped_linear(), x, weight, None, ends)
        replace_node(node, layer)
    return count


def _is_constant_product(node: fx.Node) -> bool:
    """Return whether rows of float32 are multiplied by constant matrices, group by group, without a bias."""
    names = GROUPED_PRODUCTS.get(operator(node))
    if names is None:
        return False
    given = arguments(node)
    x, matrices, ends = (given[name] for name in names)
    if not isinstance(ends, fx.Node) or given.get("bias") is not None or not is_constant(matrices):
        return False
    kinds = [known_type(value) for value in (x, matrices, node)]
    shapes = [len(kind.shape) for kind in kinds]
    return shapes == [2, 3, 2] and all(kind.dtype is DType.F32 for kind in kinds)
