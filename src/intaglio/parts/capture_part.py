"""Capture of a submodule with the arguments of its recorded calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from intaglio.errors import CaptureError, IntaglioError
from intaglio.integrations import AdaptedPart
from intaglio.ir import symbols_of
from intaglio.parts.call_recorder import RecordedCalls
from intaglio.parts.part_module import alone
from intaglio.quant.calibrate.batches import Call, Use
from intaglio.signature import clone_tensors
from intaglio.torch_private import pytree
from intaglio.tracing import Captured, capture
from intaglio.tracing.capture_check import check_calls, has_fixed_sizes
from intaglio.tracing.copies.copy_model import copy_model


def run_call(model: nn.Module, call: Call | Use) -> Any:
    """Run a float model with copies of the arguments of a call, or by a function that uses it, without gradients."""
    with torch.no_grad():
        if callable(call):
            return call(model)
        return model(*clone_tensors(call[0]), **clone_tensors(call[1]))


@dataclass(frozen=True)
class PartCandidate:
    """A submodule that can be captured with the arguments of its first call.

    Attributes:
        path: where it is in the model.
        module: the submodule.
        part: the module that is captured, with the submodule at the same path.
        captured: the graph.
        adapted: how its program is run, if it takes other arguments than its forward.
        cached_inputs: its inputs that hold results of earlier calls, as in `intaglio.stages.Quantizer`.
        arguments: makes the arguments of the graph of those of a recorded call.
    """

    path: str
    module: nn.Module
    part: nn.Module
    captured: Captured
    adapted: AdaptedPart | None = None
    cached_inputs: Mapping[int, int | None] = field(default_factory=dict)
    arguments: Callable[[dict[str, Any]], tuple[Any, ...]] | None = None

    @staticmethod
    def of(path: str, module: nn.Module, log: RecordedCalls, adapted: AdaptedPart | None) -> PartCandidate:
        """Capture a submodule.

        Raises:
            IntaglioError: it cannot be captured.
        """
        if adapted is None:
            part = alone(module, path)
            return PartCandidate(path, module, part, _capture_part(part, log))
        try:
            step, arguments, example = adapted.float_step(module, [kwargs for _, kwargs in log.calls])
        except IntaglioError:
            raise
        except Exception as error:  # the float module runs in ways that the model does not use
            problem = f"its forward fails with the arguments of a program: {type(error).__name__}: {error}"
            remedy = f"leave the part in float: quantize(..., skip=[{path!r}])"
            raise CaptureError(path, None, problem, remedy=remedy) from error
        part = alone(step, path)
        captured = capture(part, example.inputs, dynamic_shapes=example.dynamic_shapes)
        check_calls(captured, part, example.checks)
        return PartCandidate(path, module, part, captured, adapted, example.cached_inputs, arguments)

    def data(self, log: RecordedCalls) -> tuple[Call, list[tuple[Any, ...]]]:
        """Return the arguments of a call of the graph, and those of all recorded calls by position."""
        if self.arguments is not None:
            every = [self.arguments(kwargs) for _, kwargs in log.calls]
            return (every[0], {}), every
        return log.calls[0], [(*args, *kwargs.values()) for args, kwargs in log.calls]


def _capture_part(part: nn.Module, log: RecordedCalls) -> Captured:
    """Capture a part, with free heights and widths of images if its code allows them, and axes whose size varies."""
    args, kwargs = log.calls[0]
    larger = _with_larger_images((args, kwargs))
    images = _image_axes((args, kwargs)) if _runs(part, larger) else {}
    varying = varying_axes(log)
    free: list[Mapping[int, Collection[int]]] = [_union(images, varying), varying, {}]
    error: CaptureError | None = None
    for axes in [wanted for i, wanted in enumerate(free) if wanted not in free[:i]]:
        try:
            captured = capture(part, args, example_kwargs=kwargs, free=axes)
        except CaptureError as found:
            error = error or found
            continue
        if not axes or not has_fixed_sizes(captured):
            return _without_limit(captured, part, (args, kwargs), larger, axes) if images else captured
    if error is None:
        return capture(part, args, example_kwargs=kwargs)
    raise error


def _image_axes(call: Call) -> dict[int, tuple[int, int]]:
    """Return the axes of height and width of each leaf that may be images or maps of features."""
    leaves = pytree.tree_leaves((call[0], dict(call[1])))
    return {i: (2, 3) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim() == 4}


def _with_larger_images(call: Call) -> Call:
    """Return a call with images of twice the height and width."""

    def doubled(leaf: Any) -> Any:
        return leaf.repeat(1, 1, 2, 2) if isinstance(leaf, torch.Tensor) and leaf.dim() == 4 else leaf

    larger: Call = pytree.tree_map(doubled, (call[0], dict(call[1])))
    return larger


def _runs(part: nn.Module, call: Call) -> bool:
    """Return whether a float module runs with a call."""
    try:
        run_call(copy_model(part), call)
    except Exception:
        return False
    return True


def _without_limit(
    captured: Captured, part: nn.Module, call: Call, larger: Call, axes: Mapping[int, Collection[int]]
) -> Captured:
    """Return a graph that takes images of any size, if that of the example is limited to small ones.

    Maps of features that have a single pixel in the example have one in every call of its graph, which excludes larger
    images. In a graph of larger images they may have any size.
    """
    sizes = {name for entry in captured.signature.inputs for size in entry.type.shape[1:] for name in symbols_of(size)}
    if all(captured.signature.ranges.get(name, (0, None))[1] is None for name in sizes):
        return captured
    try:
        other = capture(part, larger[0], example_kwargs=larger[1], free=axes)
        check_calls(other, part, [call[0]], call[1])
    except CaptureError:
        return captured
    return other


def varying_axes(log: RecordedCalls) -> dict[int, tuple[int, ...]]:
    """Return the axes of each leaf, except the first, whose size is not the same in all calls. Both the number of
    sequences and their length are free if sequences were packed."""
    found = {}
    for index, shapes in log.shapes.items():
        sizes = zip(*shapes, strict=False)  # calls whose tensors have other numbers of axes are not those of one graph
        axes = tuple(axis for axis, own in enumerate(sizes) if axis and len(set(own)) > 1)
        if log.packed or axes:
            found[index] = (1,) if log.packed else axes
    return found


def _union(first: Mapping[int, Collection[int]], second: Mapping[int, Collection[int]]) -> dict[int, Collection[int]]:
    keys = sorted({*first, *second})
    return {key: tuple(sorted({*first.get(key, ()), *second.get(key, ())})) for key in keys}
