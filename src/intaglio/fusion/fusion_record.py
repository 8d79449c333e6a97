"""The record of a fusion, and the search for every match of a list of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from intaglio.fusion.matcher import GraphView, Match, N, match
from intaglio.fusion.pattern import Pattern

R = TypeVar("R")
Condition = Callable[[Match[Any], GraphView[Any]], str | None]


class FusionLevel(StrEnum):
    """The graph a fusion is matched on: the annotated float graph, or the integer graph."""

    GRAPH = "graph"
    INTEGER = "integer"


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
    """

    name: str
    pattern: Pattern
    level: FusionLevel
    purpose: str
    where: Condition | None = None
    precise: bool = False


def rows_at(level: FusionLevel, rows: tuple[Fusion, ...]) -> tuple[Fusion, ...]:
    """Return the rows that are matched on this kind of graph, longest first."""
    return tuple(row for row in rows if row.level is level)


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
            hit = match(row.pattern, node, view) if node not in taken else None
            if hit is None or taken.intersection(hit.nodes):
                continue
            if row.where is not None and row.where(hit, view) is not None:
                continue
            if (result := accept(row, tuple(sorted(hit.nodes, key=view.position)))) is not None:
                found.append(result)
                taken.update(hit.nodes)
    return found
