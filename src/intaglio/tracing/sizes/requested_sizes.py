"""Capture with the dynamic shapes that the user requests."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export import Dim as TorchDim

from intaglio.errors import CaptureError
from intaglio.fxgraph.padding_masks import padding_masks
from intaglio.torch_private import pytree
from intaglio.tracing.capture_check import WRONG_TYPE, disagreement, larger_example
from intaglio.tracing.captured import Captured
from intaglio.tracing.sizes.needed_conditions import with_needed_conditions
from intaglio.tracing.torch_export import export, to_captured


def with_requested_sizes(
    model_copy: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any, train: bool
) -> Captured:
    """Return the graph with the dynamic shapes of the user.

    Axes with `Dim.AUTO` are free where the model's code allows it: if it does not, those behind the batch, or all of
    them, are fixed to the sizes of the example, and a note says why.

    Raises:
        CaptureError: the model cannot be captured with these shapes.
    """
    try:
        captured = to_captured(export(model_copy, args, kwargs, shapes), model_copy, (), train)
        captured = with_needed_conditions(captured, model_copy, args, kwargs)
        captured = _rechecked(captured, model_copy, args, kwargs, shapes)
        notes = _notes_of_fixed_axes(captured, model_copy, args, kwargs, shapes)
        return replace(captured, model_info=captured.model_info.with_stage(notes))
    except CaptureError as error:
        for first, which in ((1, "axes with Dim.AUTO behind the batch"), (0, "axes with Dim.AUTO")):
            fixed = _fix_automatic_axes(shapes, first)
            if fixed == shapes:
                continue
            note = f"{which} are fixed to the sizes of the example: {error.problem}"
            with contextlib.suppress(CaptureError):
                captured = to_captured(export(model_copy, args, kwargs, fixed), model_copy, (note,), train)
                captured = with_needed_conditions(captured, model_copy, args, kwargs)
                return checked(captured, model_copy, args, kwargs)
        raise


def _notes_of_fixed_axes(
    captured: Captured, model_copy: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any
) -> tuple[str, ...]:
    """Return a note for each axis with `Dim.AUTO` whose size is that of the example, because the model's code fixes
    it."""
    bound = inspect.signature(model_copy.forward).bind(*args, **kwargs).arguments
    free = set(_automatic_axes(bound if isinstance(shapes, Mapping) else list(bound.values()), shapes))
    leaves = pytree.tree_leaves((args, kwargs))
    fixed = [
        (entry, axis)
        for entry in captured.signature.inputs
        for axis, size in enumerate(entry.type.shape)
        if isinstance(size, int) and (id(leaves[entry.leaf]), axis) in free
    ]
    return tuple(
        f"axis {axis} of '{entry.name}' is fixed to {entry.type.shape[axis]}: {BY_CODE}" for entry, axis in fixed
    )


BY_CODE = "the code of the model does not allow other sizes"


def _automatic_axes(value: Any, shapes: Any) -> Iterator[tuple[int, int]]:
    """Yield the identity of each tensor and its axes with `Dim.AUTO`, for nested arguments and their shapes."""
    if isinstance(value, torch.Tensor):
        entries = shapes.items() if isinstance(shapes, Mapping) else enumerate(shapes or ())
        yield from ((id(value), axis % value.dim()) for axis, size in entries if size == TorchDim.AUTO)
    elif isinstance(value, Mapping) and isinstance(shapes, Mapping):
        for key in value.keys() & shapes.keys():
            yield from _automatic_axes(value[key], shapes[key])
    elif isinstance(value, list | tuple) and isinstance(shapes, list | tuple):
        for one, own in zip(value, shapes, strict=False):
            yield from _automatic_axes(one, own)


def _rechecked(
    captured: Captured, model_copy: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any
) -> Captured:
    """Return a graph that agrees with the float model, captured with a larger example if it needs one; raise
    `CaptureError` if they disagree."""
    reason = None if captured.training else disagreement(captured, model_copy, args, kwargs)
    if WRONG_TYPE in (reason or ""):
        wide_args, wide_kwargs = larger_example(captured, args, kwargs)
        with contextlib.suppress(CaptureError):
            again = to_captured(export(model_copy, wide_args, wide_kwargs, shapes), model_copy, (), captured.training)
            again = with_needed_conditions(again, model_copy, wide_args, wide_kwargs)
            return checked(again, model_copy, args, kwargs)
    return _agreeing(captured, model_copy, reason, (args, kwargs))


def _fix_automatic_axes(shapes: Any, first: int, axis: int | str = 0) -> Any:
    """Return dynamic shapes in which the size of the example replaces `Dim.AUTO` on all axes from the first one on.

    Args:
        shapes: dynamic shapes, or one entry of them.
        first: the first axis that is fixed.
        axis: the index or key of the entry in the container that holds it.
    """
    if isinstance(shapes, Mapping):
        return {key: _fix_automatic_axes(entry, first, key) for key, entry in shapes.items()}
    if isinstance(shapes, list | tuple):
        return type(shapes)(_fix_automatic_axes(entry, first, index) for index, entry in enumerate(shapes))
    fixes = shapes == TorchDim.AUTO and (first == 0 or axis != 0)
    return TorchDim.STATIC if fixes else shapes


LARGER_EXAMPLE = "pass an example with larger sizes, or leave these sizes out of dynamic_shapes"
WITH_PADDING = (
    "pass an attention_mask that hides a position of every sample: with ones only, code of models such as those of "
    "transformers computes without the mask, but not when torch.export traces it"
)
INDEPENDENT_PART = "capture a part of the model that does not depend on data or on random numbers"


def checked(captured: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Captured:
    """Return the graph; raise `CaptureError` if it differs from the model."""
    reason = None if captured.training else disagreement(captured, model, args, kwargs)
    return _agreeing(captured, model, reason, (args, dict(kwargs)))


def _agreeing(captured: Captured, model: nn.Module, reason: str | None, call: Any) -> Captured:
    """Return the graph; raise `CaptureError` if there is a ``reason`` why it differs from the model in a call."""
    if reason is None:
        return captured
    problem = f"the captured graph does not compute what the model computes: {reason}"
    raise CaptureError(type(model).__name__, None, problem, remedy=_remedy_of_difference(captured, reason, call))


def _remedy_of_difference(captured: Captured, reason: str, call: Any) -> str:
    """Return what to do about a graph that computes something else than the model for an example."""
    if WRONG_TYPE in reason:
        return LARGER_EXAMPLE
    leaves = pytree.tree_leaves(call)
    masks = [leaves[captured.signature.inputs[index].leaf] for index in padding_masks(captured.signature)]
    return WITH_PADDING if any(bool(mask.all()) for mask in masks) else INDEPENDENT_PART
