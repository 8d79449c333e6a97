"""Runs passes over an integer graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from intaglio.ir.graph import Graph, prune

Pass = Callable[[Graph], tuple[Graph, int]]


Verify = Callable[[Graph, str], Graph]


def run_passes(graph: Graph, passes: Iterable[Pass], verify: Verify) -> tuple[Graph, dict[str, int]]:
    """Run each pass in turn, the verifier after every one; return the graph and the rewrites each pass made."""
    counts = {}
    for step in passes:
        graph, counts[step.__name__] = step(graph)
        graph = verify(prune(graph), step.__name__)
    return graph, counts
