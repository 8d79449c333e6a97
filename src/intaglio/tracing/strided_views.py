"""Selections of the elements that ``as_strided`` reads, which do not depend on the strides of its tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from intaglio.errors import CaptureError
from intaglio.fxgraph.node_info import origin

aten = torch.ops.aten


BY_STRIDES = (aten.as_strided.default, aten.as_strided_scatter.default)
"""Operators that read or write memory by strides."""


def select_by_strides(
    graph: fx.Graph, node: fx.Node, sizes: Sequence[int | fx.Node] | None, batch: bool
) -> fx.Node | None:
    """Insert operators that select what a call of ``as_strided`` reads, from the flat rows of a row-major tensor.

    Args:
        graph: the graph.
        node: the call.
        sizes: the sizes of its result; ``None`` if they are not known where the program begins.
        batch: whether the first size is free, and the same in the tensor and in the result.

    Returns:
        the node with the result; ``None`` if the tensor is not row-major, or if other sizes than the batch are free.
    """
    x, strides = node.args[0], node.args[2]
    before, after = x.meta["val"], node.meta["val"]
    offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    axis = int(batch)
    numbers = [*before.shape[axis:], *after.shape[axis:], *strides, offset or 0]
    if sizes is None or not all(isinstance(number, int) for number in numbers):
        return None
    row = math.prod(before.shape[axis:])
    read = range(axis, after.dim())
    last = (offset or 0) + sum((after.shape[i] - 1) * strides[i] for i in read)
    if before.storage_offset() or not before.is_contiguous() or last >= row or (batch and strides[0] != row):
        return None
    places = _inserted(graph, node, aten.arange.default, (1,))
    places = _inserted(graph, node, aten.add.Tensor, (places, offset or 0))
    for i in read:
        steps = _inserted(graph, node, aten.arange.default, (after.shape[i],))
        steps = _inserted(graph, node, aten.mul.Tensor, (steps, strides[i]))
        places = _inserted(graph, node, aten.unsqueeze.default, (places, -1))
        places = _inserted(graph, node, aten.add.Tensor, (places, steps))
        places = _inserted(graph, node, aten.reshape.default, (places, [-1]))
    rows = _inserted(graph, node, aten.reshape.default, (x, [*sizes[:axis], row]))
    found = _inserted(graph, node, aten.index_select.default, (rows, axis, places))
    return _inserted(graph, node, aten.reshape.default, (found, list(sizes)))


def refuse_strides(module: fx.GraphModule) -> int:
    """Refuse operators that use strides and are left: tensors of a compiled program have other strides than PyTorch's.

    Raises:
        CaptureError: there is one.
    """
    for node in module.graph.nodes:
        if node.target in BY_STRIDES:
            where = origin(node)
            raise CaptureError(
                where.path,
                str(node.target),
                "it writes by strides, or reads by them from a tensor that is not row-major or has free sizes beside "
                "the batch",
                remedy="call it on tensor.contiguous(), with sizes that do not change, or use unfold or slices",
                source=where.source,
            )
    return 0


def _inserted(graph: fx.Graph, node: fx.Node, target: Any, args: Any) -> fx.Node:
    """Insert an operator in the place of another node, and compute its value with the sizes of the exported graph."""
    found = graph.create_node("call_function", target, args, name=target.overloadpacket.__name__)
    mode: Any = node.meta["val"].fake_mode
    with mode:
        found.meta = {**node.meta, "val": target(*fx.map_arg(args, lambda operand: operand.meta["val"]))}
    return found
