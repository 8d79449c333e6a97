"""Extract float islands from a reference graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from intaglio.fxgraph.node_info import fixed_size, info, known_type
from intaglio.fxgraph.nodes import arguments, operator, tensor_nodes
from intaglio.ir import Dim
from intaglio.quant.qdq.integer_regions import IntegerRegion
from intaglio.quant.recipes.datatypes import FLOAT8
from intaglio.signature import DTYPES


@dataclass(frozen=True)
class Unit:
    """Nodes that are lowered together.

    Attributes:
        nodes: The nodes, in execution order.
        needs: Nodes whose values must be available before.
        native: Whether the compiled program computes the nodes, not PyTorch.
        region: Integer region of the nodes, or None.
    """

    nodes: tuple[fx.Node, ...]
    needs: tuple[fx.Node, ...]
    native: bool
    region: IntegerRegion | None = None


@dataclass(frozen=True)
class IslandPart:
    """A graph module with the nodes of an island.

    Attributes:
        module: Takes the tensors `inputs` followed by the integers `dims`, and returns a tuple of `outputs`.
        inputs: Nodes of the reference whose values the module takes.
        dims: Dynamic dimensions that the module takes.
        outputs: Nodes of the reference whose values the module returns.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    dims: tuple[Dim, ...]
    outputs: tuple[fx.Node, ...]


def extract_island(module: fx.GraphModule, nodes: list[fx.Node], results: Collection[fx.Node]) -> IslandPart:
    """Copy these nodes, given in execution order, and their constants, which may be the caller's, to another module.

    Args:
        module: the graph.
        nodes: the nodes to copy.
        results: those of them that other operators may read.
    """
    own = set(nodes)
    used = dict.fromkeys(leaf for node in nodes for leaf in tensor_nodes((node.args, node.kwargs)) if leaf not in own)
    symbols = {leaf: dim for leaf in used if (dim := info(leaf).dim) is not None}
    constants = [leaf for leaf in used if leaf.op == "get_attr"]
    inputs = [leaf for leaf in used if leaf not in symbols and leaf not in constants]
    outputs = tuple(node for node in nodes if node in results and any(user not in own for user in node.users))
    graph, root = fx.Graph(), nn.Module()
    copies: dict[fx.Node, fx.Node] = {}
    for leaf in (*inputs, *symbols):
        copies[leaf] = graph.placeholder(leaf.name)
    for leaf in constants:
        name = str(leaf.target) if str(leaf.target).isidentifier() else f"constant_{leaf.target}"  # "0_weight"
        root.register_buffer(name, getattr(module, leaf.target).clone(memory_format=torch.contiguous_format))
        copies[leaf] = graph.get_attr(name)
    for node in nodes:
        if node.op == "get_attr":
            root.register_buffer(
                str(node.target), getattr(module, node.target).clone(memory_format=torch.contiguous_format)
            )
        write = None if info(node).observer is not None else ISLAND_DECOMPOSITIONS.get(operator(node).partition(".")[2])
        copies[node] = write(graph, node, copies) if write else graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[node] for node in outputs))
    return IslandPart(fx.GraphModule(root, graph), tuple(inputs), tuple(symbols.values()), outputs)


# Quantize and dequantize nodes and grouped layers become ATen operators, because files store only these.


def _decompose_quantize(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    aten, (low, high, dtype) = torch.ops.aten, node.args[-3:]
    steps = graph.call_function(aten.mul.Tensor, (copies[node.args[0]], 1.0 / float(node.args[1])))
    if DTYPES[dtype] in FLOAT8:
        rounded = graph.call_function(aten.nan_to_num.default, (steps, 0.0))
    else:
        rounded = graph.call_function(aten.round.default, (steps,))
    if node.args[2]:
        rounded = graph.call_function(aten.add.Tensor, (rounded, node.args[2]))
    bounded = graph.call_function(aten.clamp.default, (rounded, low, high))
    return graph.call_function(aten._to_copy.default, (bounded,), {"dtype": dtype})


def _decompose_dequantize(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    aten = torch.ops.aten
    scale, zero = (_per_channel(graph, node, parameter, copies) for parameter in node.args[1:3])
    real = graph.call_function(aten._to_copy.default, (copies[node.args[0]],), {"dtype": torch.float32})
    if zero is not None:
        real = graph.call_function(aten.sub.Tensor, (real, zero))
    return graph.call_function(aten.mul.Tensor, (real, scale))


def _per_channel(graph: fx.Graph, node: fx.Node, parameter: Any, copies: Mapping[fx.Node, fx.Node]) -> Any:
    """Return a parameter of a dequantize node: a number, a constant along the axis of the channels, or ``None`` for
    zeros."""
    if not isinstance(parameter, fx.Node):
        return parameter or None
    if not getattr(node.graph.owning_module, str(parameter.target)).any():
        return None
    shape = [-1 if axis == node.args[3] else 1 for axis in range(len(known_type(node).shape))]
    return graph.call_function(torch.ops.aten.reshape.default, (copies[parameter], shape))


def _decompose_grouped_linear(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Write a linear layer for each group of rows; rows behind all groups give zeros."""
    aten, given = torch.ops.aten, arguments(node)
    x, weight, ends = (copies[given[name]] for name in ("input", "weight", "ends"))
    bias, outputs = given["bias"], known_type(node).shape[1]
    inside = graph.call_function(aten.clamp_min.default, (ends, 0))
    edges = graph.call_function(getitem, (graph.call_function(aten.cummax.default, (inside, 0)), 0))
    parts, start = [], 0
    for group in range(fixed_size(given["ends"], 0)):
        own = [
            graph.call_function(aten.slice.Tensor, (part, 0, group * outputs, (group + 1) * outputs))
            for part in (weight, *([] if bias is None else [copies[bias]]))
        ]
        edge = graph.call_function(aten.select.int, (edges, 0, group))
        stop = graph.call_function(aten._local_scalar_dense.default, (edge,))
        rows = graph.call_function(aten.slice.Tensor, (x, 0, start, stop))
        parts.append(graph.call_function(aten.linear.default, (rows, *own)))
        start = stop
    rows = graph.call_function(aten.zeros_like.default, (graph.call_function(aten.slice.Tensor, (x, 0, start)),))
    parts.append(graph.call_function(aten.linear.default, (rows, own[0])))
    return graph.call_function(aten.cat.default, (parts,))


def _decompose_groups(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Write `group_operator.dequantize_groups`."""
    aten, (quantized, steps, group) = torch.ops.aten, node.args
    shape = [fixed_size(node, axis) for axis in range(len(known_type(node).shape))]
    real = graph.call_function(aten._to_copy.default, (copies[quantized],), {"dtype": torch.float32})
    real = graph.call_function(aten.reshape.default, (real, [shape[0], -1]))
    for index in range(fixed_size(steps, 0)):
        part = graph.call_function(aten.select.int, (copies[steps], 0, index))
        part = graph.call_function(aten.repeat_interleave.self_int, (part, group, 1))
        part = graph.call_function(aten.slice.Tensor, (part, 1, 0, math.prod(shape[1:])))
        real = graph.call_function(aten.add.Tensor if index else aten.mul.Tensor, (real, part))
    return graph.call_function(aten.reshape.default, (real, shape))


ISLAND_DECOMPOSITIONS: Mapping[str, Callable[[fx.Graph, fx.Node, Mapping[fx.Node, fx.Node]], fx.Node]] = {
    "quantize_per_tensor.default": _decompose_quantize,
    "dequantize_per_tensor.default": _decompose_dequantize,
    "dequantize_per_channel.default": _decompose_dequantize,
    "grouped_linear.default": _decompose_grouped_linear,
    "dequantize_groups.default": _decompose_groups,
}
"""Functions that replace these operators, by operator name without the namespace.

There is none for quantize_per_channel: only constants are quantized per channel, and they hold integers already.
"""
