"""`quantize` and `from_checkpoint`: the public functions that run all stages of quantization in order."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from intaglio.argument_checks import check_arguments, check_arguments_except
from intaglio.backends.native_backend import CompileOptions, compile_native
from intaglio.errors import CaptureError, InputError, IntaglioError, UnknownSizeError, UnsupportedError
from intaglio.integrations import ExportExample, integration_for
from intaglio.native.native_library import build_ahead
from intaglio.parts import (
    PartCandidate,
    PartlyQuantizedModel,
    PartOutline,
    check_parts,
    check_selectors,
    quantize_parts,
)
from intaglio.progress import shows_progress
from intaglio.quant.calibrate.batches import Call, first_call, kept_first, log_once
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.calibrate.kept_memory import collect_large, kept_memory, return_freed
from intaglio.quant.calibrate.prepare import prepare_part, quantizer_for_part, with_selectors_of
from intaglio.quant.correct.calibration_cache import CACHED_SAMPLES, cache_batches
from intaglio.quant.correct.effort import is_corrected
from intaglio.quant.equalization.equalize import equalize_without_data
from intaglio.quant.imported_weights.fill_model import imported_recipe
from intaglio.quant.recipes.image import Image
from intaglio.quant.recipes.quantizer import given_quantizer
from intaglio.quant.recipes.recipe import Recipe, Selectors
from intaglio.reporting.timing.measure_speed import check_measure, quantize_and_measure
from intaglio.runtime import QuantizedModel, copied_inputs
from intaglio.runtime.calls.call_plans import NewShapePolicy
from intaglio.runtime.kept_attributes import KeptAttributes
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
from intaglio.tracing.capture_check import check_calls

logger = logging.getLogger("intaglio")


@check_arguments_except("model")
@log_once()
@shows_progress(
    *("capture", "equalize", "calibrate", "correct", "compile"),
    last="measure",
    only_if=lambda: not Group.current().rank,
)
def quantize(
    model: nn.Module,
    data: Any = None,
    *,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    skip: Selectors | None = None,
    only: Selectors | None = None,
    input: Image | Mapping[str, Image] | None = None,
    quantizer: Quantizer | None = None,
    samples: int | None = None,
    progress: bool | None = None,
    options: CompileOptions | None = None,
    strict: bool = False,
    measure: bool | str = False,
) -> QuantizedModel | PartlyQuantizedModel:
    """Quantize a float model with a few batches of data and compile it for the CPU. The float model is not changed.

    Of a model that cannot be captured as a whole, because its Python code depends on values of tensors, the largest
    submodules that can be captured are quantized. The result is then a `PartlyQuantizedModel`, a copy of the float
    model with int8 parts inside.

    Args:
        model: the float model.
        data: calibration data: an iterable of batches (tensors, tuples, dictionaries or (inputs, label) pairs), a
            `DataLoader`, or a function that is called with the model to calibrate. A function skips `equalize` and
            `correct`, which need to read the first 256 samples several times. It may be ``None`` together with
            ``example_inputs`` if all activations are quantized dynamically or the recipe has parameters.
        example_inputs: a tuple with the arguments of one call (default: the first batch).
        dynamic_shapes: dynamic dimensions, in the form that `torch.export` takes (default: the batch is dynamic).
        recipe: a `Recipe`, the name of one ("accurate", or "int8_dynamic", which needs no data), its entries as a
            mapping, or the path of its TOML file. A recipe that has parameters replaces calibration.
        skip: selectors of the operators that stay in float (default: none).
        only: selectors of the operators to quantize; all others stay in float (default: quantize all).
        input: the normalization of image inputs. An `Image`, or a mapping from input name to `Image` if there are
            several inputs. The quantized model then accepts uint8 images too.
        quantizer: a `stages.Quantizer`, which can also have patterns and user operators. Replaces ``recipe`` and
            ``input``.
        samples: number of samples after which calibration stops (default: all).
        progress: whether to show progress (default: on a terminal and in a notebook).
        options: instruction sets, schedule search and the policy for new shapes. With ``tune=True`` the search measures
            with the first sample of the example inputs.
        strict: whether to raise an error if the model cannot be captured as a whole, and not to quantize parts of it.
        measure: whether to time the model and the float model on one sample, whole and by operator, on this machine.
            The result has the times as its attribute ``measured``. With ``"keep_faster"``, operators that take longer
            in int8 are left in float if the model is then faster; the model is quantized again for that.

    Returns:
        The int8 model, which is called like the float model. A model of ``transformers`` keeps its class and
        configuration, and of a ``SentenceTransformer`` a copy is returned whose transformer is quantized.

    Raises:
        IntaglioError: the model cannot be captured, quantized or compiled. The error says where and why, and suggests a
            remedy.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.ReLU())
        >>> int8 = intaglio.quantize(model, [torch.randn(8, 16) for _ in range(4)])
        >>> y = int8(torch.randn(2, 16))
    """
    refuse_quantized(model)
    check_measure(measure)
    options = options or CompileOptions()
    quantizer = given_quantizer(quantizer, recipe, skip, only, input)
    data = list(data) if measure and isinstance(data, Iterator) else data

    def quantize_leaving(left: tuple[str, ...]) -> QuantizedModel | PartlyQuantizedModel:
        own = replace(quantizer, recipe=quantizer.recipe.with_selection(left))
        return _quantize(model, data, example_inputs, dynamic_shapes, own, samples, progress, options, strict)

    if not measure:
        return quantize_leaving(())
    call, _ = first_call(model, data, example_inputs)
    found: QuantizedModel | PartlyQuantizedModel
    found = quantize_and_measure(model, call, dynamic_shapes, quantize_leaving, measure)
    return found


def _quantize(
    model: nn.Module,
    data: Any,
    example_inputs: Any,
    dynamic_shapes: Any,
    quantizer: Quantizer,
    samples: int | None,
    progress: bool | None,
    options: CompileOptions,
    strict: bool,
) -> QuantizedModel | PartlyQuantizedModel:
    """Quantize a model, or the parts of it that can be captured."""
    integration = integration_for(model)
    data = list(data) if integration is not None and isinstance(data, Iterator) else data
    splits = not strict and _may_split(data, example_inputs, dynamic_shapes, quantizer, options)
    kept, data = kept_first(data) if splits else (None, data)
    modules: list[PartOutline] = []
    if splits and integration is not None and (reason := integration.reason_for_parts(model, data)) is not None:
        logger.warning("%s: quantized in parts, because %s", type(model).__name__, reason)
        refused = CaptureError(type(model).__name__, None, reason, remedy="set model.config.use_cache = False")
        return _in_parts(model, data, refused, quantizer, samples, options)

    def quantize_module(module: nn.Module, batches: Any, example: ExportExample | None) -> QuantizedModel:
        if example is not None and dynamic_shapes is not None:
            problem = "dynamic_shapes is given, but the sizes of a model with a cache are chosen for it"
            remedy = "leave dynamic_shapes out, or set model.config.use_cache = False"
            raise InputError("quantize", None, problem, remedy=remedy)
        example = example or ExportExample(example_inputs, dynamic_shapes)
        captured, call, rest = capture_model(module, batches, example.inputs, example.dynamic_shapes)
        check_calls(captured, module, example.checks)
        settings = replace(quantizer, decoder=True) if _decoders_of(module) else quantizer
        own = [_prepared_for_example(settings, example, captured)]
        modules.append(PartOutline.of(captured, *own))
        del captured
        return _quantized(module, own, call, rest, samples, progress, options)

    try:
        if integration is None:
            return quantize_module(model, data, None)
        whole: QuantizedModel = integration.quantize_model(model, data, quantize_module)
        check_selectors(quantizer.recipe, modules)
        check_parts(modules)
        return whole
    except (CaptureError, UnknownSizeError) as refused:
        if not splits or (kept is not None and modules):  # an iterator may be read to its end after the capture
            raise
        return _in_parts(model, data if kept is None else chain(kept, data), refused, quantizer, samples, options)


def _decoders_of(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules of a model that are decoders."""
    integration = integration_for(model)
    return () if integration is None else integration.decoder_paths(model)


def _prepared_for_example(quantizer: Quantizer, example: ExportExample, captured: Captured) -> Prepared:
    """Prepare a module of an integration, with the cached inputs of the module's example."""
    own = replace(quantizer, cached_inputs=example.cached_inputs) if example.cached_inputs else quantizer
    return prepare_part(captured, with_selectors_of(own, captured)) if example.is_part else prepare(captured, own)


def _in_parts(
    model: nn.Module,
    data: Any,
    refused: IntaglioError,
    quantizer: Quantizer,
    samples: int | None,
    options: CompileOptions,
) -> PartlyQuantizedModel:
    """Quantize the parts of a model whose capture was refused."""
    parts, integration, decoders = list[PartOutline](), integration_for(model), _decoders_of(model)

    def quantize_part(part: PartCandidate, call: Call, batches: Any) -> QuantizedModel:
        is_decoder = any(not home or f"{part.path}.".startswith(f"{home}.") for home in decoders)
        settings = quantizer_for_part(quantizer, part.captured)
        settings = replace(settings, decoder=is_decoder, cached_inputs=part.cached_inputs)
        try:
            own = [prepare(part.captured, settings)]
        except UnsupportedError:
            parts.append(PartOutline.of(part.captured, None))
            raise
        parts.append(PartOutline.of(part.captured, *own))
        return _quantized(part.part, own, call, batches, None, False, options)

    further_calls = None if integration is None else integration.further_calls
    found = quantize_parts(model, data, refused, samples, quantize_part, further_calls)
    check_selectors(quantizer.recipe, parts)
    return found


def _may_split(
    data: Any, example_inputs: Any, dynamic_shapes: Any, quantizer: Quantizer, options: CompileOptions
) -> bool:
    """Return whether parts of a model can be quantized with these arguments, none of which are about the whole
    model."""
    batches = isinstance(data, Iterable) and not isinstance(data, torch.Tensor)
    about_all = (example_inputs, dynamic_shapes, quantizer.recipe.parameters)
    tuned = not isinstance(options.tune, bool)
    return batches and not tuned and not quantizer.input and all(one is None for one in about_all)


def _quantized(
    model: nn.Module,
    own: list[Prepared],
    call: Call,
    data: Any,
    samples: int | None,
    progress: bool | None,
    options: CompileOptions,
) -> QuantizedModel:
    """Run the stages after `prepare` for the module in ``own``, which loses it, so that replaced weights are freed."""
    signature, quantizer = own[0].signature, own[0].quantizer
    collect_large(own[0].module.buffers())
    if not isinstance(options.tune, bool):  # fail before calibration, not after it
        copied_inputs(signature, options.tune, range(len(signature.inputs)) if quantizer.input else ())
    given = quantizer.recipe.parameters
    reference = _calibrate_and_convert(own, data, samples, progress) if given is None else convert(own.pop(), given)
    if options.on_new_shape == NewShapePolicy.FALLBACK:
        options = replace(options, float_model=model)
    quantized = compile_native(requantize(reference), options, call)
    quantized.kept_attributes = KeptAttributes.of(model)
    logger.info("%r\n%s", quantized, quantized.coverage)
    return quantized


@check_arguments
@log_once()
def from_checkpoint(
    path: str | Path,
    data: Any = None,
    *,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    model_class: type[nn.Module] | None = None,
    samples: int | None = None,
    progress: bool | None = None,
    options: CompileOptions | None = None,
) -> Any:
    """Compile a model of ``transformers`` whose weights another tool quantized.

    The model is built from the configuration beside the weights, or in the file; nothing is downloaded or unpickled.
    Weights stay as they are, and run as `intaglio.stages.imported_recipe` says: as int8 products if their activations
    were quantized too, else in float32.

    Args:
        path: a folder of compressed-tensors, GPTQ or AWQ, with config.json and safetensors files, or a GGUF file of the
            architecture llama, qwen2 or qwen3.
        data: batches, as for `quantize`. Without them, a model whose activations are calibrated is refused.
        recipe: what is quantized instead, as for `quantize`. Weights that do not fit it are rounded again.
        model_class: class of the model, if it is not part of ``transformers``.
        samples: as in `quantize`.
        progress: as in `quantize`.
        options: as in `quantize`.

    Returns:
        What `quantize` returns for the model: with ``generate`` and a key-value cache if the model generates.

    Raises:
        UnsupportedError: the format is not read; the error names the format, and the tensor or layer.
        ArtifactError: a file is missing, damaged or malformed.
        InputError: data is needed and not given.

    Examples:
        >>> model = intaglio.from_checkpoint("Llama-3.2-1B-Instruct-quantized.w8a8")
        >>> tokens = model.generate(ids, max_new_tokens=20)
    """
    from intaglio.integrations.transformers.checkpoint_models import example_batch, model_from_checkpoint

    model = model_from_checkpoint(path, model_class)
    chosen = imported_recipe(model) if recipe is None else Recipe.given(recipe)
    if data is None and chosen.calibrates:
        problem = "the activations of its layers are calibrated, which needs data"
        remedy = "pass data: from_checkpoint(path, batches), or recipe='int8_dynamic'"
        raise InputError("from_checkpoint", None, problem, remedy=remedy)
    batches = [example_batch(model)] if data is None else data
    return quantize(model, batches, recipe=chosen, samples=samples, progress=progress, options=options)


def capture_model(model: nn.Module, data: Any, example_inputs: Any, dynamic_shapes: Any) -> tuple[Captured, Call, Any]:
    """Return the captured model, the arguments of the example call, and data that still starts with the first batch."""
    build_ahead()
    call, data = first_call(model, data, example_inputs)
    captured = capture(model, call[0], example_kwargs=call[1], dynamic_shapes=dynamic_shapes, copies_parameters=False)
    return captured, call, data


def _calibrate_and_convert(own: list[Prepared], data: Any, samples: int | None, progress: bool | None) -> Reference:
    """Calibrate and convert. A model whose activations are all quantized dynamically needs no data, which only decides
    how weights of few bits are rounded."""
    if not own[0].observers and (data is None or not _has_corrected_weights(own[0])):
        return convert(equalize_without_data(own.pop()))
    return convert_with_corrections(own, *cached_batches(own[0], data, samples), samples, progress)


def _has_corrected_weights(prepared: Prepared) -> bool:
    return any(is_corrected(prepared.annotations, region) for region in prepared.annotations.regions)


def cached_batches(prepared: Prepared, data: Any, samples: int | None) -> tuple[list[Any], Any]:
    """Return the cached batches for equalization and correction, and data that still starts with them."""
    return cache_batches(data, prepared.signature, CACHED_SAMPLES if samples is None else min(samples, CACHED_SAMPLES))


@kept_memory()
def convert_with_corrections(
    own: list[Prepared], cached: list[Any], data: Any, samples: int | None, progress: bool | None
) -> Reference:
    """Equalize, calibrate, correct and convert. Data that is a function has no cached batches: only rotate, calibrate
    and convert."""
    prepared = own.pop()
    if not cached and Group.current().size == 1:
        prepared = equalize_without_data(prepared)
        return convert(prepared, calibrate(prepared, data, samples=samples, progress=progress))
    prepared = equalize(prepared, cached)
    collect_large(prepared.module.buffers())
    ranges = calibrate(prepared, data, samples=samples, progress=progress)
    corrections = correct(prepared, ranges, cached)
    return_freed()  # activations, moments and rows in float64
    return convert(prepared, ranges, corrections)
