"""`Session`: what all modules of a prepared or converted model share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intaglio.eager.activation import Activation
from intaglio.eager.chain import Chain
from intaglio.eager.events import Event, function_name
from intaglio.eager.recorder import Recording, source_line
from intaglio.eager.run import Run, current
from intaglio.eager.tensor import QTensor
from intaglio.errors import UnsupportedError
from intaglio.quant import Quantizer

logger = logging.getLogger("intaglio")


class Session:
    """``model`` runs and is intercepted, ``origin`` is a model of the same tensors that is not.

    ``records``: operators that were not seen yet are recorded; else they run in float, or with ``strict`` are errors.
    """

    def __init__(self, model: nn.Module, origin: nn.Module, quantizer: Quantizer, strict: bool = False,
                 leaf_classes: tuple[type, ...] = ()) -> None:  # fmt: skip
        self.leaf_classes = leaf_classes
        self.model, self.origin, self.quantizer, self.strict = model, origin, quantizer, strict
        self.records, self.runs = True, 0
        self.chains: list[Chain] = []
        self.held = dict(_tensors_of(model))
        self.known = {id(tensor): path for path, tensor in self.held.items()}
        self.index: dict[Any, list[tuple[Chain, Event]]] = {}
        self.edges: dict[Any, list[tuple[Chain, int]]] = {}
        self.floats: set[Any] = set()
        self.warned: set[Any] = set()

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model, or the module at ``path``, on its own."""
        run, outer = Run(self, path), current.run
        current.run = run
        try:
            with torch.no_grad(), run:
                run.begin(args, kwargs)
                result = forward(*args, **kwargs)
                result = run.end(result)
                if run.at is not None:
                    run.at.leave()
                return result
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
        chain = self.add(recording)
        if chain.prepared is not None:
            chain.observe()

    def add(self, recording: Recording) -> Chain:
        chain = Chain(recording, self.origin, self.quantizer)
        if chain.refused is not None:
            logger.info("recording %d stays in float: %s", len(self.chains), chain.refused)
            self.floats.update(event.key for event in chain.events)
        else:
            self.enter(chain)
        self.chains.append(chain)
        return chain

    def enter(self, chain: Chain) -> None:
        for event in chain.events:
            self.index.setdefault(event.key, []).append((chain, event))

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

        for chain, event in sorted(candidates, key=order):
            found = Activation(self, chain, event.index)
            if found.follows(event, args, kwargs):
                if self.records and (chain, event.index) not in known:
                    self.edges.setdefault(place, []).append((chain, event.index))
                return found
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
