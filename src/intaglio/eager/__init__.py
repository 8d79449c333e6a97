"""Define-by-run: quantize models that stay plain Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from intaglio.eager.call_log import Intercepted, calls
from intaglio.eager.model_copies import bare
from intaglio.eager.quantization_state import AutoQuantizationState, attach, session_of
from intaglio.eager.seen_operators import QTensorInfo, SeenOpInfo
from intaglio.eager.segments.fused_operators import fused
from intaglio.eager.segments.segment import Segment
from intaglio.eager.session import Session, unchanged
from intaglio.eager.torchscript import scriptable
from intaglio.errors import CalibrationError, InputError
from intaglio.quant.qdq.convert import Reference
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe

__all__ = [
    "AutoQuantizationState",
    "Intercepted",
    "QTensorInfo",
    "SeenOpInfo",
    "calls",
    "convert",
    "fusions",
    "parameters",
    "prepare",
    "rewrite",
    "scriptable",
]


def prepare(
    model: nn.Module,
    example_inputs: Any,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    leaf_classes: tuple[type, ...] = (),
) -> nn.Module:
    """A copy of the model, in evaluation mode, that observes as it runs; the example is not counted.

    ``example_inputs``: a tuple of arguments, or the only one. ``leaf_classes``: modules of these classes stay in float
    with all that is in them. Copies, pickles and the state dictionary of the result have what it has seen: entries of
    their own beside the model's, under ``_auto_quant_state``.
    """
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    prepared = bare(model).eval()
    quantizer = Quantizer(Recipe.given(recipe))
    session = Session(prepared, quantizer, leaf_classes=leaf_classes)
    attach(session)
    with unchanged(prepared):
        prepared(*args, **(example_kwargs or {}))
    for segment in session.segments:
        segment.clear()
    session.runs = 0
    return prepared


def convert(
    prepared: nn.Module, parameters: Parameters | Sequence[Parameters] | None = None, *, strict: bool = False
) -> nn.Module:
    """A model that runs int8, still plain Python.

    ``parameters``: those of an earlier conversion (`parameters`), one a recording; no data is needed then. Without, a
    model that was calibrated takes what was counted, one that was not what it has: from a state dictionary, or from its
    recipe. ``strict``: an operator that calibration has not seen is an error instead of a warning.
    """
    before = session_of(prepared)
    given = _given(before, parameters)
    converted = bare(prepared)
    session = Session(converted, before.quantizer, strict, before.leaf_classes)
    made = [segment.converted(own, session.origin) for segment, own in zip(before.segments, given, strict=True)]
    session.follow(before, made)
    attach(session)
    return converted


def _given(before: Session, parameters: Parameters | Sequence[Parameters] | None) -> list[Parameters | None]:
    """Parameters by recording; `None` where what was counted is to be taken."""
    segments = before.segments
    if parameters is None and before.runs:
        return [None] * len(segments)
    recipe = before.quantizer.recipe.parameters
    if parameters is None and any(segment.given is not None for segment in segments):
        return [segment.given for segment in segments]
    if parameters is None:
        parameters = recipe
    if parameters is None:
        raise CalibrationError("model", None, "it was never run", remedy="call the prepared model with a few batches")
    found = [parameters] if isinstance(parameters, Parameters) else list(parameters)
    if len(found) != len(segments):
        raise InputError(
            "parameters",
            None,
            f"of {len(found)} recordings; the prepared model has {_listed(segments)}",
            remedy="let the prepared model run the ways that they were made for",
        )
    return list(found)


def parameters(converted: nn.Module) -> tuple[Parameters, ...]:
    """What conversion came to, one a recording: `convert` takes them in place of data, a recipe keeps them."""
    references = [segment.reference for segment in session_of(converted).segments]
    return tuple(Parameters({}) if found is None else found.parameters for found in references)


def rewrite(converted: nn.Module) -> Reference:
    """The explicit graph of a converted model that always runs the same way, for `compile`.

    Raises `InputError` for a model with several recordings, and says where they part.
    """
    session = session_of(converted)
    if session.records:
        raise InputError("rewrite", None, "the model is prepared, not converted", remedy="eager.convert(model) first")
    segments = session.segments
    if len(segments) != 1:
        raise InputError(
            "rewrite",
            None,
            f"a graph is one straight line; the model has {_listed(segments)}",
            remedy="rewrite modules of it that always run the same way, prepared by themselves",
        )
    if segments[0].reference is None:
        raise InputError("rewrite", None, f"nothing is quantized: {segments[0].refused}")
    reference: Reference = segments[0].reference
    return reference


def fusions(
    model: nn.Module,
    example_inputs: Any,
    recipe: Recipe | Mapping[str, Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
) -> list[tuple[str, ...]]:
    """What would run as one, in the order it runs: module paths, and ``path::function`` of functions they call.

    The model runs once, with the example inputs; it is not changed, and nothing is calibrated.
    """
    found = session_of(prepare(model, example_inputs, recipe, example_kwargs)).segments
    return list(dict.fromkeys(names for segment in found for names in fused(segment)))


def is_session(model: Any) -> bool:
    """Whether `prepare` or `convert` made it."""
    return isinstance(getattr(model, "_auto_quant_state", None), AutoQuantizationState)


def _listed(segments: Sequence[Segment]) -> str:
    """Recordings, each by its first operator and the line of code it begins on."""
    firsts = [segment.events[0] for segment in segments]
    texts = [
        f"  {number}: {len(segment.events)} operators from {first.path or 'model'} ({first.name}) at {first.source}"
        for number, (segment, first) in enumerate(zip(segments, firsts, strict=True))
    ]
    return "\n".join([f"{len(segments)} recordings", *texts])
