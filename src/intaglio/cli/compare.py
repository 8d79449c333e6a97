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
    return {**found.to_dict(), "skip": found.skip_list(worst)}


def render(result: Result) -> Iterator[RenderableType]:
    """Yield the printed parts of a result."""
    results = ", ".join(map(_decibels, result["results"]))
    yield f"result: {results} over {result['samples']} samples"
    names = ("operator", "alone", "so far", "cut off", "levels")
    yield table(names, map(_cells, result["rows"]))
    if result["skip"]:
        yield "to leave the worst in float: " + " ".join(f"--skip {selector!r}" for selector in result["skip"])


def _cells(row: Result) -> tuple[str, ...]:
    use = row["use"]
    cut = f"{100 * (use['below'] + use['above']):.2f} %" if use else ""
    levels = f"{100 * use['levels']:.0f} %" if use and use["levels"] is not None else ""
    name = f"{row['path'] or 'model'} ({row['operator']})"
    return name, _decibels(row["alone"]), _decibels(row["so_far"]), cut, levels


def _decibels(value: float | None) -> str:
    return "exact" if value is None else f"{value:.1f} dB"
