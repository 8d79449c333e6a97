"""Search for the operators that a user means by a module path, an operator, a site, a source line or another name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

from intaglio.errors import InputError
from intaglio.formatting.source_paths import short_source_path
from intaglio.reporting.report_data import GraphReport, OperatorReport, ReportData

Found = tuple[GraphReport, OperatorReport]
Names = Callable[[OperatorReport], Iterator[str]]


def find_operators(data: ReportData, where: str) -> tuple[Found, ...]:
    """Return the operators with a name. What a user writes counts before the names that stages give.

    Args:
        data: the operators.
        where: name of a row, node, site or step, path of a module, ATen operator, or line of source code such as
            ``net.py:12``.

    Raises:
        InputError: no operator has the name; the error says the nearest ones.
    """
    wanted = _as_recorded(where.strip())
    for names in KINDS:
        found = tuple(
            (graph, one) for graph in data.graphs for one in graph.operators if wanted and wanted in set(names(one))
        )
        if found:
            return found
    inside = tuple(
        (graph, one) for graph in data.graphs for one in graph.operators if f"{_plain(one)}.".startswith(f"{wanted}.")
    )
    if wanted and inside:
        return inside
    known = {name for graph in data.graphs for one in graph.operators for names in KINDS for name in names(one)}
    known |= {_parent(name, depth) for name in {_plain(one) for _, one in _all(data)} for depth in range(1, 6)}
    near = difflib.get_close_matches(where, sorted(known - {""}), n=3, cutoff=0.4)
    problem = f"no operator has the name {where!r:.80}"
    remedy = f"nearest: {', '.join(near)}" if near else "print model.text('operators') for all names"
    raise InputError("explain", None, problem, remedy=remedy)


def _as_recorded(where: str) -> str:
    """Return a source line with the path as operators have it; other names unchanged."""
    path, colon, line = where.rpartition(":")
    return f"{short_source_path(path)}:{line}" if colon and path.endswith(".py") else where


def _all(data: ReportData) -> Iterator[Found]:
    return ((graph, one) for graph in data.graphs for one in graph.operators)


def _parent(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth])


def _plain(one: OperatorReport) -> str:
    """Return the path of an operator's module without the marks of its second and later calls."""
    return ".".join(part.partition("@")[0] for part in one.facts.path.split("."))


def _rows(one: OperatorReport) -> Iterator[str]:
    yield one.name


def _sites(one: OperatorReport) -> Iterator[str]:
    yield from (one.facts.site, one.facts.weight)


def _paths(one: OperatorReport) -> Iterator[str]:
    yield from (one.facts.path, _plain(one), *one.facts.folded)


def _operators(one: OperatorReport) -> Iterator[str]:
    name = one.facts.operator
    packet = name.rpartition(".")[0]
    yield from (name, f"op:{name}", packet, f"op:{packet}", packet.removeprefix("aten."))


def _lines(one: OperatorReport) -> Iterator[str]:
    """Yield the source line in the forms that people write: with and without folders, and with the function."""
    source = one.facts.source
    path = source.partition(", in ")[0]
    yield from (source, path)
    parts = path.split("/")
    yield from ("/".join(parts[start:]) for start in range(1, len(parts)))


def _nodes(one: OperatorReport) -> Iterator[str]:
    yield from (one.facts.node, one.facts.value)


KINDS: tuple[Names, ...] = (
    _rows,
    _sites,
    _paths,
    _lines,
    _operators,
    _nodes,  # last: capture calls the first of many ReLUs "relu", which is also the name of the operator
)
"""Kinds of names, in the order in which they are looked for."""
