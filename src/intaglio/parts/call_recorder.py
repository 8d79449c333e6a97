"""Recording of the calls of submodules while a float model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from intaglio.errors import InputError
from intaglio.integrations import AdaptedPart
from intaglio.mac_counter import MacCounter
from intaglio.parts.packed_sequences import PackedCall, is_recurrent
from intaglio.quant.calibrate.batches import Call
from intaglio.signature import clone_tensors
from intaglio.signature.tensor_checks import unsupported_reason
from intaglio.torch_private import pytree

MOST_BYTES = 512 * 10**6
"""Bytes of recorded arguments of one module. Beyond them every second call is dropped, then every fourth, and so on."""


@dataclass
class RecordedCalls:
    """Recorded calls of one module.

    Attributes:
        most: largest number of recorded calls, the first ones; ``None``: all, or evenly distributed ones.
        calls: the arguments of the recorded calls.
        forms: what a graph would fix about the arguments of each call, recorded or not.
        shapes: shapes of each tensor in all calls, by its place among the leaves of the arguments.
        seen: number of calls with samples.
        size: bytes of the recorded arguments.
        every: one in this many calls is recorded.
        packed: whether calls had a packed sequence. Those of its sequences of each length are recorded instead.
        refused: why no graph can take an argument of a call, or "".
    """

    most: int | None = None
    calls: list[Call] = field(default_factory=list)
    forms: set[tuple[Any, ...]] = field(default_factory=set)
    shapes: dict[int, set[tuple[int, ...]]] = field(default_factory=dict)
    seen: int = 0
    size: int = 0
    every: int = 1
    packed: bool = False
    refused: str = ""

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record a copy of the arguments of a call.

        Calls without samples are left out, and those with the arguments of the recorded call before, as a vision model
        gets them when text is generated for the images of a batch.
        """
        call = args, dict(kwargs)
        leaves, tree = pytree.tree_flatten(call)
        tensors = _tensors(leaves)
        if not tensors or any(not tensor.numel() for tensor in tensors) or self._repeats(leaves, tree):
            return
        self.forms.add(_form(leaves, tree))
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and not leaf.is_nested:
                self.shapes.setdefault(index, set()).add(tuple(leaf.shape))
        if self.seen % self.every == 0 and (self.most is None or len(self.calls) < self.most):
            self.calls.append(clone_tensors(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, call)))
            self.size += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        self.seen += 1
        if self.size > MOST_BYTES and len(self.calls) > 1:
            self.calls, self.every = self.calls[::2], 2 * self.every
            self.size = sum(tensor.numel() * tensor.itemsize for tensor in _tensors(self.calls))

    def _repeats(self, leaves: list[Any], tree: Any) -> bool:
        """Return whether a call, flattened, has the arguments of the last one that is recorded."""
        last, own = pytree.tree_flatten(self.calls[-1] if self.calls else None)
        return own == tree and all(map(_equal, last, leaves))

    @property
    def expected_bytes(self) -> int:
        """Return about how many bytes the arguments of all calls have, from those that are recorded."""
        return self.seen * self.size // max(len(self.calls), 1)


def _form(leaves: list[Any], tree: Any) -> tuple[Any, ...]:
    """Return everything about flattened arguments that a graph fixes."""
    return str(tree), *[(leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        dense = unsupported_reason(a) is None and unsupported_reason(b) is None
        return dense and a.dtype == b.dtype and torch.equal(a, b)
    return a is b or (isinstance(a, (str, int, float)) and isinstance(b, type(a)) and a == b)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def recorded_calls(
    modules: Mapping[str, nn.Module], adapted: Mapping[str, AdaptedPart], most: int | None = None
) -> Iterator[dict[str, RecordedCalls]]:
    """Record the calls of modules that happen inside of the context.

    Args:
        modules: the modules by name.
        adapted: those whose programs take other arguments than their forward, by name.
        most: number of calls to record, the first ones (default: all).
    """
    logs = {name: RecordedCalls(most) for name in modules}
    hooks = [
        module.register_forward_pre_hook(_recorder(logs[name], adapted.get(name)), with_kwargs=True)
        for name, module in modules.items()
    ]
    try:
        yield logs
    finally:
        for hook in hooks:
            hook.remove()


def _recorder(log: RecordedCalls, adapted: AdaptedPart | None) -> Callable[..., None]:
    def record_adapted(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert adapted is not None
        try:
            given = adapted.recorded(args, kwargs)
        except InputError as error:
            log.refused = f"{error.where}: {error.problem}"
        except Exception as error:  # the arguments are those of any code around the module
            log.refused = f"{type(error).__name__}: {error}"
        else:
            log.add((), given or {})

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_recurrent(module) or (call := PackedCall.of(args, kwargs, module.batch_first)) is None:
            log.add(args, kwargs)
            return
        log.packed = True
        for _, of_group in call.groups():
            log.add(of_group, {})

    return record if adapted is None else record_adapted


def count_macs(model: nn.Module, call: Call) -> tuple[dict[int, int], int]:
    """Return the multiply-accumulates of one call of the model.

    Returns:
        Those of each module by its ``id``, with those of its submodules, and those of the model.
    """
    found: dict[int, int] = {}
    started: list[int] = []
    with MacCounter() as counter, torch.no_grad():

        def begin(module: nn.Module, args: Any) -> None:
            started.append(counter.total)

        def end(module: nn.Module, args: Any, result: Any) -> None:
            found[id(module)] = found.get(id(module), 0) + counter.total - started.pop()

        modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        hooks = [module.register_forward_pre_hook(begin) for module in modules]
        hooks += [module.register_forward_hook(end) for module in modules]
        try:
            model(*clone_tensors(call[0]), **clone_tensors(call[1]))
        finally:
            for hook in hooks:
                hook.remove()
    return found, counter.total
