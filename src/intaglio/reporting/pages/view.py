"""The rows, cards and nodes of a page, as text and numbers that its template prints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from intaglio.formatting.number_text import size_text
from intaglio.lower.facts.operator_facts import Precision
from intaglio.reporting.number_formats import decibels, gain_text, macs_text, microseconds, percent
from intaglio.reporting.pages.colours import error_class, time_class, worst_class
from intaglio.reporting.pages.layout import Kernel, NetworkPicture, picture_of
from intaglio.reporting.report_data import GraphReport, OperatorReport, ReportData, Suggestion
from intaglio.runtime.reports.speed import MeasuredSpeed, is_slower

TITLE_CHARACTER = 7.4
"""Width of a character of a title in wide fonts."""
GOOD_GAIN = 1.0
"""Gain in decibels from which a change is marked."""
EXACT = 1e9
"""Number by which exact operators are sorted."""


@dataclass(frozen=True)
class Card:
    """A key figure."""

    label: str
    value: str
    note: str = ""
    other: str = ""


@dataclass(frozen=True)
class Column:
    """A column of the table of operators."""

    label: str
    title: str
    kind: str = "num"


@dataclass(frozen=True)
class Cell:
    """A cell of the table: its text, the number that it is sorted by, and its class."""

    text: str
    value: float | str | None = None
    kind: str = ""


@dataclass(frozen=True)
class TableRow:
    """A row of the table of operators."""

    id: int
    name: str
    notes: tuple[str, ...]
    precision: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class NodeView:
    """A kernel in the picture of the network."""

    id: int
    label: str
    text: str
    x: float
    y: float
    alone: str
    so_far: str
    time: str
    precision: str


@dataclass(frozen=True)
class BoxView:
    """A module in the picture of the network."""

    title: str
    short: str
    x: float
    y: float
    width: float
    height: float
    links: tuple[str, ...]
    nodes: tuple[NodeView, ...]


@dataclass(frozen=True)
class PictureView:
    """The picture of a graph."""

    width: float
    height: float
    routes: tuple[str, ...]
    boxes: tuple[BoxView, ...]


@dataclass(frozen=True)
class NetworkView:
    """A graph of the model: its picture, and where its operators begin in the numbering of the page."""

    name: str
    picture: PictureView
    nodes: tuple[NodeView, ...]
    first: int
    edges: tuple[tuple[int, int], ...]


# ---- cards ----------------------------------------------------------------------------------------------------------


def cards(data: ReportData, other: ReportData | None) -> Iterator[Card]:
    """Yield the key figures, with those of another report beside them."""
    beside = dict(_figures(other)) if other is not None else {}
    for label, (value, note) in _figures(data):
        yield Card(label, value, note, beside.get(label, ("", ""))[0])


def _figures(data: ReportData) -> Iterator[tuple[str, tuple[str, str]]]:
    coverage, comparison = data.coverage, data.comparison
    if comparison is not None and comparison.results:
        yield "SQNR of the result", (decibels(comparison.results[0]), f"{comparison.samples} samples")
        if comparison.agreement is not None:
            yield "Same class as float", (percent(comparison.agreement), "top-1 agreement")
        yield "Cosine similarity", (f"{comparison.cosine:.5f}", "mean of the samples")
    parts = [graph.comparison.results[0] for graph in data.graphs if graph.comparison and graph.comparison.results]
    if parts:
        yield "SQNR of the parts", (decibels(min(parts)), f"the lowest of {len(parts)}")
    operators = f"{coverage.operators_int8} of {coverage.operators_total} operators"
    macs = percent(coverage.macs) if coverage.macs_total else "–"
    yield "MACs in int8", (macs, f"of {macs_text(coverage.macs_total) or 'none'}, {operators}")
    yield "Float islands", (str(coverage.islands), f"{len(coverage.loops)} float operators in the program")
    before, after = size_text(coverage.bytes_before), size_text(coverage.bytes_after)
    yield "Parameters", (after, f"instead of {before}")
    profiles = [graph.profile for graph in data.graphs if graph.profile is not None]
    if profiles:
        time = sum(profile.call_microseconds for profile in profiles)
        threads = f"{profiles[0].threads} thread{'s' * (profiles[0].threads != 1)}"
        yield "Time of one sample", (microseconds(time), f"{threads}, {data.run.isa}, on this machine as it was")
    if (speed := data.measured) is not None:
        yield "Beside the float model", _speed_figure(speed)
    if len(profiles) == 1 and (limit := profiles[0].limit):
        macs_done = sum(part.macs for part in profiles[0].parts)
        share = macs_done / max(profiles[0].call_microseconds, 1e-9) / 1e3 / limit
        yield "Of the peak throughput", (percent(share, 0), f"{limit:.0f} GMAC/s from registers")


def _speed_figure(speed: MeasuredSpeed) -> tuple[str, str]:
    """Return the factor between two models, in few characters because cards are narrow, and what it means."""
    times = f"{microseconds(median(speed.int8))} a call in int8, {microseconds(median(speed.float32))} in PyTorch"
    if is_slower(speed.int8, speed.float32):
        return f"{1 / speed.speedup:.2f} times", f"as long, int8 is slower: {times}"
    if is_slower(speed.float32, speed.int8):
        return f"{speed.speedup:.2f} times", f"as fast: {times}"
    return "As fast", f"or the difference may be noise: {times}"


# ---- table ----------------------------------------------------------------------------------------------------------

COLUMNS = (
    Column("Operator", "modules and operator; press a name for details", ""),
    Column("Types", "type of the operands and of the result", ""),
    Column("Own error, dB", "signal-to-noise ratio of its own rounding, with exact operands"),
    Column("So far, dB", "signal-to-noise ratio with everything before it quantized too"),
    Column("Clipped", "share of the float model's values outside of the range"),
    Column("In use", "share of the quantized values that occur"),
    Column("Time", "time of its kernel for one sample"),
    Column("Share", "share of the time of all steps"),
    Column("Of limit", "share of the peak throughput of int8"),
    Column("MACs", "multiply-accumulates of one sample"),
)
BESIDE = (
    Column("Own error there, dB", "the same in the other report"),
    Column("So far there, dB", "the same in the other report"),
    Column("Time there", "the same in the other report"),
)


def rows(data: ReportData, other: ReportData | None) -> Iterator[TableRow]:
    """Yield the rows of the table of operators, in execution order."""
    there = {(graph.name, one.name): (graph, one) for graph in other.graphs for one in graph.operators} if other else {}
    number = 0
    for graph in data.graphs:
        for one in graph.operators:
            cells = list(_cells(graph, one))
            if other is not None:
                cells += _cells_beside(*there.get((graph.name, one.name), (graph, None)))
            yield TableRow(number, one.name, tuple(_notes(graph, one)), one.facts.precision.value, tuple(cells))
            number += 1


def _notes(graph: GraphReport, one: OperatorReport) -> Iterator[str]:
    if graph.name:
        yield graph.name
    if one.facts.reason:
        yield f"in float: {one.facts.reason}"
    if one.counted_with:
        yield f"in the kernel of {one.counted_with}"
    elif one.fused:
        yield f"fused with {'; '.join(one.fused)}"
    if one.is_view:
        yield "shares the memory of its input"
    if one.row is not None and one.row.line:
        yield short_source(one.row.line)


def short_source(line: str) -> str:
    """Return a source line with the last part of its path only, such as ``net.py:88``."""
    return line.partition(", in ")[0].rpartition("/")[2]


def _cells(graph: GraphReport, one: OperatorReport) -> Iterator[Cell]:
    row = one.row
    yield Cell(types_of(one), types_of(one))
    yield _error_cell(None if row is None else row.alone)
    yield _error_cell(None if row is None else row.so_far)
    use = None if row is None else row.use
    clipped = None if use is None else use.below + use.above
    yield Cell("" if clipped is None else percent(clipped, 2), clipped, "num")
    levels = None if use is None else use.levels
    yield Cell("" if levels is None else percent(levels, 0), levels, "num")
    time, share = graph.microseconds(one), graph.share(one)
    yield Cell("" if time is None else microseconds(time), significant(time), "num")
    kind = "num" if share is None else f"num h{time_class(share)}"
    yield Cell("" if share is None else percent(share), significant(share), kind)
    limit = graph.of_limit(one)
    yield Cell("" if limit is None else percent(limit, 0), significant(limit), "num")
    yield Cell(macs_text(one.facts.macs), one.facts.macs or None, "num")


def _cells_beside(graph: GraphReport, one: OperatorReport | None) -> list[Cell]:
    if one is None:
        return [Cell("–", None, "num other")] * len(BESIDE)
    errors = (None, None) if one.row is None else (one.row.alone, one.row.so_far)
    time = graph.microseconds(one)
    cells = [Cell(decibels(error, ""), _sorted_by(error), "num other") for error in errors]
    return [*cells, Cell("" if time is None else microseconds(time), significant(time), "num other")]


def _error_cell(error: float | None) -> Cell:
    if error is None:
        return Cell("", None, "num")
    return Cell(decibels(error, ""), _sorted_by(error), f"num h{error_class(error)}")


def _sorted_by(error: float | None) -> float | None:
    if error is None:
        return None
    return round(error, 3) if math.isfinite(error) else math.copysign(EXACT, error)


def significant(value: float | None) -> float | None:
    """Return a number with the digits that sorting and drawing need."""
    return None if value is None else float(f"{value:.5g}")


def types_of(one: OperatorReport) -> str:
    """Return the types of the operands and of the result of an operator, such as ``u8 × s8 → u8``."""
    facts, site = one.facts, one.site
    result = site.datatype if site is not None else facts.type.partition("[")[0]
    if facts.precision != Precision.INT8:
        return result
    if one.counted_with:  # the operands of its kernel stand beside the main operator
        return f"→ {result}" if facts.value else ""
    given = " × ".join(filter(None, ("u8" if facts.inputs else "", one.weight.datatype if one.weight else "")))
    return f"{given} → {result}" if facts.value and given else given or result


# ---- network --------------------------------------------------------------------------------------------------------


def graph_views(data: ReportData) -> Iterator[NetworkView]:
    """Yield the pictures of the graphs. Operators are numbered through all graphs."""
    first = 0
    for graph in data.graphs:
        picture = picture_of(graph, data.name)
        boxes = tuple(_box_views(graph, picture, first))
        nodes = tuple(node for box in boxes for node in box.nodes)
        edges = tuple((first + a, first + b) for a, b in picture.edges)
        yield NetworkView(
            graph.name, PictureView(picture.width, picture.height, picture.routes, boxes), nodes, first, edges
        )
        first += len(graph.operators)


def _box_views(graph: GraphReport, picture: NetworkPicture, first: int) -> Iterator[BoxView]:
    for box in picture.boxes:
        nodes = tuple(_node(graph, node.kernel, node.label, (node.x, node.y), first) for node in box.nodes)
        most = max(int((box.width - 20) / TITLE_CHARACTER), 4)
        short = box.title if len(box.title) <= most else f"…{box.title[-most + 1 :].lstrip(' .')}"
        yield BoxView(box.title, short, box.x, box.y, box.width, box.height, tuple(box.links), nodes)


def _node(graph: GraphReport, kernel: Kernel, label: str, at: tuple[float, float], first: int) -> NodeView:
    members = [graph.operators[index] for index in kernel.members]
    errors = [one.row for one in members if one.row is not None]
    alone = min((row.alone for row in errors), default=None)
    so_far = min((row.so_far for row in errors), default=None)
    share = graph.share(kernel.owner)
    kinds = ", ".join(dict.fromkeys(one.facts.operator.removeprefix("aten.").partition(".")[0] for one in members))
    place = kernel.owner.facts.path or "model"
    named = place if label in place else f"{label}, {place}"  # what is seen is part of what is said
    facts = [f"{named}: {kinds}", kernel.owner.facts.precision.value]
    if alone is not None:
        facts.append(f"own error {decibels(alone)}, so far {decibels(so_far)}")
    if share is not None:
        facts.append(f"{percent(share)} of the time")
    return NodeView(
        first + kernel.index,
        label,
        "; ".join(facts),
        *at,
        worst_class([error_class(row.alone) for row in errors]),
        worst_class([error_class(row.so_far) for row in errors]),
        time_class(share),
        kernel.owner.facts.precision.value,
    )


# ---- changes --------------------------------------------------------------------------------------------------------


def suggestion_view(one: Suggestion) -> Mapping[str, Any]:
    """Return a change that was tried, as text."""
    agreement = ""
    if one.agreement_before is not None and one.agreement_after is not None:
        agreement = f"{percent(one.agreement_before)} → {percent(one.agreement_after)}"
    return {
        "title": one.title,
        "gain": gain_text(one.gain),
        "good": one.gain >= GOOD_GAIN,
        "before": decibels(one.before),
        "after": decibels(one.after),
        "agreement": agreement,
        "macs": percent(one.macs),
        "python": one.python,
        "command": one.command,
        "failure": one.failure,
    }


def losing_rows(data: ReportData) -> Iterator[Mapping[str, str]]:
    """Yield the operators that take longer in int8 than in PyTorch, with what leaves them in float."""
    for one in data.measured.losing if data.measured is not None else ():
        int8, float32 = median(one.int8), median(one.float32)
        yield {
            "name": one.name,
            "int8": microseconds(int8),
            "float32": microseconds(float32),
            "python": f"skip=[{one.selector!r}]" if one.selector else "",
        }


def run_lines(data: ReportData) -> Iterator[tuple[str, str]]:
    """Yield what repeats the report, as label and text."""
    run = data.run
    yield "Versions", ", ".join(f"{name} {version}" for name, version in run.versions.items())
    threads = f"{run.threads} thread{'s' * (run.threads != 1)}"
    yield "Machine", ", ".join(filter(None, (run.cpu, run.isa, threads)))
    if run.samples:
        yield "Data", f"{run.samples} samples, SHA-256 {run.data}"
    if run.parameters:
        yield "Parameters", f"SHA-256 {run.parameters}"
    if run.weights:
        yield "Weights", f"SHA-256 {run.weights}"
