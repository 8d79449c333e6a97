"""Output of results: rich tables for people, one JSON value for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from intaglio.formatting.number_text import count_text, size_text
from intaglio.runtime.reports.coverage import NO_MACS

PLAIN_WIDTH = 120
"""Columns of the output if it is not a terminal."""

Result = Mapping[str, Any]


def show(
    result: Result, as_json: bool, render: Callable[[Result], Iterable[RenderableType]], quiet: bool = False
) -> None:
    """Print a result as JSON or, unless ``quiet`` is set, as the parts that ``render`` yields."""
    if quiet and not as_json:
        return
    if as_json:
        print(json.dumps(result, indent=2, allow_nan=False))
        return
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    for part in render(result):
        console.print(part, soft_wrap=isinstance(part, str))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None, text: int = 1) -> Table:
    """Return a table. The first ``text`` columns hold words and are left-aligned, the others hold numbers."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < text else "right", overflow="fold")
    for row in rows:
        made.add_row(*[Text(str(cell)) for cell in row])
    return made


def name_value_table(rows: Iterable[tuple[str, object]], title: str | None = None) -> Table:
    """Return a table of names and values without a frame."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(Text(name), Text(str(value)))
    return made


def coverage_result(coverage: Any) -> dict[str, Any]:
    """Return a `Coverage` as a dictionary for JSON."""
    fields = ("macs_int8", "macs_total", "operators_int8", "operators_total", "islands", "bytes_before", "bytes_after")
    parts = ("path", "operator", "reason", "macs", "source")
    return {
        "macs": coverage.macs,
        "operators": coverage.operators,
        **{name: getattr(coverage, name) for name in fields},
        **{
            kind: [{name: getattr(part, name) for name in parts} for part in getattr(coverage, kind)]
            for kind in ("floats", "loops")
        },
        "notes": list(coverage.notes),
    }


def coverage_parts(coverage: Result) -> Iterator[RenderableType]:
    """Yield the printed parts of a `coverage_result`."""
    sizes = size_text(coverage["bytes_after"]), size_text(coverage["bytes_before"])
    yield name_value_table(
        (
            ("MACs", macs_in_int8(coverage["macs_int8"], coverage["macs_total"])),
            ("operators", f"{coverage['operators_int8']} of {coverage['operators_total']} in int8"),
            ("parameters", "{} instead of {} in float".format(*sizes)),
            ("float islands", coverage["islands"]),
        )
    )
    yield from floats_parts(coverage["floats"])
    yield from floats_parts(coverage["loops"], "Float operators that the compiled program runs")
    for note in coverage["notes"]:
        yield f"note: {note}"


def floats_parts(
    floats: Sequence[Result], title: str = "Operators in float islands, which PyTorch runs"
) -> Iterator[RenderableType]:
    """Yield a table of the operators in float, by operator and reason, those with the most multiply-accumulates
    first."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for part in floats:
        groups.setdefault((part["operator"], part["reason"]), []).append(part)
    rows = [
        (operator, reason, list_modules(parts), len(parts), macs_cell(sum(part["macs"] for part in parts)))
        for (operator, reason), parts in groups.items()
    ]
    if rows:
        rows.sort(key=lambda row: -sum(part["macs"] for part in groups[row[0], row[1]]))
        yield table(("operator", "why it stays in float", "modules", "count", "MACs"), rows, title, text=3)


def list_modules(parts: Sequence[Result], shown: int = 3) -> str:
    """Return the first modules of the operators as text."""
    names = list(dict.fromkeys(part["path"] or part["source"] or "model" for part in parts))
    return ", ".join(names[:shown]) + ", ..." * (len(names) > shown)


def macs_in_int8(macs: int, total: int) -> str:
    """Return the share of multiply-accumulates in int8 as text."""
    return f"{100 * macs / total:.1f} % of {count_text(total)} in int8" if total else NO_MACS


def macs_cell(macs: int) -> str:
    """Return multiply-accumulates as text, empty for 0."""
    return count_text(macs) if macs else ""
