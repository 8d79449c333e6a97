"""`intaglio card`: the model card of a saved model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import RenderableType

import intaglio
from intaglio.cli import targets
from intaglio.cli.show import Result
from intaglio.output_paths import check_file


def run(
    target: Path, float_model: str | None, data: str | None, out: Path | None, samples: int, calls: int
) -> dict[str, Any]:
    """Measure a saved model, write its card to a file if there is one, and return the result for JSON."""
    targets.check_float_and_data(float_model, data)
    if out is not None:
        check_file(out)
    model = intaglio.load(target)
    exact = None if float_model is None else targets.float_model(float_model, "--float")
    batches = None if data is None else targets.batches(data)
    report = intaglio.report(exact, model, batches, samples=samples, calls=calls, tries=0)
    if out is not None:
        report.save_card(out)
    return {
        "model": report.data.name,
        "fingerprint": report.data.run.fingerprint,
        "out": None if out is None else str(out),
        "card": report.card(),
    }


def render(result: Result) -> Iterator[RenderableType]:
    """Yield the card, or where it was written."""
    yield result["card"].rstrip("\n") if result["out"] is None else f"the card of {result['model']}: {result['out']}"
