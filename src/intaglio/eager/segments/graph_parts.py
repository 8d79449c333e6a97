"""Extract the part of a graph that computes some of its values from others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from intaglio.fxgraph.node_info import known_type
from intaglio.fxgraph.nodes import name_of, operator
from intaglio.quant.calibrate.observer import Observer
from intaglio.torch_private import OpOverload


@dataclass(frozen=True)
class GraphPart:
    """A subgraph with its own inputs.

    Attributes:
        module: Graph module that takes the values of `inputs` and returns the requested values.
        inputs: Names (`name_of`) of nodes of the complete graph.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]


class UnavailableError(Exception):
    """The graph does not hold a requested value, or the value depends on one that is not given."""


def extract_part(
    module: fx.GraphModule, given: Sequence[str], wanted: Sequence[str], observed: Collection[str]
) -> GraphPart:
    """Extract the subgraph that computes `wanted` from `given` and constants.

    Wanted values are returned as their consumers see them: after their observer, or quantized and dequantized again.

    Args:
        module: Graph of a stage.
        given: Names of the values that are known.
        wanted: Names of the values to compute.
        observed: Names of given values that an observer has already counted; the part leaves out their observers.

    Raises:
        UnavailableError: A wanted value is not in the graph, or depends on an input that is not given.
    """
    nodes = {name_of(node): node for node in module.graph.nodes}
    known = [name for name in given if name in nodes]
    ends = [_nodes_read(nodes, name) for name in wanted]
    needed = _needed_nodes(
        [source for segment in ends for source in _sources(segment)], {nodes[name] for name in known}
    )
    graph, copies = fx.Graph(), {}
    inputs = tuple(name for name in known if nodes[name] in needed)
    for name in inputs:
        copies[nodes[name]] = graph.placeholder(name)
        copies[nodes[name]].meta = dict(nodes[name].meta)
    for node in module.graph.nodes:
        if node in needed and node not in copies:
            if node.op == "call_module" and node.args[0] in copies and _is_counted_observer(module, node, observed):
                copies[node] = copies[node.args[0]]
                continue
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = dict(node.meta)
    graph.output(tuple(_copied_end(graph, copies, segment) for segment in ends))
    made = fx.GraphModule(module, graph)
    made.meta = dict(module.meta)
    return GraphPart(made, inputs)


def _is_counted_observer(module: fx.GraphModule, node: fx.Node, observed: Collection[str]) -> bool:
    return node.args[0].name in observed and isinstance(module.get_submodule(str(node.target)), Observer)


def _nodes_read(nodes: dict[str, fx.Node], name: str) -> tuple[fx.Node, ...]:
    """Return the node that consumers of a value read: the value or its observer.

    For a quantized value, return its quantize node and one of its dequantize nodes, unless the model returns it without
    rounding.
    """
    if name not in nodes:
        raise UnavailableError(name)
    node = nodes[name]
    if any(user.op == "output" for user in node.users):
        return (node,)
    for user in node.users:
        if user.op == "call_module":
            return (user,)
        if (operator(user) or "").startswith("quantized_decomposed.quantize_per"):
            back = [u for u in user.users if (operator(u) or "").startswith("quantized_decomposed.dequantize_per")]
            if back and known_type(user).dtype.bytes == 1:
                return user, back[0]
    return (node,)


def _sources(segment: tuple[fx.Node, ...]) -> list[fx.Node]:
    return [segment[0]] if len(segment) == 1 else segment[1].all_input_nodes


def _copied_end(graph: fx.Graph, copies: dict[fx.Node, fx.Node], segment: tuple[fx.Node, ...]) -> fx.Node:
    if len(segment) == 1:
        return copies[segment[0]]
    made = graph.node_copy(segment[1], copies.__getitem__)
    made.meta = dict(segment[1].meta)
    return made


def _needed_nodes(ends: Sequence[fx.Node], given: Collection[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = list(ends)
    while todo:
        node = todo.pop()
        if node in found:
            continue
        if node.op == "placeholder" and node not in given:
            raise UnavailableError(node.name)
        found.add(node)
        if node not in given:
            todo.extend(node.all_input_nodes)
    return found


def has_integers(module: fx.GraphModule) -> bool:
    """Return whether part of a reference model contains quantized operators."""
    return any(
        "quantized_decomposed" in (operator(node) or "") or _is_intaglio_operator(node) for node in module.graph.nodes
    )


def _is_intaglio_operator(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == "intaglio"
