"""Cutting the float parts out of a reference graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx, nn

from intaglio.capture.nodes import tensor_nodes
from intaglio.ir import Dim
from intaglio.lower.regions import IntegerRegion


@dataclass(frozen=True)
class Unit:
    """One thing to schedule: nodes that are emitted together, and the nodes whose values they need."""

    nodes: tuple[fx.Node, ...]
    needs: tuple[fx.Node, ...]
    native: bool
    region: IntegerRegion | None = None


@dataclass(frozen=True)
class Part:
    """A cut-out module: takes ``inputs`` (tensors), then ``dims`` (integers); gives a tuple, one entry per output."""

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    dims: tuple[Dim, ...]
    outputs: tuple[fx.Node, ...]


def island_of(module: fx.GraphModule, nodes: list[fx.Node]) -> Part:
    """These nodes (in execution order) as a module of their own; constants come along by reference."""
    own = set(nodes)
    used = dict.fromkeys(leaf for node in nodes for leaf in tensor_nodes((node.args, node.kwargs)) if leaf not in own)
    symbols = [leaf for leaf in used if "dim" in leaf.meta]
    constants = [leaf for leaf in used if leaf.op == "get_attr"]
    inputs = [leaf for leaf in used if leaf not in symbols and leaf not in constants]
    outputs = tuple(node for node in nodes if any(user not in own for user in node.users))
    graph, root = fx.Graph(), nn.Module()
    copies: dict[fx.Node, fx.Node] = {}
    for leaf in (*inputs, *symbols):
        copies[leaf] = graph.placeholder(leaf.name)
    for leaf in constants:
        root.register_buffer(str(leaf.target), getattr(module, leaf.target))
        copies[leaf] = graph.get_attr(str(leaf.target))
    for node in nodes:
        if node.op == "get_attr":
            root.register_buffer(str(node.target), getattr(module, node.target))
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[node] for node in outputs))
    return Part(fx.GraphModule(root, graph), tuple(inputs), tuple(leaf.meta["dim"] for leaf in symbols), outputs)
