"""`quantize` and `autotune`: all stages in order."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from intaglio import build
from intaglio.errors import InputError
from intaglio.ops import OpDef
from intaglio.quant.calibrate.batches import Call, binder_for, peek
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.correct.calibration_cache import SAMPLES, keep
from intaglio.quant.recipes.image import Image
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.user_patterns import QuantizerPattern
from intaglio.runtime import QuantizedModel, example_of
from intaglio.stages import (
    Parameters,
    Prepared,
    Quantizer,
    Reference,
    calibrate,
    capture,
    check_policy,
    convert,
    correct,
    equalize,
    prepare,
    requantize,
    searched_schedules,
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
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    parameters: Parameters | str | Path | None = None,
    skip: Selectors = (),
    only: Selectors = (),
    input: Image | Mapping[str, Image] | None = None,
    patterns: Iterable[QuantizerPattern | str] = (),
    operators: Iterable[OpDef] = (),
    skip_first: bool = False,
    skip_last: bool = False,
    outputs: str = "float",
    int8_buffers: bool | Selectors = (),
    samples: int | None = None,
    dynamic_shapes: Any = None,
    isa: str | Iterable[str] | None = None,
    tune: Any = False,
    on_new_shape: str = "plan",
    progress: bool | None = None,
) -> QuantizedModel:
    """A float model and a few batches of data -> an int8 model that runs on the CPU.

    ``data``: any iterable of batches (tensors, tuples, dictionaries, (inputs, label) pairs), a `DataLoader`, or a
    function that is called with the model to calibrate, which leaves out `equalize` and `correct`: these look several
    times at the first 256 samples, which are kept. ``example_inputs``: a tuple of arguments (default: the first batch).
    ``recipe``: a `Recipe`, its name ("accurate", or "int8_dynamic", which needs no data), its entries as a mapping, or
    the path of its TOML file. ``parameters``: those of an earlier conversion (`Reference.parameters`), or the path of
    their file; nothing is calibrated then, and ``data`` gives the example inputs only. ``skip`` and ``only`` are
    selectors (`Recipe`). ``input``: what the bytes of images stand for (an `Image`; of several inputs, a mapping by
    name), so that uint8 images are taken too. ``patterns``, ``operators``, ``skip_first`` and ``skip_last`` as in
    `Quantizer`; ``outputs="int8"`` gives results as integers with scale and zero point, and ``int8_buffers`` names
    buffers that the model changes and that are kept as integers. ``samples`` stops calibration after that many.
    ``dynamic_shapes`` as torch.export takes them (default: the batch is free). ``on_new_shape``: what a call of other
    shapes does than were planned, by `QuantizedModel.warm` or else by the first call: "plan" them, in microseconds, or
    "fallback" to the float model, which the int8 model then refers to. ``isa`` and ``tune`` as in `compile`;
    ``tune=True`` measures with the first entry of the example inputs' batch. The model is never changed. Raises an
    `IntaglioError` that says what to do.
    """
    check_policy(on_new_shape, model)
    refuse_quantized(model)
    (args, kwargs), data = _first_call(model, data, example_inputs)
    captured = capture(model, args, example_kwargs=kwargs, dynamic_shapes=dynamic_shapes)
    if not isinstance(tune, bool):  # before the work, not after it
        example_of(captured.signature, tune, range(len(captured.signature.inputs)) if input else ())
    selected = Recipe.given(recipe).with_selection(skip, only)
    quantizer = Quantizer(
        selected,
        input or {},
        patterns=patterns,
        operators=operators,
        skip_first=skip_first,
        skip_last=skip_last,
        outputs=outputs,
        int8_buffers=int8_buffers,
    )
    prepared = prepare(captured, quantizer)
    given: Parameters | None = quantizer.recipe.parameters
    if parameters is not None:
        given = parameters if isinstance(parameters, Parameters) else Parameters.load(parameters)
    lowered = requantize(_calibrated(prepared, data, samples, progress) if given is None else convert(prepared, given))
    chosen = searched_schedules(lowered, isa, tune, (args, kwargs))
    quantized = build.compile(lowered, isa=isa, schedules=chosen)
    logger.info("%r\n%s", quantized, quantized.coverage)
    return quantized.fall_back_to(model) if on_new_shape == "fallback" else quantized


def autotune(
    model: nn.Module,
    data: Any,
    evaluate: Callable[[Any], Any],
    *,
    max_drop: float = 0.01,
    relative: bool = True,
    evaluations: int = 20,
    example_inputs: Any = None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    skip: Selectors = (),
    only: Selectors = (),
    input: Image | Mapping[str, Image] | None = None,
    patterns: Iterable[QuantizerPattern | str] = (),
    operators: Iterable[OpDef] = (),
    samples: int | None = None,
    dynamic_shapes: Any = None,
    isa: str | Iterable[str] | None = None,
    progress: bool | None = None,
) -> Tuned:
    """An int8 model whose metric is near the float model's, with as few operators left in float as that takes.

    ``evaluate``: a function of a model, the float one or an int8 one, that returns a number; higher is better, so of a
    loss return minus the loss. It is called without gradients, at most ``evaluations`` times, the float model first.
    The metric may be lower than that by ``max_drop``, a share of it, or with ``relative=False`` a difference.

    If what `quantize` gives is good enough, that is all. Otherwise operators are ranked by what rounding them alone
    does (`compare`); the worst are left in float, twice as many each time until the metric holds, then as few of those
    as will do. Everything is calibrated and corrected once; trials only convert and compile. Where nothing that was
    tried holds, the best is returned, with a warning; `Tuned.reached` tells. With an ``evaluate`` that always says the
    same of the same model, so is the result.

    ``data`` are batches, which a function of the model cannot be; other arguments as in `quantize`. What they leave in
    float stays there. The float model is never changed. Raises `InputError` that names ``evaluate`` when it fails or
    returns anything but one finite number.
    """
    refuse_quantized(model)
    criterion = Criterion(evaluate, max_drop, relative, evaluations)
    (args, kwargs), data = _first_call(model, data, example_inputs)
    captured = capture(model, args, example_kwargs=kwargs, dynamic_shapes=dynamic_shapes)
    selected = Recipe.given(recipe).with_selection(skip, only)
    quantizer = Quantizer(selected, input or {}, patterns=patterns, operators=operators)
    prepared = prepare(captured, quantizer)
    looked_at, data = _kept(prepared, data, samples)
    if not looked_at:
        raise InputError(
            "data",
            None,
            "a function that runs the model, and operators are ranked over batches",
            remedy="pass an iterable of batches",
        )
    if selected.parameters is not None or not prepared.observers:
        reference = convert(prepared, selected.parameters)
    else:
        reference = _converted(prepared, looked_at, data, samples, progress)
    exact = copy.deepcopy(model).eval() if any(part.training for part in model.modules()) else model
    return autotuned(Start(captured, quantizer, reference, looked_at), criterion, exact, isa)


def _first_call(model: nn.Module, data: Any, example_inputs: Any) -> tuple[Call, Any]:
    """The example inputs, or else the first batch, and data that still starts with it."""
    if example_inputs is None:
        first, data = peek(data)
        return binder_for(model)(first), data
    return (example_inputs if isinstance(example_inputs, tuple) else (example_inputs,), {}), data


def _calibrated(prepared: Prepared, data: Any, samples: int | None, progress: bool | None) -> Reference:
    """Of data that is read once; where everything is quantized while the model runs, of none."""
    if not prepared.observers:
        return convert(prepared)
    return _converted(prepared, *_kept(prepared, data, samples), samples, progress)


def _kept(prepared: Prepared, data: Any, samples: int | None) -> tuple[list[Any], Any]:
    """Batches to be looked at several times, and data that still starts with them."""
    return keep(data, prepared.signature, SAMPLES if samples is None else min(samples, SAMPLES))


def _converted(
    prepared: Prepared, looked_at: list[Any], data: Any, samples: int | None, progress: bool | None
) -> Reference:
    """Equalized, calibrated, corrected; a function that runs the model can only calibrate."""
    if not looked_at and Group.current().size == 1:
        return convert(prepared, calibrate(prepared, data, samples=samples, progress=progress))
    prepared = equalize(prepared, looked_at)
    ranges = calibrate(prepared, data, samples=samples, progress=progress)
    return convert(prepared, ranges, correct(prepared, ranges, looked_at))
