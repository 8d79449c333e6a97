"""Graphs and node data for Model Explorer (https://github.com/google-ai-edge/model-explorer)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from intaglio.lower.facts.operator_facts import Precision
from intaglio.output_paths import check_folder, write_text
from intaglio.reporting.number_formats import microseconds
from intaglio.reporting.report_data import GraphReport, OperatorReport, ReportData

GRAPH_FILE = "graph.json"
GREEN, YELLOW, RED, WHITE, BLUE = "#1a9850", "#fee08b", "#d73027", "#ffffff", "#4393c3"
PRECISION_COLOURS = {
    Precision.INPUT: WHITE,
    Precision.INT8: GREEN,
    Precision.FLOAT32: YELLOW,
    Precision.PYTORCH: RED,
}
LOW_IS_BAD = [{"stop": 0, "bgColor": RED}, {"stop": 0.5, "bgColor": YELLOW}, {"stop": 1, "bgColor": GREEN}]
HIGH_IS_MUCH = [{"stop": 0, "bgColor": WHITE}, {"stop": 1, "bgColor": BLUE}]

Measure = Callable[[GraphReport, OperatorReport], float | None]
MEASURES: Mapping[str, tuple[Measure, list[dict[str, Any]]]] = {
    "own_error_db": (lambda graph, one: None if one.row is None else one.row.alone, LOW_IS_BAD),
    "error_so_far_db": (lambda graph, one: None if one.row is None else one.row.so_far, LOW_IS_BAD),
    "microseconds": (lambda graph, one: graph.microseconds(one), HIGH_IS_MUCH),
}
"""Numbers of an operator by the name of their file, and the colours from the smallest to the largest. Ratios of signal
to noise are in decibels; those without noise are left out."""


def graphs(data: ReportData) -> list[dict[str, Any]]:
    """Return the graphs of a report in the JSON format of Model Explorer, with modules as nested layers."""
    return [
        {"id": _name(data, graph), "nodes": [_node(graph, one) for one in graph.operators]} for graph in data.graphs
    ]


def node_data(data: ReportData) -> dict[str, dict[str, Any]]:
    """Return the node data of each measure that is known, and of the types that operators run in, by name."""
    found: dict[str, dict[str, Any]] = {}
    for name, (measure, gradient) in MEASURES.items():
        for graph in data.graphs:
            values = {one.facts.node: measure(graph, one) for one in graph.operators}
            known = {node: value for node, value in values.items() if value is not None and math.isfinite(value)}
            if known:
                results = {node: {"value": round(value, 1)} for node, value in known.items()}
                of_graph: dict[str, Any] = {"results": results, "gradient": gradient}
                if name.endswith("_db"):
                    of_graph["hideAggregatedStats"] = ["sum"]
                found.setdefault(name, {})[_name(data, graph)] = of_graph
    found["precision"] = {
        _name(data, graph): {
            "results": {
                one.facts.node: {"value": str(one.facts.precision), "bgColor": PRECISION_COLOURS[one.facts.precision]}
                for one in graph.operators
            }
        }
        for graph in data.graphs
    }
    return found


def save_model_explorer(data: ReportData, folder: str | Path) -> list[Path]:
    """Write the graphs to ``graph.json`` in a folder, and the node data of each measure to a file of its name.

    Returns:
        The files, the graphs first.

    Raises:
        ArtifactError: a file cannot be written.
    """
    check_folder(folder)
    Path(folder).mkdir(parents=True, exist_ok=True)
    contents: dict[str, Any] = {GRAPH_FILE: graphs(data)}
    contents |= {f"{name}.json": content for name, content in node_data(data).items()}
    for name, content in contents.items():
        write_text(Path(folder) / name, json.dumps(content, indent=1, allow_nan=False))
    return [Path(folder) / name for name in contents]


def _name(data: ReportData, graph: GraphReport) -> str:
    return graph.name or data.name


def _node(graph: GraphReport, one: OperatorReport) -> dict[str, Any]:
    """Return a node with its module as namespace, and what is known about the operator as attributes."""
    facts, time, share = one.facts, graph.microseconds(one), graph.of_limit(one)
    attributes = {
        "runs in": str(facts.precision),
        "reason": facts.reason,
        "fused with": ", ".join(one.fused),
        "time counted with": one.counted_with,
        "own error": "" if one.row is None else f"{one.row.alone:.1f} dB",
        "error so far": "" if one.row is None else f"{one.row.so_far:.1f} dB",
        "time": "" if time is None else microseconds(time),
        "share of the peak throughput": "" if share is None else f"{100 * share:.0f} %",
        "multiply-accumulates": f"{facts.macs:,}" if facts.macs else "",
        "source": facts.source,
        "selector": facts.selector,
    }
    return {
        "id": facts.node,
        "label": facts.operator.removeprefix("aten.").split(".")[0],
        "namespace": "/".join(part for part in facts.path.split(".") if part),
        "incomingEdges": [{"sourceNodeId": node, "targetNodeInputId": str(i)} for i, node in enumerate(facts.reads)],
        "attrs": [{"key": key, "value": value} for key, value in attributes.items() if value],
        "outputsMetadata": [{"id": "0", "attrs": [{"key": "type", "value": facts.type}]}],
    }
