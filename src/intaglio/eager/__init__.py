"""Define-by-run quantization: quantize a model that stays plain Python, without exporting it first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from intaglio import errors
from intaglio.argument_checks import check_arguments, check_arguments_except
from intaglio.eager.call_log import Intercepted, calls
from intaglio.eager.coverage_report import assert_int8, attach_view, clipping, coverage
from intaglio.eager.model_copies import copy_without_attachments, restoring_state
from intaglio.eager.quantization_state import AutoQuantizationState, attach, has_states_as_children, session_of
from intaglio.eager.recording.replay import without_extra_results
from intaglio.eager.run_trace import float_copy
from intaglio.eager.seen_operators import QTensorInfo, SeenOpInfo
from intaglio.eager.segments.fused_operators import fused_groups
from intaglio.eager.segments.segment import Segment
from intaglio.eager.segments.selector_checks import check_selectors
from intaglio.eager.session import Session
from intaglio.eager.torchscript import scriptable
from intaglio.errors import CalibrationError, CaptureError, InputError
from intaglio.quant.qdq.convert import Reference
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.tracing.already_quantized import refuse_other_train

__all__ = [
    "AutoQuantizationState",
    "Intercepted",
    "QTensorInfo",
    "SeenOpInfo",
    "assert_int8",
    "calls",
    "clipping",
    "convert",
    "coverage",
    "fusions",
    "parameters",
    "prepare",
    "rewrite",
    "scriptable",
]


@check_arguments
def prepare(
    model: nn.Module,
    example_inputs: Any,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    leaf_classes: tuple[type, ...] = (),
    as_children: bool = False,
) -> nn.Module:
    """Return a copy of the model, in evaluation mode, that collects calibration statistics whenever it is called.

    The example inputs run once so that the operators are recorded; they do not count as calibration data. Copies,
    pickles and the state dictionary of the result contain the statistics, the latter as extra entries named
    `_auto_quant_state.*`.

    Args:
        model: Float model. It is not changed.
        example_inputs: A tuple of positional arguments, or the only one.
        recipe: What to quantize and how. The default recipe is used if it is None.
        example_kwargs: Keyword arguments of the example call.
        leaf_classes: Modules of these classes, and everything inside them, stay in float.
        as_children: Whether the state of a module is a submodule of it, here and in the converted model, so that
            `named_modules` and the printed model show it. Containers such as `nn.Sequential` keep theirs as an
            attribute, because code that iterates over one would take it for a layer.

    Raises:
        SelectorError: A selector of the recipe matches no module and no operator of the example call. `convert` checks
            selectors of operators (`op:`), which may run in later calls.
    """
    refuse_other_train(model)
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    prepared = copy_without_attachments(model).eval()
    quantizer = Quantizer(Recipe.given(recipe))
    session = Session(prepared, quantizer, leaf_classes=leaf_classes)
    attach(session, as_children)
    attach_view(session)
    with restoring_state(prepared):
        _run_example(prepared, model, args, example_kwargs or {})
    check_selectors(quantizer.recipe, prepared, session.segments, is_complete=False)
    for segment in session.segments:
        segment.clear_statistics()
    session.runs = 0
    return prepared


UNFIT_INPUTS = (TypeError, ValueError, RuntimeError, AttributeError, IndexError)
"""Errors of Python and PyTorch for inputs that a model cannot take. Exceptions of other classes are the model's own."""


def _run_example(prepared: nn.Module, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run the example call.

    Raises:
        CaptureError: The model fails as models do for inputs that they cannot take, or it runs and recording it fails.
    """
    try:
        prepared(*args, **kwargs)
    except errors.IntaglioError:
        raise
    except Exception as error:
        if _runs(model, args, kwargs):
            problem = f"the float model runs, but recording it fails: {type(error).__name__}: {error}"
            raise CaptureError(type(model).__name__, None, problem, remedy=REPORT_DEFECT) from error
        if not isinstance(error, UNFIT_INPUTS):
            raise
        problem = f"the float model fails on the example inputs: {type(error).__name__}: {error}"
        remedy = "check that model(*example_inputs, **example_kwargs) runs"
        raise CaptureError("example_inputs", None, problem, remedy=remedy) from error


REPORT_DEFECT = "report this defect of intaglio with the traceback, and try intaglio.quantize(model, data)"


def _runs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a copy of a float model takes these arguments."""
    try:
        with torch.no_grad():
            float_copy(model)(*args, **kwargs)
    except Exception:
        return False
    return True


@check_arguments_except("prepared")
def convert(
    prepared: nn.Module, parameters: Parameters | Sequence[Parameters] | None = None, *, strict: bool = False
) -> nn.Module:
    """Return a copy of a prepared model that runs int8 kernels and is still plain Python.

    Args:
        prepared: Model from `prepare`.
        parameters: Quantization parameters of an earlier conversion (see `parameters`), one `Parameters` per recording.
            No calibration data is needed then. If None, the collected statistics are used; a model that was never
            called uses the parameters from its state dictionary or from its recipe.
        strict: Raise an error instead of a warning when the model runs an operator that calibration has not seen, or
            when more than 5 % of a float value are outside of its calibrated range.

    Raises:
        CalibrationError: The model has neither statistics nor parameters.
        SelectorError: A selector of the recipe matches neither an operator that ran nor a module.
        UnsupportedError: No operator can be quantized, or the model is strict and a recording stays in float because it
            cannot be captured.
        InputError: The number of parameter sets differs from the number of recordings.
    """
    before = session_of(prepared)
    if not before.is_recording:
        problem, remedy = "the model is converted already", "call it, or call eager.rewrite(converted) for its graph"
        raise InputError("convert", None, problem, remedy=remedy)
    check_selectors(before.quantizer.recipe, prepared, before.segments, is_complete=True)
    given = _given(before, parameters)
    converted = copy_without_attachments(prepared)
    session = Session(converted, before.quantizer, strict, before.leaf_classes)
    made = [
        segment.converted(own, session.origin, session.clipping)
        for segment, own in zip(before.segments, given, strict=True)
    ]
    session.take_over(before, made)
    session.check_quantized()
    attach(session, has_states_as_children(prepared))
    attach_view(session)
    return converted


def _given(before: Session, parameters: Parameters | Sequence[Parameters] | None) -> list[Parameters | None]:
    """Return the given parameters of each recording, or None where the collected statistics are to be used."""
    segments = before.segments
    if parameters is None and before.runs:
        return [None] * len(segments)
    recipe = before.quantizer.recipe.parameters
    if parameters is None and any(segment.given is not None for segment in segments):
        return [segment.given for segment in segments]
    if parameters is None:
        parameters = recipe
    if parameters is None:
        raise CalibrationError(
            "model", None, "the prepared model was never called", remedy="call it with a few batches"
        )
    found = [parameters] if isinstance(parameters, Parameters) else list(parameters)
    if len(found) != len(segments):
        raise InputError(
            "parameters",
            None,
            f"they are for {len(found)} recordings, but the prepared model has {_listed(segments)}",
            remedy="prepare and call the model as when the parameters were computed",
        )
    return list(found)


@check_arguments_except("converted")
def parameters(converted: nn.Module) -> tuple[Parameters, ...]:
    """Return the quantization parameters of a converted model, one `Parameters` per recording.

    `convert` accepts them instead of calibration data, and a recipe can store them.

    Args:
        converted: Model from `convert`.
    """
    references = [segment.reference for segment in session_of(converted).segments]
    return tuple(Parameters({}) if found is None else found.parameters for found in references)


@check_arguments_except("converted")
def rewrite(converted: nn.Module) -> Reference:
    """Return the explicit graph of a converted model that always runs the same operators, as input for `compile`.

    Args:
        converted: Model from `convert`.

    Raises:
        InputError: The model is not converted, has several recordings (the message lists where each begins), or has no
            quantized operator.
    """
    session = session_of(converted)
    if session.is_recording:
        raise InputError(
            "rewrite", None, "the model is prepared, not converted", remedy="call eager.convert(model) first"
        )
    segments = session.segments
    if len(segments) != 1:
        raise InputError(
            "rewrite",
            None,
            f"a graph can hold one recording, but the model has {_listed(segments)}",
            remedy="prepare, convert and rewrite submodules that always run the same operators, one by one",
        )
    if segments[0].reference is None:
        raise InputError("rewrite", None, f"no operator is quantized: {segments[0].refused}")
    reference: Reference = segments[0].reference
    return without_extra_results(reference) if segments[0].recording.has_extra_results else reference


@check_arguments
def fusions(
    model: nn.Module,
    example_inputs: Any,
    recipe: Recipe | Mapping[str, Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
) -> list[tuple[str, ...]]:
    """Return the groups of operators that would be fused, in execution order.

    Each group lists module paths, and `path::function` for functions that a module calls. The model runs once with the
    example inputs; it is not changed, and nothing is calibrated.

    Args:
        model: Float model.
        example_inputs: A tuple of positional arguments, or the only one.
        recipe: What to quantize and how. The default recipe is used if it is None.
        example_kwargs: Keyword arguments of the example call.
    """
    found = session_of(prepare(model, example_inputs, recipe, example_kwargs)).segments
    return list(dict.fromkeys(names for segment in found for names in fused_groups(segment)))


def is_session(model: Any) -> bool:
    """Return whether `prepare` or `convert` made the model."""
    return isinstance(getattr(model, "_auto_quant_state", None), AutoQuantizationState)


def _listed(segments: Sequence[Segment]) -> str:
    """Format the recordings for an error message, each with its first operator and the source line of that operator."""
    firsts = [segment.events[0] for segment in segments]
    texts = [
        f"  {number}: {len(segment.events)} operators from {first.path or 'model'} ({first.name}) at {first.source}"
        for number, (segment, first) in enumerate(zip(segments, firsts, strict=True))
    ]
    return "\n".join([f"{len(segments)} recordings", *texts])
