"""Trying to leave the batch free, and falling back to the shapes of the example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intaglio.calls import TO_DENSE_ON_CPU, unfit
from intaglio.capture.captured import Captured
from intaglio.capture.check import disagreement, free_symbols
from intaglio.capture.export import export, free_batch, frozen_copy, to_captured, with_named_keywords
from intaglio.errors import CaptureError


def trace(
    model: nn.Module, example_inputs: Any, example_kwargs: Mapping[str, Any] | None, dynamic_shapes: Any, train: bool
) -> Captured:
    """What `capture` does, behind the import of torch.export."""
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    kwargs = dict(example_kwargs or {})
    args, kwargs = pytree.tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, (args, kwargs))
    _check_example(args, kwargs)
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        own = with_named_keywords(frozen_copy(model, train), kwargs)
        if not train:
            _try(own, args, kwargs)
        return _capture(own, args, kwargs, dynamic_shapes, train)


def _check_example(args: tuple, kwargs: Mapping[str, Any]) -> None:
    for index, leaf in enumerate(pytree.tree_leaves((args, dict(kwargs)))):
        if isinstance(leaf, torch.Tensor) and (problem := unfit(leaf)) is not None:
            raise CaptureError(f"example input {index}", None, problem, remedy=TO_DENSE_ON_CPU)


def _try(own: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """The float model on its own example, before torch.export words a plain mistake in its own way."""
    try:
        with torch.no_grad():
            own(*pytree.tree_map(_clone, args), **pytree.tree_map(_clone, dict(kwargs)))
    except Exception as error:
        kinds = [f"{type(v).__name__}{list(v.shape) if isinstance(v, torch.Tensor) else ''}" for v in args]
        raise CaptureError(
            type(own).__name__, None, f"the float model fails on the example inputs ({', '.join(kinds)}): {error}",
            remedy="pass example_inputs as the tuple of arguments that forward takes, or batches that hold them",
        ) from error  # fmt: skip


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _capture(own: nn.Module, args: tuple, kwargs: dict[str, Any], dynamic_shapes: Any, train: bool) -> Captured:
    if dynamic_shapes is not None:
        return _checked(to_captured(export(own, args, kwargs, dynamic_shapes), own, (), train), own, args, kwargs)
    reason = None
    for wide_args, wide_kwargs in _examples(args, kwargs):
        try:
            shapes = free_batch(own, wide_args, wide_kwargs)
            captured = to_captured(export(own, wide_args, wide_kwargs, shapes), own, (), train)
            found = disagreement(captured, own, args, kwargs) if free_symbols(captured) else "the model fixes it"
        except CaptureError as error:
            found = error.problem
        if found is None:
            return captured
        reason = reason or found
    note = f"batch is fixed as in the example: {reason}"
    return _checked(to_captured(export(own, args, kwargs, None), own, (note,), train), own, args, kwargs)


def _checked(captured: Captured, model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> Captured:
    if not captured.training and (reason := disagreement(captured, model, args, kwargs)) is not None:
        raise CaptureError(
            type(model).__name__, None, f"the captured graph is not the model: {reason}",
            remedy="the model depends on data or on random numbers; capture a part of it that does not",
        )  # fmt: skip
    return captured


def _examples(args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[tuple, dict[str, Any]]]:
    """Every tensor of batch 1 repeated to batch 2; then, where others have another batch, the example as it is."""
    sizes = {v.shape[0] for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor) and v.dim()}

    def widen(leaf: Any) -> Any:
        return torch.cat([leaf, leaf]) if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == 1 else leaf

    if 1 in sizes:
        yield pytree.tree_map(widen, (args, kwargs))
    if sizes != {1}:
        yield args, kwargs
