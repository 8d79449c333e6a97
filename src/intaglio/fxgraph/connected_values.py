"""Values that are computed from others in front of the next convolutions, linear layers and products."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import fx

from intaglio.fxgraph.node_info import info
from intaglio.fxgraph.nodes import is_anchor


def following_values(values: Iterable[fx.Node], passes: Callable[[fx.Node], bool]) -> frozenset[fx.Node]:
    """Return some values and those computed from them, up to the next convolutions, linear layers and products.

    Args:
        values: the first values.
        passes: tells whether an operator is followed further.
    """
    found = set(values)
    waiting = list(found)
    while waiting:
        for user in waiting.pop().users:
            follows = user.op == "call_function" and info(user).dim is None and not is_anchor(user)
            if user not in found and follows and passes(user):
                found.add(user)
                waiting.append(user)
    return frozenset(found)


def connected_values(graph: fx.Graph, names: Collection[str]) -> frozenset[fx.Node]:
    """Return some values, those computed from them, and those computed for any of these.

    They reach from the convolutions, linear layers and products in front, whose results are among them, to those
    behind. They do not depend on what a recipe leaves in float.

    Args:
        graph: the graph.
        names: node names of the first values.
    """
    if not names:
        return frozenset()
    found = set(following_values([node for node in graph.nodes if node.name in names], lambda node: True))
    for node in reversed(graph.nodes):
        if node in found and not is_anchor(node):
            found.update(node.all_input_nodes)
    return frozenset(found)
