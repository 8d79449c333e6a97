"""The record of a fusion, and the search for every match of a list of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from intaglio.fusion.matcher import GraphView, Match, N, matches
from intaglio.fusion.pattern import Pattern

R = TypeVar("R")
Condition = Callable[[Match[Any], Any], str | None]
"""A function of a match and the view of the graph it was found in, which is that of the row's level."""


class FusionLevel(StrEnum):
    """The graph a fusion is matched on."""

    CAPTURED = "captured"
    """The float graph before it is annotated, where a fusion makes one operator of several."""
    GRAPH = "graph"
    """The float graph that is annotated."""
    INTEGER = "integer"
    """The integer graph: loops, and the accumulators of products."""
    LOOP_BODY = "loop body"
    """What one loop of the integer graph computes, element by element."""
    PARTITION = "partition"
    """The partitions of a plan, each called by its anchor, when layouts and views are known."""


@dataclass(frozen=True)
class Fusion:
    """A named pattern whose operators become one kernel.

    Attributes:
        pattern: the operators; its root is the value that may become a site, inner values never do.
        level: the graph it is matched on.
        purpose: what the fusion saves.
        where: the side condition, a predicate that returns why a match is refused, or ``None``.
        precise: the row holds only where the recipe asks for precise functions; elsewhere the function is a lookup
            table behind a site.
        becomes: for a captured graph, the ATen overload of the operator that replaces the match and reads ``x`` of the
            pattern.
    """

    name: str
    pattern: Pattern
    level: FusionLevel
    purpose: str
    where: Condition | None = None
    precise: bool = False
    becomes: str = ""

    def find(self, root: N, view: GraphView[N]) -> Iterator[Match[N]]:
        """Yield the matches at one node for which the condition holds."""
        for found in matches(self.pattern, root, view):
            if self.where is None or self.where(found, view) is None:
                yield found


def check_longest_first(rows: tuple[Fusion, ...]) -> None:
    """Raise `ValueError` unless longer rows come first: a longer one behind a shorter one would never match."""
    sizes = [row.pattern.size() for row in rows]
    if sizes != sorted(sizes, reverse=True):
        raise ValueError(f"fusion rows must stand longest first; sizes are {sizes}")


def match_rows(
    rows: Iterable[Fusion],
    nodes: Iterable[N],
    view: GraphView[N],
    accept: Callable[[Fusion, tuple[N, ...]], R | None],
    taken: set[N],
) -> list[R]:
    """Match every row at every node, in the order of the rows; an operator belongs to one match.

    Args:
        rows: the fusion rows, longest first.
        nodes: candidates for the root of a match, in execution order.
        view: the graph.
        accept: makes the caller's result of a row and its operators, in execution order; ``None`` refuses the match.
        taken: operators that belong to a match already; those of accepted matches are added.

    Returns:
        What ``accept`` returned, row by row.
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
