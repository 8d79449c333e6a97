"""Each verb as one readable function. `quantize` is all of them in order."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from intaglio import build
from intaglio.build import load
from intaglio.capture import capture
from intaglio.capture.captured import expect
from intaglio.lower import Lowered, requantize
from intaglio.quant import (
    Image,
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
from intaglio.tune import compare

__all__ = [
    "annotate", "calibrate", "capture", "compare", "compile", "convert", "load", "prepare", "quantize", "requantize",
]  # fmt: skip

Selectors = str | Iterable[str]
logger = logging.getLogger("intaglio")


def quantize(
    model: nn.Module,
    data: Any,
    *,
    example_inputs: Any = None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    skip: Selectors = (),
    only: Selectors = (),
    input: Image | Mapping[str, Image] | None = None,
    samples: int | None = None,
    dynamic_shapes: Any = None,
    isa: str | Iterable[str] | None = None,
    progress: bool | None = None,
) -> QuantizedModel:
    """A float model and a few batches of data -> an int8 model that runs on the CPU.

    ``data``: any iterable of batches (tensors, tuples, dictionaries, (inputs, label) pairs), a `DataLoader`, or a
    function that is called with the model to calibrate. ``example_inputs``: a tuple of arguments (default: the first
    batch). ``recipe``: a `Recipe`, its entries as a mapping, or the path of its TOML file. ``skip`` and ``only`` are
    selectors (`Recipe`). ``input``: what the bytes of images stand for (an `Image`; of several inputs, a mapping by
    name), so that uint8 images are taken too. ``samples`` stops calibration after that many. ``dynamic_shapes`` as
    torch.export takes them (default: the batch is free). ``isa`` as in `compile`. The model is never changed. Raises an
    `IntaglioError` that says what to do.
    """
    kwargs: dict[str, Any] = {}
    if example_inputs is None:
        first, data = peek(data)
        args, kwargs = binder_for(model)(first)
    else:
        args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    captured = capture(model, args, example_kwargs=kwargs, dynamic_shapes=dynamic_shapes)
    quantizer = Quantizer(_recipe(recipe).with_selection(skip, only), input or {})
    prepared = prepare(captured, quantizer)
    ranges = calibrate(prepared, data, samples=samples, progress=progress)
    quantized = compile(convert(prepared, ranges), isa=isa)
    logger.info("%r\n%s", quantized, quantized.coverage)
    return quantized


def _recipe(recipe: Recipe | Mapping[str, Any] | str | Path | None) -> Recipe:
    if recipe is None:
        return Recipe()
    if isinstance(recipe, (str, Path)):
        return Recipe.load(recipe)
    return recipe if isinstance(recipe, Recipe) else Recipe.of(recipe)


def compile(stage: Reference | Lowered, *, isa: str | Iterable[str] | None = None) -> QuantizedModel:
    """The native program of a reference model or an integer graph.

    ``isa``: instruction sets to build for, of "avx512vnni", "avx2", "portable" (default: the best of this machine).
    The model runs the best of them that this machine runs; `QuantizedModel.save` writes them all, and
    ``load(path, trust=True)`` picks. Raises `BuildError` when this machine runs none of them.
    """
    lowered = requantize(stage) if isinstance(stage, Reference) else stage
    expect(lowered, Lowered, "compile")
    return build.compile(lowered, isa=isa)
