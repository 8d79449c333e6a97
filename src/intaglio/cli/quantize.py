"""`intaglio quantize`: quantization of a float model with data to a file."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import RenderableType

import intaglio
from intaglio import stages
from intaglio.cli import targets
from intaglio.cli.show import Result, coverage_parts, coverage_result
from intaglio.errors import ArtifactError


@dataclass(frozen=True)
class Request:
    """Options of the command line as text."""

    target: str
    data: str
    out: Path
    skip: Sequence[str]
    only: Sequence[str]
    recipe: str | None
    samples: int | None
    isa: Sequence[str] | None
    example: str | None

    def check(self, *others: Path | None) -> None:
        """Raise an error before any work if a file cannot be written."""
        if not hasattr(intaglio.QuantizedModel, "save"):
            problem = "this version of intaglio writes no files"
            raise ArtifactError(str(self.out), None, problem, remedy="use a newer one")
        for path in (self.out, *others):
            if path is not None and not path.absolute().parent.is_dir():
                raise typer.BadParameter(f"there is no folder {str(path.parent)!r}", param_hint="--out")

    def options(self) -> dict[str, Any]:
        """Return the arguments that `intaglio.quantize` and `intaglio.autotune` share, except the model."""
        batches = targets.batches(self.data)
        inputs = targets.example(self.example) if self.example else None
        if inputs is None and callable(batches) and not isinstance(batches, Iterable):
            raise typer.BadParameter("data that is a function of the model needs --example", param_hint="--data")
        return {
            "data": batches,
            "example_inputs": inputs,
            "quantizer": stages.Quantizer(targets.recipe(self.recipe).with_selection(self.skip, self.only)),
            "samples": self.samples,
        }


def run(request: Request, tune: bool = False) -> dict[str, Any]:
    """Quantize, save and return the result for JSON."""
    request.check()
    model, options, begin = targets.float_model(request.target), request.options(), time.perf_counter()
    compiled = intaglio.CompileOptions(isa=request.isa, tune=tune)
    return _save(intaglio.quantize(model, **options, options=compiled), request.out, begin)


def run_autotune(
    request: Request, evaluate: str, max_drop: float, evaluations: int, recipe_out: Path | None
) -> dict[str, Any]:
    """Quantize as much as the metric allows, save and return the result for JSON."""
    request.check(recipe_out)
    model, metric = targets.float_model(request.target), targets.imported_object(evaluate, "--evaluate")
    options, begin = request.options(), time.perf_counter()
    tuned = intaglio.autotune(
        model, evaluate=metric, max_drop=max_drop, evaluations=evaluations, isa=request.isa, **options
    )
    if recipe_out is not None:
        tuned.recipe.save(recipe_out)
    found = {
        "baseline": tuned.baseline,
        "floor": tuned.floor,
        "reached": tuned.reached,
        "left": tuned.left,
        "trials": [asdict(trial) for trial in tuned.trials],
    }
    return {**_save(tuned.model, request.out, begin), "autotune": found, "report": str(tuned)}


def _save(quantized: Any, out: Path, begin: float) -> dict[str, Any]:
    quantized.save(out)
    return {
        "model": quantized.about.name,
        "out": str(out),
        "file_bytes": out.stat().st_size,
        "seconds": time.perf_counter() - begin,
        "coverage": coverage_result(quantized.coverage),
    }


def render(result: Result) -> Iterator[RenderableType]:
    """Yield the printed parts of a result."""
    yield from coverage_parts(result["coverage"])
    if "report" in result:
        yield result["report"]
    megabytes = result["file_bytes"] / 1e6
    yield f"{result['model']} -> {result['out']}, {megabytes:.2f} MB, in {result['seconds']:.1f} s"
