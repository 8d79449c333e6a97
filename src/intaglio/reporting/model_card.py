"""Model cards: Markdown that a quantized model is published with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from intaglio.formatting.number_text import count_text, size_text
from intaglio.reporting.number_formats import microseconds
from intaglio.reporting.report_data import ReportData, RunRecord
from intaglio.runtime.reports.coverage import Coverage

MOST_LISTED = 20
"""Largest number of reasons and notes that a card lists."""


def card_of(data: ReportData) -> str:
    """Return the model card of a report as Markdown."""
    return "\n".join(_lines(data)).rstrip() + "\n"


def _lines(data: ReportData) -> Iterator[str]:
    run = data.run
    yield f"# {_cell(data.name)}, int8"
    yield ""
    yield (
        f"{_cell(data.name)} was quantized to int8 with intaglio {run.versions.get('intaglio', '')} for inference on "
        "CPUs."
    )
    yield ""
    yield from _section("What is quantized", _quantized(data.coverage))
    yield from _section("Accuracy", _accuracy(data))
    yield from _section("Recipe", _recipe(run))
    yield from _section("Measured with", _measured(data))
    yield from _section("Fingerprints", _fingerprints(run))
    if notes := [*data.coverage.notes, *data.limits]:
        yield from _section("Notes", (f"- {_cell(note)}" for note in notes[:MOST_LISTED]))


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield from (f"## {title}", "", *lines, "")


def _quantized(coverage: Coverage) -> Iterator[str]:
    rows = [("operators in int8", f"{coverage.operators_int8} of {coverage.operators_total}")]
    if coverage.macs_total:
        share = f"{100 * coverage.macs:.1f} % of {count_text(coverage.macs_total)}"
        rows.append(("multiply-accumulates in int8", share))
    rows.append(("parameters", f"{size_text(coverage.bytes_after)}, {size_text(coverage.bytes_before)} in float32"))
    yield from _table(("", ""), rows)
    reasons = Counter((part.operator, part.reason) for part in (*coverage.floats, *coverage.loops, *coverage.hosts))
    if reasons:
        yield from ("", "Operators in float:", "")
        found = [(operator, reason, count) for (operator, reason), count in reasons.most_common(MOST_LISTED)]
        yield from _table(("operator", "reason", "count"), found)


def _accuracy(data: ReportData) -> Iterator[str]:
    found = data.comparison
    if found is None:
        yield "Accuracy was not measured: that needs the float model and data."
        return
    rows: list[Sequence[object]] = [("samples compared with the float model", found.samples)]
    if found.agreement is not None:
        rows.append(("same top-1 class", f"{100 * found.agreement:.2f} %"))
    rows.append(("cosine similarity of the first result", f"{found.cosine:.6f}"))
    names = found.names or ("",) * len(found.results)
    for name, decibels in zip(names, found.results, strict=False):
        result = f"result {name}" if name else "result"
        shown = f"{decibels:.1f} dB" if math.isfinite(decibels) else "exact"
        rows.append((f"signal-to-noise ratio of the {result}", shown))
    yield from _table(("", ""), rows)
    yield from ("", _cell(found.verdict))


def _recipe(run: RunRecord) -> Iterator[str]:
    if not run.recipe:
        yield "The recipe has no text form."
        return
    longest = max((len(part) for part in run.recipe.split() if set(part) == {"`"}), default=0)
    fence = "`" * max(3, longest + 1)
    yield from (f"{fence}toml", run.recipe.strip("\n"), fence)


def _measured(data: ReportData) -> Iterator[str]:
    run = data.run
    rows = [("date", run.created), *run.versions.items(), ("processor", run.cpu), ("instruction set", run.isa)]
    rows.append(("threads", str(run.threads)))
    times = [graph.profile.call_microseconds for graph in data.graphs if graph.profile is not None]
    if times:
        rows.append(("time of one call", microseconds(sum(times))))
    if data.measured is not None:
        rows.append(("time beside that of the float model in PyTorch", str(data.measured).splitlines()[0]))
    yield from _table(("", ""), [row for row in rows if row[1]])


def _fingerprints(run: RunRecord) -> Iterator[str]:
    rows = (
        ("model", run.fingerprint),
        ("inputs of the samples compared", run.data),
        ("quantization parameters", run.parameters),
        ("integer weights", run.weights),
    )
    yield from _table(("of", "digest"), [(name, f"`{digest}`") for name, digest in rows if digest])


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    for row in (columns, ["---"] * len(columns), *rows):
        yield "| " + " | ".join(_cell(str(value)) for value in row) + " |"


def _cell(text: str) -> str:
    """Return text on one line that Markdown shows as it is: no markup, and no end of a table's cell."""
    plain = " ".join(text.split())
    return "".join(f"\\{letter}" if letter in "|<>*_[]\\" else letter for letter in plain)
