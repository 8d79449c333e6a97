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


def select_by_strides(graph: fx.Graph, node: fx.Node, sizes: Sequence[int | fx.Node] | None) -> fx.Node | None:
    """Insert operators that select what a call of ``as_strided`` reads, from the flat rows of a row-major tensor.

    Args:
        graph: the graph.
        node: the call.
        sizes: the sizes of its result; ``None`` if they are not known where the program begins.

    Returns:
        the node with the result; ``None`` if the tensor is not row-major, or if other sizes than the first are free.
    """
    x, strides = node.args[0], node.args[2]
    before, after = x.meta["val"], node.meta["val"]
    offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    numbers = [*before.shape[1:], *after.shape[1:], *strides, offset or 0]
    if sizes is None or not before.dim() or not after.dim() or not all(isinstance(one, int) for one in numbers):
        return None
    if before.storage_offset() or not before.is_contiguous():
        return None
    row = math.prod(before.shape[1:])
    if isinstance(before.shape[0], int) and isinstance(after.shape[0], int):
        flat, axis, read = [before.shape[0] * row], 0, range(after.dim())
    elif before.shape[0] is after.shape[0] or before.shape[0].node.expr == after.shape[0].node.expr:
        flat, axis, read = [sizes[0], row], 1, range(1, after.dim())
    else:
        return None
    last = (offset or 0) + sum((after.shape[i] - 1) * strides[i] for i in read)
    if last >= flat[-1] or (axis and strides[0] != row):
        return None
    place = _inserted(graph, before, aten.arange.default, (1,), {"dtype": torch.int64})
    place = _inserted(graph, before, aten.add.Tensor, (place, offset or 0))
    for i in read:
        steps = _inserted(graph, before, aten.arange.default, (after.shape[i],), {"dtype": torch.int64})
        steps = _inserted(graph, before, aten.mul.Tensor, (steps, strides[i]))
        place = _inserted(graph, before, aten.unsqueeze.default, (place, -1))
        place = _inserted(graph, before, aten.add.Tensor, (place, steps))
        place = _inserted(graph, before, aten.reshape.default, (place, [-1]))
    rows = _inserted(graph, before, aten.reshape.default, (x, flat))
    found = _inserted(graph, before, aten.index_select.default, (rows, axis, place))
    return graph.create_node("call_function", aten.reshape.default, (found, list(sizes)), name="reshape")


def refuse_strides(module: fx.GraphModule) -> int:
    """Refuse calls of ``as_strided`` that are left: tensors of a compiled program have other strides than PyTorch's.

    Raises:
        CaptureError: there is one.
    """
    for node in module.graph.nodes:
        if node.target is aten.as_strided.default:
            where = origin(node)
            raise CaptureError(
                where.path,
                "aten.as_strided.default",
                "it reads memory by strides, and its tensor is not row-major or has free sizes beside the batch",
                remedy="call it on tensor.contiguous(), with sizes that do not change, or use unfold or slices",
                source=where.source,
            )
    return 0


def _inserted(graph: fx.Graph, like: torch.Tensor, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
    """Insert a call and compute its value with the sizes of a tensor of the exported graph."""
    node = graph.create_node("call_function", target, args, kwargs, name=target.overloadpacket.__name__)
    values, named = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    with like.fake_mode:  # type: ignore[attr-defined]
        node.meta = {"val": target(*values, **named)}
    return node
