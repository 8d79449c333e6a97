"""`intaglio quantize`: a float model and data in, a file out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import RenderableType

import intaglio
from intaglio.cli import targets
from intaglio.cli.show import Result, coverage_parts, coverage_result
from intaglio.errors import ArtifactError


def run(
    target: str,
    data: str,
    out: Path,
    skip: Sequence[str],
    only: Sequence[str],
    recipe: str | None,
    samples: int | None,
    isa: Sequence[str] | None,
    example: str | None,
    tune: bool = False,
) -> dict[str, Any]:
    if not hasattr(intaglio.QuantizedModel, "save"):  # before the work, not after it
        raise ArtifactError(str(out), None, "this version of intaglio writes no files", remedy="use a newer one")
    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(out.parent)!r}", param_hint="--out")
    model, batches = targets.float_model(target), targets.batches(data)
    inputs = targets.example(example) if example else None
    if inputs is None and callable(batches) and not isinstance(batches, Iterable):
        raise typer.BadParameter("data that is a function of the model needs --example", param_hint="--data")
    chosen, begin = targets.recipe(recipe), time.perf_counter()
    quantized: Any = intaglio.quantize(
        model, batches, example_inputs=inputs, recipe=chosen, skip=skip, only=only, samples=samples, isa=isa, tune=tune
    )
    quantized.save(out)
    return {
        "model": quantized.about.name,
        "out": str(out),
        "file_bytes": out.stat().st_size,
        "seconds": time.perf_counter() - begin,
        "coverage": coverage_result(quantized.coverage),
    }


def render(result: Result) -> Iterator[RenderableType]:
    yield from coverage_parts(result["coverage"])
    megabytes = result["file_bytes"] / 1e6
    yield f"{result['model']} -> {result['out']}, {megabytes:.2f} MB, in {result['seconds']:.1f} s"
