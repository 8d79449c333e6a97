"""`Session`: what all modules of a prepared or converted model share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intaglio.eager.activation import Activation
from intaglio.eager.calls import LoggedRun
from intaglio.eager.chain import Chain
from intaglio.eager.copies import plain_copy
from intaglio.eager.events import Event, function_name
from intaglio.eager.recorder import Recording, source_line
from intaglio.eager.run import Run, current, uninterrupted
from intaglio.eager.stored import Stored, restore, store
from intaglio.eager.tensor import QTensor
from intaglio.errors import UnsupportedError
from intaglio.quant import Quantizer

logger = logging.getLogger("intaglio")


class Session:
    """``model`` runs and is intercepted, ``origin`` is a model of the same tensors that is not.

    ``records``: operators that were not seen yet are recorded; else they run in float, or with ``strict`` are errors.
    """

    def __init__(self, model: nn.Module, quantizer: Quantizer, strict: bool = False,
                 leaf_classes: tuple[type, ...] = ()) -> None:  # fmt: skip
        self.leaf_classes = leaf_classes
        self.model, self.quantizer, self.strict = model, quantizer, strict
        self.records = True
        self.stored: Stored | None = None
        self.lock = threading.RLock()
        self._empty()

    def _empty(self) -> None:
        """Nothing seen yet; tensors as the model has them now."""
        self.origin, self.runs = plain_copy(self.model), 0
        self.chains: list[Chain] = []
        self.held = dict(_tensors_of(self.model))
        self.known = {id(tensor): path for path, tensor in self.held.items()}
        self.index: dict[Any, list[tuple[Chain, Event]]] = {}
        self.edges: dict[Any, list[tuple[Chain, int]]] = {}
        self.floats: set[Any] = set()
        self.warned: set[Any] = set()

    # -- copies --------------------------------------------------------------------------------------------------

    def kept(self) -> Stored:
        """What outlives the graphs."""
        with self.lock:
            return store(self) if self.stored is None else self.stored

    def suspend(self, stored: Stored) -> None:
        """Graphs are made again from this at the next call."""
        self.stored = stored

    def resume(self) -> None:
        """The graphs of what was kept, if they are not there."""
        with self.lock, uninterrupted(), torch.inference_mode(False):
            if self.stored is not None:
                self._empty()
                restore(self, self.stored)
                self.stored = None

    def __getstate__(self) -> dict[str, Any]:
        names = ("model", "quantizer", "strict", "leaf_classes", "records")
        return {**{name: getattr(self, name) for name in names}, "stored": self.kept()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock())

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model, or the module at ``path``, on its own."""
        if self.stored is not None:
            self.resume()
        run, outer = Run(self, path) if current.log is None else LoggedRun(self, path, current.log), current.run
        current.run = run
        try:
            with torch.no_grad(), run.interception:
                run.begin(args, kwargs)
                result = forward(*args, **kwargs)
                return run.end(result)
        finally:
            current.run = outer

    # -- recordings ----------------------------------------------------------------------------------------------

    def finished(self, run: Run, result: Any) -> Any:
        """The result of a call without deferred values; one batch more for the observers."""
        found = plain_results(result)
        if self.records:
            for chain in self.chains:
                chain.next_batch()
            self.runs += 1
        return found

    def recorded(self, recording: Recording) -> None:
        """A chain of it, which counts what was recorded."""
        chain = Chain(recording, self.origin, self.quantizer)
        self.add(chain)
        if chain.prepared is not None:
            chain.observe()

    def add(self, chain: Chain) -> None:
        if chain.refused is not None:
            logger.info("recording %d stays in float: %s", len(self.chains), chain.refused)
            self.floats.update(event.key for event in chain.events)
        else:
            self.enter(chain)
        self.chains.append(chain)

    def enter(self, chain: Chain) -> None:
        for event in chain.events:
            self.index.setdefault(event.key, []).append((chain, event))

    def entered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Activation:
        """The first recording, from its beginning, on the arguments of the model."""
        first = self.chains[0]
        made = Activation(self, first)
        made.begin(args, kwargs)
        if made.misfits and self.records and self._widened(first, made):
            made = Activation(self, first)
            made.begin(args, kwargs)
        return made

    def _widened(self, chain: Chain, made: Activation) -> bool:
        with uninterrupted():
            return chain.widen(made.misfits)

    def find(
        self, at: Activation | None, func: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Activation | None:
        """Where the operator was recorded, its operands bound: where it followed before, else on the same line, else
        the next one of the same recording, or the last one before."""
        candidates = self.index.get((path, func))
        if not candidates:
            return None
        place = (at.chain, at.next) if at is not None else None
        known = self.edges.get(place, [])
        line = source_line() if len(candidates) > 1 else ""

        def order(candidate: tuple[Chain, Event]) -> tuple[bool, bool, bool, bool, int]:
            chain, event = candidate
            same = at is not None and chain is at.chain
            behind = same and at is not None and event.index >= at.next
            return (
                (chain, event.index) not in known, event.source != line, not same, not behind,
                event.index if behind else -event.index,
            )  # fmt: skip

        candidates = sorted(candidates, key=order)
        for widens in (False, True) if self.records else (False,):
            for chain, event in candidates:
                found = self._started(chain, event, args, kwargs, widens)
                if found is not None:
                    if self.records and (chain, event.index) not in known:
                        self.edges.setdefault(place, []).append((chain, event.index))
                    return found
        return None

    def _started(
        self, chain: Chain, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any], widens: bool
    ) -> Activation | None:
        """An activation that begins with this operator on these operands; with ``widens``, for sizes that the recording
        does not take yet."""
        found = Activation(self, chain, event.index)
        if found.follows(event, args, kwargs):
            return found
        if widens and found.misfits and self._widened(chain, found):
            return self._started(chain, event, args, kwargs, False)
        return None

    def unseen(self, func: Any, path: str, at: Activation | None) -> None:
        """An operator that calibration has not seen: said once for each line of code."""
        name, line = "call of the module" if func is None else function_name(func), source_line()
        if (path, func, line) in self.warned:
            return
        expected = "nothing more" if at is None or at.next >= at.count else str(at.events[at.next])
        if self.strict:
            raise UnsupportedError(
                path or type(self.model).__name__, name, f"not seen in calibration; expected {expected}", source=line,
                remedy="calibrate with data that takes this way, or convert without strict=True",
            )  # fmt: skip
        self.warned.add((path, func, line))
        logger.warning("%s, %s (%s): not seen in calibration; it runs in float", path or "the model", name, line)


def _tensors_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters, buffers, and other tensors that modules hold as attributes, by dotted name."""
    found = [*model.named_parameters(), *model.named_buffers()]
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        found += [(prefix + name, value) for name, value in vars(module).items() if isinstance(value, torch.Tensor)]
    return found


def plain_results(result: Any) -> Any:
    """The model's result without deferred values, wherever PyTorch finds tensors in it."""
    if type(result) is QTensor:
        return result.numbers()
    if isinstance(result, torch.Tensor):
        return result
    pendings = [leaf for leaf in pytree.tree_leaves(result) if type(leaf) is QTensor and leaf.content is None]
    for activation in {id(q.activation): q.activation for q in pendings}.values():
        activation.compute([q for q in pendings if q.activation is activation])
    return pytree.tree_map(lambda leaf: leaf.numbers() if type(leaf) is QTensor else leaf, result)
