"""Quantization of the largest submodules that can be captured, for models that cannot be captured as a whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from intaglio.errors import CaptureError, IntaglioError
from intaglio.parts.call_recorder import RecordedCalls, count_macs, recorded_calls
from intaglio.parts.part_module import QuantizedPart, alone
from intaglio.quant.calibrate.batches import Call, batches, binder_for
from intaglio.runtime import FloatPart, QuantizedModel
from intaglio.signature import clone_tensors
from intaglio.torch_private import pytree, submodules_of
from intaglio.tracing import Captured, capture
from intaglio.tracing.earlier_results import copy_model

logger = logging.getLogger("intaglio")

MOST_BATCHES = 256
"""Number of batches that are run to record the arguments of submodules."""
CHECKED_CALLS = 4
"""Number of calls with which the quantized parts are tried in their places."""
NOT_CALLED = "no batch calls it with tensors"
OUTSIDE_OF_PARTS = "it is computed by Python code outside of the quantized parts"

QuantizePart = Callable[[nn.Module, Captured, Call, Sequence[Any]], QuantizedModel]
"""Quantizes a part. Its arguments are the float module, its captured form, the arguments of one call, and data."""


@dataclass
class FoundParts:
    """Parts of a model.

    Attributes:
        parts: the quantized submodules by path.
        macs: multiply-accumulates of the first batch of each part, by path.
        total: multiply-accumulates of the first batch.
        floats: submodules that stay in float although they have weights, with the reasons.
    """

    parts: dict[str, QuantizedPart]
    macs: dict[str, int]
    total: int
    floats: list[FloatPart]


def calls_of(model: nn.Module, data: Any, samples: int | None) -> list[Call]:
    """Return the calls of the model for the first batches, as `Binder` makes them.

    A list of images, and a pair of such a list and labels, may be a batch too, if forward takes the list.

    Raises:
        CaptureError: the model fails on the first batch.
    """
    items = list(islice(batches(data), MOST_BATCHES))
    binder, failures = binder_for(model), list[Exception]()
    for form in (binder, _first_of_pair, _only_argument) if items else ():
        try:
            call: Call = form(items[0])
            _run(model, call)
        except Exception as error:
            failures.append(error)
            continue
        found, count = [], 0
        for item in items:
            found.append(form(item))
            count += _samples(found[-1])
            if samples is not None and count >= samples:
                break
        return found
    raise CaptureError("data", None, "the float model fails on the first batch") from next(iter(failures), None)


def _only_argument(item: Any) -> Call:
    return (item,), {}


def _first_of_pair(item: Any) -> Call:
    first, _ = item
    return (first,), {}


def _samples(call: Call) -> int:
    """Return the number of samples in a call: images of a list, or the size of the first axis of a tensor."""
    first = next(iter((*call[0], *call[1].values())), None)
    return len(first) if isinstance(first, (list, torch.Tensor)) and not _is_scalar(first) else 1


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim()


def _run(model: nn.Module, call: Call) -> Any:
    with torch.no_grad():
        return model(*clone_tensors(call[0]), **clone_tensors(call[1]))


def find_parts(model: nn.Module, calls: Sequence[Call], quantize_part: QuantizePart) -> FoundParts:
    """Quantize the largest submodules of a model that can be captured, and put them into the model.

    Args:
        model: a copy of the float model in evaluation mode, which is changed.
        calls: calls of the model.
        quantize_part: quantizes one captured submodule.
    """
    macs, total = count_macs(model, calls[0])
    search = _PartSearch(model, calls, quantize_part, macs)
    search.visit("", model)
    parts = {path: QuantizedPart(path, int8, model.get_submodule(path)) for path, int8 in search.quantized.items()}
    floats = list(search.floats)
    for path, reason in _put(model, parts, calls):
        floats.append(FloatPart(path, "module", reason, macs.get(id(search.modules[path]), 0)))
        del parts[path]
    own = {path: macs.get(id(search.modules[path]), 0) for path in parts}
    rest = total - sum(own.values()) - sum(part.macs for part in floats)
    if rest > 0:
        floats.append(FloatPart("", type(model).__name__, OUTSIDE_OF_PARTS, rest))
    return FoundParts(parts, own, total, floats)


class _PartSearch:
    """Walks over the tree of modules from the top and quantizes those that can be captured."""

    def __init__(
        self, model: nn.Module, calls: Sequence[Call], quantize_part: QuantizePart, macs: Mapping[int, int]
    ) -> None:
        self.model, self.calls, self.quantize_part, self.macs = model, calls, quantize_part, macs
        self.modules = dict(model.named_modules())
        self.quantized: dict[str, QuantizedModel] = {}
        self.floats: list[FloatPart] = []
        self.tried: set[int] = set()
        with recorded_calls(self.modules, most=1) as self.first:
            for call in calls:
                _run(model, call)

    def visit(self, path: str, module: nn.Module) -> None:
        """Quantize the children of a module, or what is inside of them."""
        for name, child in submodules_of(module).items():
            if child is None or id(child) in self.tried or not _has_work(child, self.macs):
                continue
            self.tried.add(id(child))
            below = f"{path}.{name}".lstrip(".")
            called = self.first[below].calls
            reason = self.quantize(below, child) if called else NOT_CALLED
            if reason is None:
                continue
            if any(_has_work(part, self.macs) for part in child.children()):
                self.visit(below, child)
            else:
                self.floats.append(FloatPart(below, type(child).__name__, reason, self.macs.get(id(child), 0)))

    def quantize(self, path: str, module: nn.Module) -> str | None:
        """Quantize one submodule, or return why that is not possible."""
        log = self.first[path]
        if (reason := _varying(log.calls)) is not None:
            return reason
        part = alone(module, path)
        try:
            captured = capture_part(part, log)
            with recorded_calls({path: module}) as logs:
                for call in self.calls:
                    _run(self.model, call)
            if (reason := _varying(logs[path].calls)) is not None:
                return reason
            captured = _wide_enough(captured, part, logs[path])
            args, kwargs = logs[path].calls[0]
            data = [(*args, *kwargs.values()) for args, kwargs in logs[path].calls]
            self.quantized[path] = self.quantize_part(part, captured, (args, kwargs), data)
        except IntaglioError as error:
            return error.problem.splitlines()[0]
        logger.info("quantized the part %s", path)
        return None


def _has_work(module: nn.Module, macs: Mapping[int, int]) -> bool:
    """Return whether a module multiplies and accumulates, or has weights for it."""
    return macs.get(id(module), 0) > 0 or any(weight.dim() > 1 for weight in module.parameters())


def _varying(calls: Sequence[Call]) -> str | None:
    """Return why calls cannot be those of one graph, or ``None``."""
    forms = {_form(call) for call in calls}
    return "its calls differ in the structure of their arguments or in numbers" if len(forms) > 1 else None


def _form(call: Call) -> tuple[Any, ...]:
    """Return everything about arguments that a graph fixes."""
    leaves, tree = pytree.tree_flatten((call[0], dict(call[1])))
    return str(tree), *[(leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]


def capture_part(part: nn.Module, log: RecordedCalls) -> Captured:
    """Capture a part, with free heights and widths of images if its code allows them, and axes whose size varies."""
    args, kwargs = log.calls[0]
    leaves = pytree.tree_leaves((args, kwargs))
    images = {i: (2, 3) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim() == 4}
    images = images if _takes_larger_images(part, log.calls[0]) else {}
    varying = varying_axes(log)
    free: list[Mapping[int, Collection[int]]] = [_union(images, varying), varying, {}]
    error: CaptureError | None = None
    for axes in [wanted for i, wanted in enumerate(free) if wanted not in free[:i]]:
        try:
            captured = capture(part, args, example_kwargs=kwargs, free=axes)
        except CaptureError as found:
            error = error or found
            continue
        if not captured.notes or not axes:
            return captured
    if error is None:
        return capture(part, args, example_kwargs=kwargs)
    raise error


def _takes_larger_images(part: nn.Module, call: Call) -> bool:
    """Return whether a float module runs with images of twice the height and width."""

    def doubled(leaf: Any) -> Any:
        return leaf.repeat(1, 1, 2, 2) if isinstance(leaf, torch.Tensor) and leaf.dim() == 4 else leaf

    args, kwargs = pytree.tree_map(doubled, (call[0], dict(call[1])))
    try:
        _run(copy_model(part), (args, kwargs))
    except Exception:
        return False
    return True


def _wide_enough(captured: Captured, part: nn.Module, log: RecordedCalls) -> Captured:
    """Return the captured part, captured again if its calls have sizes that the graph does not take."""
    inputs = captured.signature.inputs
    varying = varying_axes(log)
    fixed = any(
        isinstance(entry.type.shape[axis], int) for entry in inputs for axis in varying.get(entry.leaf, ()) if axis
    )
    return capture_part(part, log) if fixed else captured


def varying_axes(log: RecordedCalls) -> dict[int, tuple[int, ...]]:
    """Return the axes of each leaf, except the first, whose size is not the same in all calls."""
    shapes: dict[int, list[tuple[int, ...]]] = {}
    for call in log.calls:
        for index, leaf in enumerate(pytree.tree_leaves((call[0], dict(call[1])))):
            if isinstance(leaf, torch.Tensor):
                shapes.setdefault(index, []).append(tuple(leaf.shape))
    found = {
        index: tuple(axis for axis in range(1, len(own[0])) if len({shape[axis] for shape in own}) > 1)
        for index, own in shapes.items()
    }
    return {index: axes for index, axes in found.items() if axes}


def _union(first: Mapping[int, Collection[int]], second: Mapping[int, Collection[int]]) -> dict[int, Collection[int]]:
    keys = sorted({*first, *second})
    return {key: tuple(sorted({*first.get(key, ()), *second.get(key, ())})) for key in keys}


def _put(model: nn.Module, parts: Mapping[str, QuantizedPart], calls: Sequence[Call]) -> Iterator[tuple[str, str]]:
    """Put parts into the model, try some calls, and yield parts that had to stay in float, with the reasons."""
    originals = {path: model.get_submodule(path) for path in parts}
    for path, part in parts.items():
        replace_module(model, originals[path], part)
    pending = list(calls[:CHECKED_CALLS])
    left = dict(parts)
    while pending:
        try:
            _run(model, pending[0])
        except (IntaglioError, AttributeError):
            unfit = [path for path, part in left.items() if part.unfit]
            if not unfit:
                raise
            for path in unfit:
                part = left.pop(path)
                replace_module(model, part, originals[path])
                yield path, part.unfit
            continue
        pending.pop(0)


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module into every place that another has in the model."""
    for module in list(model.modules()):
        for name, child in submodules_of(module).items():
            if child is old:
                module.add_module(name, new)


def float_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the float model in evaluation mode."""
    return copy_model(model).eval()
