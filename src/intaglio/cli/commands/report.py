"""`intaglio report`: a page that shows what a saved model costs in accuracy and time, operator by operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

import intaglio
from intaglio.cli import targets
from intaglio.cli.show import Result, coverage_result, name_value_table
from intaglio.formatting.number_text import size_text
from intaglio.output_paths import check_file, check_folder
from intaglio.reporting.number_formats import gain_text, microseconds


@dataclass(frozen=True)
class ReportRequest:
    """Options of the command line."""

    target: Path
    float_model: str | None
    data: str | None
    out: Path | None
    against: Path | None
    model_explorer: Path | None
    samples: int
    calls: int
    tries: int

    def check(self) -> None:
        """Raise an error, which names the option, before any work."""
        targets.check_float_and_data(self.float_model, self.data)
        if self.out is not None:
            check_file(self.out)
        if self.model_explorer is not None:
            check_folder(self.model_explorer)


def run(request: ReportRequest) -> tuple[intaglio.Report, dict[str, Any]]:
    """Make the report, write its page, and return it with a summary."""
    request.check()
    model = intaglio.load(request.target)
    exact = None if request.float_model is None else targets.float_model(request.float_model, "--float")
    data = None if request.data is None else targets.batches(request.data)
    found = intaglio.report(
        exact,
        model,
        data,
        samples=request.samples,
        calls=request.calls,
        tries=request.tries,
        against=None if request.against is None else targets.report_or_model(request.against),
    )
    if request.out is not None:
        found.save(request.out)
    if request.model_explorer is not None:
        found.save_model_explorer(request.model_explorer)
    return found, _summary(found, request)


def _summary(found: intaglio.Report, request: ReportRequest) -> dict[str, Any]:
    data, out = found.data, request.out
    best = next((one for one in data.suggestions if not one.failure), None)
    profiles = [graph.profile for graph in data.graphs if graph.profile is not None]
    return {
        "model": data.name,
        "coverage": coverage_result(data.coverage),
        "verdict": data.comparison.verdict if data.comparison is not None else None,
        "microseconds": sum(profile.call_microseconds for profile in profiles) if profiles else None,
        "measured": data.measured and data.measured.to_dict(),
        "speed": data.measured and str(data.measured),
        "best": best and (best.title, gain_text(best.gain), best.command or best.python),
        "limits": data.limits,
        "out": None if out is None else str(out),
        "bytes": None if out is None else out.stat().st_size,
        "model_explorer": None if request.model_explorer is None else str(request.model_explorer),
    }


def render(result: Result) -> Iterator[RenderableType]:
    """Yield the printed parts of a summary."""
    time = result["microseconds"]
    coverage = result["coverage"]
    yield name_value_table(
        (
            ("model", result["model"]),
            ("operators", f"{coverage['operators_int8']} of {coverage['operators_total']} in int8"),
            ("time of one sample", "not measured" if time is None else microseconds(time)),
        )
    )
    if result["verdict"]:
        yield f"verdict: {result['verdict']}"
    if result["speed"]:
        yield f"beside the float model: {result['speed']}"
    if result["best"]:
        title, gain, line = result["best"]
        yield f"best change that was tried: {title} ({gain}): {line}"
    for limit in result["limits"]:
        yield f"note: {limit}"
    if result["out"]:
        yield f"{result['out']} ({size_text(result['bytes'])}) opens in any browser"
    if result["model_explorer"]:
        yield f"{result['model_explorer']} holds the graphs and node data of Model Explorer"
