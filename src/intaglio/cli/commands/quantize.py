"""`intaglio quantize` and `intaglio search`: quantization of a float model with data to a file."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import RenderableType
from torch import nn

import intaglio
from intaglio import stages
from intaglio.cli import targets
from intaglio.cli.show import Result, coverage_parts, coverage_result
from intaglio.errors import ArtifactError
from intaglio.formatting.number_text import size_text
from intaglio.quant.calibrate.batches import peek
from intaglio.tune import compare_results

ACCURACY_SAMPLES = 64
"""Samples of the data on which the results of both models are compared."""


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
    with_example: bool = False

    def check(self, **others: Path | None) -> None:
        """Raise an error, which names the option, before any work if a file cannot be written.

        Args:
            others: other files by option, with underscores.
        """
        if not hasattr(intaglio.QuantizedModel, "save"):
            problem = "this version of intaglio cannot write files"
            raise ArtifactError(str(self.out), None, problem, remedy="install a newer version")
        for name, path in {"out": self.out, **others}.items():
            if path is not None and not path.absolute().parent.is_dir():
                problem = f"the folder {str(path.parent)!r} does not exist; create it first"
                raise typer.BadParameter(problem, param_hint=f"--{name.replace('_', '-')}")

    def stored_example(self) -> Any:
        """Return the arguments of the call to store: those of ``--example``, else the first batch; ``None`` to store
        none."""
        if not self.with_example:
            return None
        if self.example:
            return targets.example(self.example)
        batches = targets.batches(self.data)
        if isinstance(targets.imported_object(self.data, "--data"), Iterator) or not isinstance(batches, Iterable):
            problem = "the data can be read only once, or is a function that runs the model; pass --example too"
            raise typer.BadParameter(problem, param_hint="--with-example")
        return peek(batches)[0]

    def options(self) -> dict[str, Any]:
        """Return the arguments that `intaglio.quantize` and `intaglio.search` share, except the model."""
        batches = targets.batches(self.data)
        inputs = targets.example(self.example) if self.example else None
        if inputs is None and callable(batches) and not isinstance(batches, Iterable):
            raise typer.BadParameter(
                "the data is a function that runs the model, and has no first batch; pass --example too",
                param_hint="--data",
            )
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
    example = request.stored_example()
    compiled = intaglio.CompileOptions(isa=request.isa, tune=tune)
    quantized = intaglio.quantize(model, **options, options=compiled, strict=True)
    assert isinstance(quantized, intaglio.QuantizedModel)
    return {**_save(quantized, request.out, example, begin), "accuracy": _accuracy(model, quantized, request.data)}


def _accuracy(model: nn.Module, quantized: intaglio.QuantizedModel, data: str) -> dict[str, Any] | None:
    """Return how close the results of both models are on the first samples of the data. Return ``None`` for data that
    runs the model itself, or that can be read only once."""
    batches, read_once = targets.batches(data), isinstance(targets.imported_object(data, "--data"), Iterator)
    if read_once or not isinstance(batches, (Iterable, torch.Tensor)):
        return None
    found = compare_results(model, quantized, batches, samples=ACCURACY_SAMPLES)
    names = ("samples", "agreement", "cosine", "verdict")
    decibels = found.results[0] if found.results and math.isfinite(found.results[0]) else None
    return {"sqnr_db": decibels, **{name: getattr(found, name) for name in names}}


def run_search(
    request: Request, evaluate: str, options: dict[str, Any], recipe_out: Path | None, plot: Path | None
) -> dict[str, Any]:
    """Search for a mixed precision, save the model and return the result for JSON."""
    request.check(recipe_out=recipe_out, plot=plot, journal=options["journal"])
    model, metric = targets.float_model(request.target), targets.imported_object(evaluate, "--evaluate")
    shared, example, begin = request.options(), request.stored_example(), time.perf_counter()
    found = intaglio.search(model, evaluate=metric, isa=request.isa, **options, **shared)
    saved = _save(found.model, request.out, example, begin)
    if recipe_out is not None:
        found.recipe.save(recipe_out)
    if plot is not None:
        figure: Any = found.plot().figure
        figure.savefig(plot)
    return {**saved, "search": found.to_dict(), "report": str(found)}


def _save(quantized: Any, out: Path, example: Any, begin: float) -> dict[str, Any]:
    quantized.save(out, example=example)
    return {
        "model": quantized.model_info.name,
        "out": str(out),
        "file_bytes": out.stat().st_size,
        "seconds": time.perf_counter() - begin,
        "coverage": coverage_result(quantized.coverage),
    }


def render(result: Result) -> Iterator[RenderableType]:
    """Yield the printed parts of a result."""
    yield from coverage_parts(result["coverage"])
    if result.get("accuracy"):
        yield f"calibration data: {result['accuracy']['verdict']}"
    if "report" in result:
        yield result["report"]
    size, seconds = size_text(result["file_bytes"]), f"{result['seconds']:.1f} s"
    yield f"{result['model']} was quantized in {seconds} and saved to {result['out']} ({size})"
