"""Each verb as one readable function. `quantize` is all of them in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from intaglio import build
from intaglio.capture import Captured, capture
from intaglio.lower import Lowered, requantize
from intaglio.quant import (
    Quantizer,
    Recipe,
    Reference,
    annotate,
    binder_for,
    calibrate,
    convert,
    peek,
    prepare,
)
from intaglio.runtime import QuantizedModel

__all__ = ["annotate", "calibrate", "capture", "compile", "convert", "prepare", "quantize", "requantize"]

Selectors = str | Iterable[str]


def quantize(
    model: nn.Module,
    data: Any,
    *,
    example_inputs: Any = None,
    recipe: Recipe | Mapping[str, Any] | None = None,
    skip: Selectors = (),
    only: Selectors = (),
    samples: int | None = None,
    dynamic_shapes: Any = None,
    isa: str | None = None,
    progress: bool | None = None,
) -> QuantizedModel:
    """A float model and a few batches of data -> an int8 model that runs on the CPU.

    ``data``: any iterable of batches (tensors, tuples, dictionaries, (inputs, label) pairs), a `DataLoader`, or a
    function that is called with the model to calibrate. ``example_inputs``: a tuple of arguments (default: the first
    batch). ``skip`` and ``only`` are selectors (`Recipe`). ``samples`` stops calibration after that many. The model
    is never changed. Raises an `IntaglioError` that says what to do.
    """
    kwargs: dict[str, Any] = {}
    if example_inputs is None:
        first, data = peek(data)
        args, kwargs = binder_for(model)(first)
    else:
        args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    captured = capture(model, args, example_kwargs=kwargs, dynamic_shapes=dynamic_shapes)
    quantizer = Quantizer(_recipe(recipe).with_selection(skip, only))
    prepared = prepare(captured, quantizer)
    ranges = calibrate(prepared, data, samples=samples, progress=progress)
    reference = convert(prepared, ranges)
    return _compile(reference, isa, model, captured)


def _recipe(recipe: Recipe | Mapping[str, Any] | None) -> Recipe:
    if recipe is None:
        return Recipe()
    return recipe if isinstance(recipe, Recipe) else Recipe.of(recipe)


def compile(stage: Reference | Lowered, *, isa: str | None = None) -> QuantizedModel:
    """The native program of a reference model or an integer graph; ``isa`` default: the best of this machine."""
    return _compile(stage, isa)


def _compile(
    stage: Reference | Lowered, isa: str | None, model: nn.Module | None = None, captured: Captured | None = None
) -> QuantizedModel:
    texts: dict[str, str] = {"captured": captured.text()} if captured else {}
    if isinstance(stage, Reference):
        texts |= {"sites": stage.annotations.text(), "reference": stage.text()}
    lowered = requantize(stage) if isinstance(stage, Reference) else stage
    name = type(model).__name__ if model is not None else "model"
    return build.compile(lowered, isa=isa, texts=texts, name=name, bytes_before=float_bytes(model) if model else 0)


def float_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, shared ones once."""
    tensors: dict[int, torch.Tensor] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())

