"""Quantization of the largest submodules that can be captured, for models that cannot be captured as a whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import torch
from torch import nn

from intaglio.errors import CaptureError, IntaglioError, NotFiniteError
from intaglio.integrations import AdaptedPart, adapted_parts_of, integrations_in
from intaglio.parts.call_recorder import MOST_BYTES, RecordedCalls, count_macs, recorded_calls
from intaglio.parts.capture_part import PartCandidate, run_call
from intaglio.parts.part_module import QuantizedPart, parts_behind
from intaglio.progress import progress_of
from intaglio.quant.calibrate.batches import Call, Use, batches, binder_for
from intaglio.runtime import FloatPart, QuantizedModel
from intaglio.signature.tensor_checks import unsupported_reason
from intaglio.torch_private import pytree, submodules_of
from intaglio.tracing.copies.copy_model import copy_model

logger = logging.getLogger("intaglio")

MOST_BATCHES = 256
"""Number of batches that are run to record the arguments of submodules."""
CHECKED_CALLS = 4
"""Number of calls with which the quantized parts are tried in their places."""
NOT_CALLED = "no batch calls it with tensors"
LAYERS_COLLECTED = "the model returns results of modules inside of it"
OUTSIDE_OF_PARTS = "it is computed by Python code outside of the quantized parts"

QuantizePart = Callable[[PartCandidate, Call, Sequence[Any]], QuantizedModel]
"""Quantizes a part. Its arguments are the captured part, the arguments of one call, and data."""


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
            run_call(model, call)
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
    if isinstance(first, torch.Tensor):
        return first.size(0) if first.dim() else 1  # a nested tensor has no length
    return len(first) if isinstance(first, list) else 1


def find_parts(
    model: nn.Module, calls: Sequence[Call], quantize_part: QuantizePart, further: Sequence[Use] = ()
) -> FoundParts:
    """Quantize the largest submodules of a model that can be captured, and put them into the model.

    Args:
        model: a copy of the float model in evaluation mode, which is changed.
        calls: calls of the model.
        quantize_part: quantizes one captured submodule.
        further: functions that use the model in other ways.
    """
    macs, total = count_macs(model, calls[0])
    uses: list[Call | Use] = [calls[0], *further, *calls[1:]]
    search = _PartSearch(model, uses, quantize_part, macs)
    waiting, parts = search.below("", model), dict[str, QuantizedPart]()
    while waiting:
        quantized = search.quantized(waiting)
        made = {
            path: QuantizedPart(path, int8, search.modules[path], search.adapted.get(path))
            for path, int8 in quantized.items()
        }
        waiting = []
        for path, reason in _put(model, made, uses):
            del made[path]
            waiting += search.instead_of(path, search.modules[path], reason)
        parts |= made
    floats = list(search.floats)
    own = {path: macs.get(id(search.modules[path]), 0) for path in parts}
    rest = total - sum(own.values()) - sum(part.macs for part in floats)
    if rest > 0:
        floats.append(FloatPart("", type(model).__name__, OUTSIDE_OF_PARTS, rest))
    return FoundParts(parts, own, total, floats)


SCRIPTED = "it is TorchScript; with the nn.Module that it was made from it can be int8"
"""Reason why scripted and traced modules stay in float."""


class _PartSearch:
    """Walks over the tree of modules from the top and quantizes those that can be captured."""

    def __init__(
        self, model: nn.Module, calls: Sequence[Call | Use], quantize_part: QuantizePart, macs: Mapping[int, int]
    ) -> None:
        self.model, self.calls, self.quantize_part, self.macs = model, calls, quantize_part, macs
        self.modules = dict(model.named_modules())
        self.floats: list[FloatPart] = []
        self.tried: set[int] = set()
        self.adapted, self.integrations = adapted_parts_of(model), integrations_in(model)
        python = {path: one for path, one in self.modules.items() if not isinstance(one, torch.jit.ScriptModule)}
        with recorded_calls(python, self.adapted, most=1) as self.first:
            for call in calls:
                run_call(model, call)

    def quantized(self, waiting: Sequence[PartCandidate]) -> dict[str, QuantizedModel]:
        """Quantize candidates, or submodules of those for which that is not possible, and return them by path.

        The model runs once more for each group of candidates whose recorded arguments fit into `MOST_BYTES`.
        """
        found: dict[str, QuantizedModel] = {}
        while waiting:
            group = self.first_group(waiting)
            waiting = list(waiting[len(group) :])
            with recorded_calls({one.path: one.module for one in group}, self.adapted) as logs:
                for call in self.calls:
                    run_call(self.model, call)
            while group:
                one = group.pop(0)
                count = len(found) + 1 + len(group) + len(waiting)
                with progress_of(f"{one.path}, part {len(found) + 1} of {count}"):
                    result = self.quantize(one, logs.pop(one.path))
                if isinstance(result, str):
                    waiting += self.instead_of(one.path, one.module, result)
                else:
                    found[one.path] = result
        return found

    def below(self, path: str, module: nn.Module) -> list[PartCandidate]:
        """Return the largest submodules of a module that can be captured."""
        found = []
        for name, child in submodules_of(module).items():
            if child is None or id(child) in self.tried or not _has_work(child, self.macs):
                continue
            self.tried.add(id(child))
            found += self.candidates(f"{path}.{name}".lstrip("."), child)
        return found

    def candidates(self, path: str, module: nn.Module) -> list[PartCandidate]:
        """Return a submodule if it can be captured, and otherwise those of its submodules that can be."""
        if isinstance(module, torch.jit.ScriptModule):
            self.floats.append(FloatPart(path, module.original_name, SCRIPTED, self.macs.get(id(module), 0)))
            return []
        log = self.first[path]
        reason = _unsupported(log) if log.calls else log.refused or NOT_CALLED
        if reason is None and any(one.has_collected_layers(module) for one in self.integrations):
            reason = LAYERS_COLLECTED
        if reason is None:
            adapted = self.adapted.get(path)
            try:
                with progress_of(path):
                    found = [PartCandidate.of(path, module, log, adapted)]
                return found if adapted is None else [*found, *self.outside_of(path, module, adapted)]
            except IntaglioError as error:
                reason = _first_line(error)
        return self.instead_of(path, module, reason)

    def outside_of(self, path: str, module: nn.Module, adapted: AdaptedPart) -> list[PartCandidate]:
        """Return the candidates among the modules inside of a part that the code around it calls."""
        found = []
        for name in adapted.outside:
            own = module.get_submodule(name)
            if id(own) not in self.tried and _has_work(own, self.macs):
                self.tried.add(id(own))
                found += self.candidates(f"{path}.{name}", own)
        return found

    def instead_of(self, path: str, module: nn.Module, reason: str) -> list[PartCandidate]:
        """Return the candidates inside of a submodule that stays in float, or note the reason if there is nothing."""
        if path in self.adapted and reason is not NOT_CALLED:
            logger.info("%s: no program of its own, because %s", path, reason)
        if any(_has_work(part, self.macs) for part in module.children()):
            return self.below(path, module)
        self.floats.append(FloatPart(path, type(module).__name__, reason, self.macs.get(id(module), 0)))
        return []

    def first_group(self, waiting: Sequence[PartCandidate]) -> list[PartCandidate]:
        """Return the first candidates whose calls can be recorded together, at least one."""
        sizes = accumulate(self.first[one.path].expected_bytes for one in waiting)
        return [one for one, size in zip(waiting, sizes, strict=True) if size <= MOST_BYTES or one is waiting[0]]

    def quantize(self, one: PartCandidate, log: RecordedCalls) -> QuantizedModel | str:
        """Quantize a candidate with its recorded calls, or return why that is not possible."""
        if (reason := _unsupported(log)) is not None:
            return reason
        try:
            found = self.quantize_part(one, *one.data(log))
        except NotFiniteError as error:
            if (place := _place_of_nan(self.calls)) is not None:
                problem = f"it holds NaN, and so does a value of the part '{one.path}': {error.where}: {error.problem}"
                raise NotFiniteError(place, None, problem, remedy=error.remedy) from None
            return _first_line(error)
        except IntaglioError as error:
            return _first_line(error)
        logger.info("quantized the part %s", one.path)
        return found


def _place_of_nan(calls: Sequence[Call | Use]) -> str | None:
    """Return the batch and the argument that hold NaN, or ``None``."""
    for number, call in enumerate(call for call in calls if isinstance(call, tuple)):
        for index, leaf in enumerate(pytree.tree_leaves(call)):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and bool(leaf.isnan().any()):
                return f"batch {number}, argument leaf {index}"
    return None


def _first_line(error: IntaglioError) -> str:
    return error.problem.splitlines()[0]


def _has_work(module: nn.Module, macs: Mapping[int, int]) -> bool:
    """Return whether a module multiplies and accumulates, or has weights for it."""
    return macs.get(id(module), 0) > 0 or any(weight.dim() > 1 for weight in module.parameters())


def _unsupported(log: RecordedCalls) -> str | None:
    """Return why a graph cannot take an argument of the calls, such as a nested tensor or a cache, or why they cannot
    be those of one graph, or ``None``."""
    if log.refused:
        return log.refused
    for leaf in pytree.tree_leaves(log.calls):
        if isinstance(leaf, torch.Tensor):
            if (reason := unsupported_reason(leaf)) is not None:
                return reason
        elif _holds_tensors(leaf):
            return f"it gets a {type(leaf).__name__}, whose tensors may change from call to call"
    return "its calls differ in the structure of their arguments or in numbers" if len(log.forms) > 1 else None


def _holds_tensors(value: Any, depth: int = 4) -> bool:
    """Return whether an object has tensors, in lists or other objects up to this depth."""
    if isinstance(value, torch.Tensor):
        return True
    inside: Any = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    inside = inside or getattr(value, "__dict__", {}).values()
    return depth > 0 and any(_holds_tensors(one, depth - 1) for one in list(inside))


def _put(
    model: nn.Module, parts: Mapping[str, QuantizedPart], calls: Sequence[Call | Use]
) -> Iterator[tuple[str, str]]:
    """Put parts into the model, try some calls, and yield parts that had to stay in float, with the reasons."""
    left = dict(sorted(parts.items()))  # a part may have others inside, which come after it
    originals = {path: model.get_submodule(path) for path in left}
    for path, part in left.items():
        replace_module(model, originals[path], part)
    pending = list(calls[:CHECKED_CALLS])
    while pending:
        try:
            run_call(model, pending[0])
        except Exception as error:  # code around a part may turn what it lacks into any error
            unfit = [path for path, part in left.items() if part.unfit]
            if not unfit:
                raise
            behind = parts_behind(error)  # others may lack what code asks for with a default
            for path in [path for path in unfit if path in behind] or unfit:
                part = left.pop(path)
                replace_module(model, part, originals[path])
                for inside, other in left.items():
                    if inside.startswith(f"{path}."):
                        replace_module(model, originals[inside], other)
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
