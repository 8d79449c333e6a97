"""The record of a fusion, and the search for all matches of a list of fusions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from intaglio.fusion.matcher import GraphView, Match, N, matches
from intaglio.fusion.pattern import Pattern

R = TypeVar("R")
Condition = Callable[[Match[Any], Any], str | None]
"""Side condition: a function of a match and the view of the graph on which it was found."""


class FusionLevel(StrEnum):
    """The graph that a fusion is matched on."""

    CAPTURED = "captured"
    """The float graph before annotation, in which a fusion replaces several operators by one."""
    GRAPH = "graph"
    """The float graph during annotation."""
    INTEGER = "integer"
    """The integer graph: loops, and the accumulators of products."""
    LOOP_BODY = "loop body"
    """The body of one loop of the integer graph."""
    PARTITION = "partition"
    """The partitions of a plan, each matched by its anchor, after layouts and views were assigned."""


@dataclass(frozen=True)
class Fusion:
    """A named pattern whose operators become one kernel.

    Attributes:
        name: Name of the fusion.
        pattern: The operators. The value of its root may become a quantization site, inner values never do.
        level: The graph that it is matched on.
        purpose: The benefit of the fusion.
        where: Side condition that returns why a match is refused, or ``None``.
        precise: The fusion applies only if the recipe asks for precise functions; otherwise the function is a lookup
            table after a site.
        becomes: ATen overload of the operator that replaces a match on a captured graph; it reads ``x`` of the pattern.
    """

    name: str
    pattern: Pattern
    level: FusionLevel
    purpose: str
    where: Condition | None = None
    precise: bool = False
    becomes: str = ""

    def find(self, root: N, view: GraphView[N]) -> Iterator[Match[N]]:
        """Yield the matches at one node that satisfy the side condition."""
        for found in matches(self.pattern, root, view):
            if self.where is None or self.where(found, view) is None:
                yield found


def check_longest_first(rows: tuple[Fusion, ...]) -> None:
    """Raise `ValueError` unless longer patterns come first: a longer one after a shorter one would never match."""
    sizes = [row.pattern.size() for row in rows]
    if sizes != sorted(sizes, reverse=True):
        raise ValueError(f"fusions must be listed with the longest pattern first, but their sizes are {sizes}")


def match_rows(
    rows: Iterable[Fusion],
    nodes: Iterable[N],
    view: GraphView[N],
    accept: Callable[[Fusion, tuple[N, ...]], R | None],
    taken: set[N],
) -> list[R]:
    """Match every fusion at every node, in the order of the fusions; an operator belongs to at most one match.

    Args:
        rows: The fusions, longest first.
        nodes: Candidates for the root of a match, in execution order.
        view: The graph.
        accept: Converts a fusion and its operators, in execution order, to a result; ``None`` refuses the match.
        taken: Operators that already belong to a match; those of accepted matches are added.

    Returns:
        The results of ``accept``, fusion by fusion.
    """
    candidates, found = list(nodes), list[R]()
    for row in rows:
        for node in candidates:
            hit = next(row.find(node, view), None) if node not in taken else None
            if hit is None or taken.intersection(hit.nodes):
                continue
            if (result := accept(row, tuple(sorted(hit.nodes, key=view.position)))) is not None:
                found.append(result)
                taken.update(hit.nodes)
    return found
