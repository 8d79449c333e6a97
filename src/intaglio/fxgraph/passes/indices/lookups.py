"""Lookups of rows of a constant table, as embeddings."""

from __future__ import annotations

import torch
from torch import fx

from intaglio.fxgraph.node_info import known_type, tensor_type
from intaglio.fxgraph.nodes import call_before, is_constant, operator, replace_node
from intaglio.ir import DType, TensorType

aten = torch.ops.aten


def lookups_to_embeddings(module: fx.GraphModule) -> int:
    """Replace ``table[ids]`` and ``index_select(table, 0, ids)`` of constant tables by embeddings.

    PyTorch also decomposes `nn.Embedding` with one axis of ids to an index_select. Tables of embeddings can be int8.
    """
    hits = [(node, ids) for node in module.graph.nodes if (ids := _ids_of_rows(node)) is not None]
    for node, ids in hits:
        table, kind = node.args[0], known_type(ids)
        if operator(node) == "aten.index.Tensor":  # it counts negative ids from the end, and embeddings refuse them
            below = call_before(node, TensorType(kind.shape, DType.BOOL), aten.lt.Scalar, ids, 0)
            last = call_before(node, kind, aten.add.Scalar, ids, known_type(table).shape[0])
            ids = call_before(node, kind, aten.where.self, below, last, ids)
        replace_node(node, call_before(node, known_type(node), aten.embedding.default, table, ids))
    return len(hits)


def _ids_of_rows(node: fx.Node) -> fx.Node | None:
    """Return the ids of a lookup of whole rows in a constant float32 matrix, ``None`` for other nodes."""
    if operator(node) == "aten.index_select.default":
        table, axis, ids = node.args
    elif operator(node) == "aten.index.Tensor" and len(node.args[1]) == 1:
        table, (ids,), axis = node.args[0], node.args[1], 0
    else:
        return None
    held, kind = tensor_type(table), tensor_type(ids)
    if not is_constant(table) or held is None or kind is None or axis not in (0, -2):
        return None
    is_table = held.dtype is DType.F32 and len(held.shape) == 2 and 0 not in held.shape
    return ids if is_table and kind.dtype is DType.I64 and kind.shape else None
