"""The details of an operator, which the script of a page shows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from intaglio.lower.facts.operator_facts import OperatorFacts
from intaglio.reporting.describe import describe
from intaglio.reporting.pages.view import NetworkView, significant
from intaglio.reporting.report_data import GraphReport, OperatorReport, ReportData, WeightReport

MOST_COLUMNS = 96
"""Columns of the picture of a weight; more channels are grouped."""


def payload(data: ReportData, graphs: tuple[NetworkView, ...]) -> dict[str, Any]:
    """Return what the script of the page shows for an operator."""
    ops = []
    for graph, view in zip(data.graphs, graphs, strict=True):
        places = {one.name: view.first + index for index, one in enumerate(graph.operators)}
        for one in graph.operators:
            entry: dict[str, Any] = {
                "n": one.name,
                "l": [list(line) for line in describe(graph, one)],
                "k": places[one.counted_with or one.name],
                "t": search_text(one.facts),
            }
            result = kernel_result(graph, one)
            if result is not None and result is not one:
                entry["r"] = places[result.name]
            if one.histogram is not None:
                ends = one.site.range if one.site is not None else None
                low, high = (None, None) if ends is None else (significant(ends[0]), significant(ends[1]))
                entry["h"] = [one.histogram.start, one.histogram.width, list(one.histogram.counts), low, high]
            if one.weight is not None:
                entry["w"] = weight_columns(one.weight)
            ops.append(entry)
    return {"ops": ops, "edges": [list(edge) for view in graphs for edge in view.edges]}


def kernel_result(graph: GraphReport, one: OperatorReport) -> OperatorReport | None:
    """Return the operator whose quantized value an operator's kernel stores: itself, or a later one of the kernel."""
    if one.site is not None:
        return one
    behind = [graph.by_name[name] for name in one.fused if name in graph.by_name]
    return next((other for other in reversed(behind) if other.site is not None), None)


def search_text(facts: OperatorFacts) -> str:
    """Return what a search finds beside the name of an operator."""
    return " ".join(dict.fromkeys([facts.source, facts.selector, facts.site]))


def weight_columns(weight: WeightReport) -> Mapping[str, Any]:
    """Return the picture of a weight: magnitudes in percent of the largest, and decibels, by group of channels."""
    count = len(weight.largest)
    size = -(-count // MOST_COLUMNS)
    groups = [range(start, min(start + size, count)) for start in range(0, count, size)]
    top = max(weight.largest) or 1.0
    magnitudes = [round(100 * max(weight.largest[i] for i in group) / top) for group in groups]
    noise = [min(weight.decibels[i] for i in group) for group in groups]
    finite = [round(value, 1) if math.isfinite(value) else math.copysign(99, value) for value in noise]
    each = "each channel" if size == 1 else f"groups of {size} channels: the largest magnitude, the fewest decibels"
    said = f"{count} output channels, {each}; largest magnitude {top:.3g}; {min(finite):g} to {max(finite):g} dB"
    return {"m": magnitudes, "d": finite, "s": said}
