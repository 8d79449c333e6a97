"""`intaglio compare`: comparison of a saved model with its float model, operator by operator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import RenderableType

import intaglio
from intaglio.cli import targets
from intaglio.cli.show import Result, table


def run(target: Path, float_model: str, data: str, samples: int | None, worst: int) -> dict[str, Any]:
    """Compare the models and return the result for JSON."""
    model, batches = targets.float_model(float_model, "--float"), targets.batches(data)
    found = intaglio.compare(model, intaglio.load(target), batches, samples=samples)
    skip = found.skip_list(worst) if found.rows else []
    stands_for = {selector: [row.name for row in found.skipped_by(selector)] for selector in skip}
    return {**found.to_dict(), "skip": skip, "skipped": stands_for}


def render(result: Result) -> Iterator[RenderableType]:
    """Yield the printed parts of a result."""
    results = ", ".join(map(_decibels, result["results"]))
    yield f"result: {results} over {result['samples']} samples"
    names = ("operator", "alone", "so far", "clipped", "in use")
    yield table(names, map(_cells, result["rows"]))
    if result["skip"]:
        yield "To leave the operators with the largest errors in float, give these options to intaglio quantize:"
    for selector in result["skip"]:
        yield f"  --skip {selector!r} leaves in float: {', '.join(result['skipped'][selector])}"
    yield f"verdict: {result['verdict']}"


def _cells(row: Result) -> tuple[str, ...]:
    use = row["use"]
    cut = f"{100 * (use['below'] + use['above']):.2f} %" if use else ""
    in_use = f"{100 * use['levels']:.0f} %" if use and use["levels"] is not None else ""
    return row["name"], _decibels(row["alone"]), _decibels(row["so_far"]), cut, in_use


def _decibels(value: float | None) -> str:
    return "exact" if value is None else f"{value:.1f} dB"
