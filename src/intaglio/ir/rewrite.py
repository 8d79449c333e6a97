"""Pass manager of the integer graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from intaglio.ir.graph import Graph, prune

Pass = Callable[[Graph], tuple[Graph, int]]


Verify = Callable[[Graph, str], Graph]


def run_passes(graph: Graph, passes: Iterable[Pass], verify: Verify) -> tuple[Graph, dict[str, int]]:
    """Run the passes in order and verify the graph after each; return the graph and the number of rewrites of each
    pass.
    """
    counts = {}
    for step in passes:
        graph, counts[step.__name__] = step(graph)
        graph = verify(prune(graph), step.__name__)
    return graph, counts
