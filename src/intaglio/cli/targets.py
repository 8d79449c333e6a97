"""Conversion of MODULE:NAME and file arguments to models, batches and examples."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

import intaglio
from intaglio.errors import ArtifactError
from intaglio.ir import DType, evaluate, symbols_of
from intaglio.quant.calibrate.batches import binder_for, peek
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.settings import NAMED
from intaglio.runtime import QuantizedModel

Call = tuple[tuple[Any, ...], dict[str, Any]]
NEEDS_DATA = "the model takes inputs that are not float32, for which random numbers make no sense; pass --data"


def recipe(text: str | None) -> Recipe:
    """Return the recipe of a name or of a file (default: the default recipe)."""
    if text is None or text in NAMED:
        return Recipe.named(text or "default")
    if not Path(text).is_file():
        problem = f"{text!r} is neither a file nor the name of a recipe; names are {', '.join(NAMED)}"
        raise typer.BadParameter(problem, param_hint="--recipe")
    return Recipe.load(text)


def imported_object(text: str, option: str) -> Any:
    """Return the object that MODULE:NAME names. Modules in the current folder are found too."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise typer.BadParameter(
            f"{text!r} does not have the form MODULE:NAME, such as nets:build or package.nets:Net", param_hint=option
        )
    if module.endswith(".py"):
        raise typer.BadParameter(f"{module!r} is a file; write the module as {module[:-3]!r}", param_hint=option)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        problem = f"no module {error.name!r} is in this folder or installed"
        raise typer.BadParameter(problem, param_hint=option) from error
    for part in name.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), n=3)
            nearest = f"; nearest: {', '.join(close)}" if close else ""
            raise typer.BadParameter(f"module {module!r} has no attribute {name!r}{nearest}", param_hint=option)
        found = getattr(found, part)
    return found


def float_model(text: str, option: str = "MODULE:NAME") -> nn.Module:
    """Return a module, or the module that a function or class returns when called without arguments."""
    found = imported_object(text, option)
    if not isinstance(found, nn.Module):
        found = _call_without_arguments(found, text, option)
    if not isinstance(found, nn.Module):
        raise typer.BadParameter(
            f"{text} returns a {type(found).__name__}, but must return an nn.Module", param_hint=option
        )
    return found


def batches(text: str) -> Any:
    """Return batches for `intaglio.quantize`: an iterable, or a function with the model as its only argument."""
    found = imported_object(text, "--data")
    if isinstance(found, (torch.Tensor, Iterable)) and not isinstance(found, type):
        return found
    return (
        found
        if callable(found) and _count_required_arguments(found) == 1
        else _call_without_arguments(found, text, "--data")
    )


def check_float_and_data(float_model: str | None, data: str | None) -> None:
    """Raise an error that names the missing option if only one of ``--float`` and ``--data`` is given."""
    if (float_model is None) != (data is None):
        problem = "errors need both the float model and data"
        raise typer.BadParameter(problem, param_hint="--data" if data is None else "--float")


def report_or_model(path: Path) -> Any:
    """Return the report of a JSON file, or the saved model of another file."""
    return intaglio.Report.load(path) if path.suffix == ".json" else intaglio.load(path)


def example(text: str) -> Any:
    """Return the arguments of one call: a tuple, a tensor, or the result of a function."""
    found = imported_object(text, "--example")
    return found if isinstance(found, (tuple, torch.Tensor)) else _call_without_arguments(found, text, "--example")


def _call_without_arguments(found: Any, text: str, option: str) -> Any:
    """Return the result of calling an object without arguments."""
    if not callable(found):
        raise typer.BadParameter(
            f"{text} is of type {type(found).__name__} and cannot be called; name a function or class",
            param_hint=option,
        )
    if _count_required_arguments(found):
        raise typer.BadParameter(
            f"{text} needs arguments, but is called without any; name a function without required arguments",
            param_hint=option,
        )
    return found()


def _count_required_arguments(function: Callable[..., Any]) -> int:
    """Return the number of arguments without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return 0
    return sum(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def random_inputs(shapes: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Return one tensor of normally distributed numbers per shape, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(_shape(text), generator=generator) for text in shapes)


def random_call(model: QuantizedModel, size: int) -> Call | None:
    """Return random inputs of a saved model, with free dimensions of this size; ``None`` if an input is not float32."""
    kinds = [entry.type for entry in model.signature.inputs]
    if any(kind.dtype is not DType.F32 for kind in kinds):
        return None
    sizes = {name: size for kind in kinds for dim in kind.shape for name in symbols_of(dim)}
    shapes = [",".join(str(evaluate(dim, sizes)) for dim in kind.shape) for kind in kinds]
    return random_inputs(shapes), {}


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1:
        problem = f"{text!r} is not a shape; write positive sizes, such as 1,3,224,224"
        raise typer.BadParameter(problem, param_hint="--example-shape")
    return sizes


def load_saved(text: str) -> QuantizedModel | None:
    """Return the model in a file, or ``None`` if ``text`` is MODULE:NAME."""
    if not Path(text).exists():
        if ":" in text:
            return None
        problem = f"{text!r} is not an existing file and does not have the form MODULE:NAME"
        raise typer.BadParameter(problem, param_hint="TARGET")
    load = getattr(intaglio, "load", None)
    if load is None:
        raise ArtifactError(text, None, "this version of intaglio cannot read files", remedy="install a newer version")
    model = load(text)
    if not isinstance(model, QuantizedModel):
        problem = (
            "it holds a model that generates, which has several programs or a cache; this command takes one program"
        )
        raise ArtifactError(text, None, problem, remedy="save a program of it: model.programs['decoder'].save(path)")
    return model


def call_and_batches(model: nn.Module, data: str | None, shapes: Sequence[str]) -> tuple[Call, Any]:
    """Return the arguments of one call, and batches that start with it, from ``data`` or else from random numbers."""
    if data is not None:
        found = batches(data)
        if callable(found) and not isinstance(found, Iterable):
            problem = "the data is a function that runs the model, but this command needs batches"
            raise typer.BadParameter(problem, param_hint="--data")
        first, rest = peek(found)
        if isinstance(model, QuantizedModel) and isinstance(first, Mapping):
            return ((), dict(first)), rest  # the names are those of the float model's forward
        return binder_for(model)(first), rest
    if not shapes:
        raise typer.BadParameter("a float model needs inputs; pass --data or --example-shape", param_hint="TARGET")
    inputs = random_inputs(shapes)
    return (inputs, {}), [inputs]
