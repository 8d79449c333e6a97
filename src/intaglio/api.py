"""`quantize` and `autotune`: all stages in order."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from intaglio.backends.native_backend import CompileOptions, compile_native
from intaglio.errors import InputError
from intaglio.quant.calibrate.batches import Call, binder_for, peek
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.correct.calibration_cache import CACHED_SAMPLES, keep
from intaglio.quant.recipes.image import Image
from intaglio.quant.recipes.recipe import Recipe
from intaglio.runtime import QuantizedModel, example_of
from intaglio.runtime.call_plans import NewShapePolicy
from intaglio.stages import (
    Captured,
    Prepared,
    Quantizer,
    Reference,
    calibrate,
    capture,
    convert,
    correct,
    equalize,
    prepare,
    requantize,
)
from intaglio.tracing.already_quantized import refuse_quantized
from intaglio.tune import Criterion, Start, Tuned, autotuned

Selectors = str | Iterable[str]
logger = logging.getLogger("intaglio")


def quantize(
    model: nn.Module,
    data: Any = None,
    *,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    skip: Selectors = (),
    only: Selectors = (),
    input: Image | Mapping[str, Image] | None = None,
    quantizer: Quantizer | None = None,
    samples: int | None = None,
    progress: bool | None = None,
    options: CompileOptions | None = None,
) -> QuantizedModel:
    """Quantize a float model with a few batches of data and compile it for the CPU. The float model is never changed.

    Args:
        model: the float model.
        data: any iterable of batches (tensors, tuples, dictionaries, (inputs, label) pairs), a `DataLoader`, or a
            function that is called with the model to calibrate, which leaves out `equalize` and `correct`: these look
            several times at the first 256 samples, which are kept.
        example_inputs: a tuple of arguments (default: the first batch).
        dynamic_shapes: as `torch.export` takes them (default: the batch is free).
        recipe: a `Recipe`, its name ("accurate", or "int8_dynamic", which needs no data), its entries as a mapping, or
            the path of its TOML file. With one that has parameters nothing is calibrated.
        skip: selectors of what stays in float.
        only: selectors; nothing else is quantized.
        input: what the bytes of images stand for, by name where there are several inputs; uint8 images are then taken.
        quantizer: a `stages.Quantizer` with patterns, operators and more, in place of ``recipe`` and ``input``.
        samples: stop calibration after that many.
        progress: show a bar (default: on a terminal).
        options: instruction sets, a search for schedules, calls of new shapes; ``tune=True`` measures with the first
            entry of the example inputs' batch.

    Raises:
        IntaglioError: something cannot be done; the error says where, what, and what to do.
    """
    options = options or CompileOptions()
    quantizer = _selected(quantizer, recipe, skip, only, input)
    captured, call, data = _captured(model, data, example_inputs, dynamic_shapes)
    if not isinstance(options.tune, bool):  # before the work, not after it
        example_of(captured.signature, options.tune, range(len(captured.signature.inputs)) if quantizer.input else ())
    prepared, given = prepare(captured, quantizer), quantizer.recipe.parameters
    reference = _calibrated(prepared, data, samples, progress) if given is None else convert(prepared, given)
    if options.on_new_shape == NewShapePolicy.FALLBACK:
        options = replace(options, float_model=model)
    quantized = compile_native(requantize(reference), options, call)
    logger.info("%r\n%s", quantized, quantized.coverage)
    return quantized


def autotune(
    model: nn.Module,
    data: Any,
    evaluate: Callable[[Any], Any],
    *,
    max_drop: float = 0.01,
    relative: bool = True,
    evaluations: int = 20,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    quantizer: Quantizer | None = None,
    samples: int | None = None,
    progress: bool | None = None,
    isa: str | Iterable[str] | None = None,
) -> Tuned:
    """Quantize as much of a model as a metric of the user's allows.

    If what `quantize` gives is good enough, that is all. Otherwise operators are ranked by what rounding them alone
    does (`compare`); the worst are left in float, twice as many each time until the metric holds, then as few of those
    as will do. Everything is calibrated and corrected once; trials only convert and compile. Where no trial holds, the
    best is returned, with a warning. The result is the same wherever ``evaluate`` is.

    Args:
        model: the float model, which is never changed.
        data: batches; a function of the model cannot be ranked over.
        evaluate: a function of a model, the float one or an int8 one, that returns a number, higher for better. It is
            called without gradients, the float model first.
        max_drop: how far the metric may be below the float model's, as a share of that.
        relative: ``False`` makes ``max_drop`` a difference.
        evaluations: how often ``evaluate`` may be called.
        quantizer: what is quantized at most; what it leaves in float stays there.
        isa: instruction sets, as in `CompileOptions`.
        example_inputs, dynamic_shapes, samples, progress: as in `quantize`.

    Raises:
        InputError: ``evaluate`` fails or returns anything but one finite number.
    """
    criterion = Criterion(evaluate, max_drop, relative, evaluations)
    quantizer = quantizer or Quantizer()
    captured, _, data = _captured(model, data, example_inputs, dynamic_shapes)
    prepared, given = prepare(captured, quantizer), quantizer.recipe.parameters
    looked_at, data = _kept(prepared, data, samples)
    if not looked_at:
        problem = "a function that runs the model, and operators are ranked over batches"
        raise InputError("data", None, problem, remedy="pass an iterable of batches")
    if given is not None or not prepared.observers:
        reference = convert(prepared, given)
    else:
        reference = _converted(prepared, looked_at, data, samples, progress)
    exact = copy.deepcopy(model).eval() if any(part.training for part in model.modules()) else model
    return autotuned(Start(captured, quantizer, reference, looked_at), criterion, exact, isa)


def _selected(
    quantizer: Quantizer | None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None,
    skip: Selectors,
    only: Selectors,
    images: Image | Mapping[str, Image] | None,
) -> Quantizer:
    """Return the quantizer that was given, or that of a recipe and images, less what is skipped."""
    if quantizer is None:
        quantizer = Quantizer(Recipe.given(recipe), images or {})
    elif recipe is not None or images is not None:
        raise InputError("quantize", None, "recipe or input beside a quantizer", remedy="give them to the Quantizer")
    return replace(quantizer, recipe=quantizer.recipe.with_selection(skip, only))


def _captured(model: nn.Module, data: Any, example_inputs: Any, dynamic_shapes: Any) -> tuple[Captured, Call, Any]:
    """Return the captured model, the arguments of the example call, and data that still starts with it."""
    refuse_quantized(model)
    call, data = _first_call(model, data, example_inputs)
    return capture(model, call[0], example_kwargs=call[1], dynamic_shapes=dynamic_shapes), call, data


def _first_call(model: nn.Module, data: Any, example_inputs: Any) -> tuple[Call, Any]:
    """Return the example inputs, or else the first batch, and data that still starts with it."""
    if example_inputs is None:
        first, data = peek(data)
        return binder_for(model)(first), data
    return (example_inputs if isinstance(example_inputs, tuple) else (example_inputs,), {}), data


def _calibrated(prepared: Prepared, data: Any, samples: int | None, progress: bool | None) -> Reference:
    """Calibrate and convert; a model that is quantized while it runs needs no data."""
    if not prepared.observers:
        return convert(prepared)
    return _converted(prepared, *_kept(prepared, data, samples), samples, progress)


def _kept(prepared: Prepared, data: Any, samples: int | None) -> tuple[list[Any], Any]:
    """Return batches to be looked at several times, and data that still starts with them."""
    return keep(data, prepared.signature, CACHED_SAMPLES if samples is None else min(samples, CACHED_SAMPLES))


def _converted(
    prepared: Prepared, looked_at: list[Any], data: Any, samples: int | None, progress: bool | None
) -> Reference:
    """Equalize, calibrate, correct and convert; with a function that runs the model, only calibrate and convert."""
    if not looked_at and Group.current().size == 1:
        return convert(prepared, calibrate(prepared, data, samples=samples, progress=progress))
    prepared = equalize(prepared, looked_at)
    ranges = calibrate(prepared, data, samples=samples, progress=progress)
    return convert(prepared, ranges, correct(prepared, ranges, looked_at))
