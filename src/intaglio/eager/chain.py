"""A recording and what becomes of it: captured, prepared, reference, and the parts of these that run."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intaglio import build
from intaglio.calls import _fits
from intaglio.eager.events import Event, Extent, Held, Value, fill, held, leaves
from intaglio.eager.places import places
from intaglio.eager.recorder import Recording
from intaglio.eager.replay import example_of, replay, trimmed
from intaglio.eager.slices import Part, UnavailableError, has_integers, part_of
from intaglio.eager.tensor import QTensor
from intaglio.errors import CaptureError, UnsupportedError
from intaglio.ir import Input, Output, evaluate
from intaglio.lower import requantize
from intaglio.quant import Parameters, Prepared, Quantizer, Reference, convert, prepare
from intaglio.quant.statistics import Statistics

Made = tuple[Sequence[int], Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]]
"""The values that a part reads, and what makes the wanted ones from them."""


class Chain:
    """A straight line of operators with one set of sites; runs whole or in parts.

    ``refused``: why nothing of it can be quantized; its operators run as they are then.
    """

    def __init__(self, recording: Recording, model: nn.Module, quantizer: Quantizer) -> None:
        self.recording, self.events, self.model = recording, recording.events, model
        self.refused: str | None = None
        self.prepared: Prepared | None = None
        self.reference: Reference | None = None
        self.lock = threading.Lock()
        self.parts: dict[Any, Made] = {}
        self.programs: dict[Any, Made] = {}
        """By what they read and make; parts that know more values may be the same program."""
        self._sizes: dict[Any, list[torch.Size | None]] = {}
        self.spare: dict[Any, dict[int, QTensor]] = {}
        self.last_use = self._last_uses()
        self.changed = frozenset(event.changed for event in self.events)
        try:
            self.captured, nodes, self.shapes = trimmed(replay(recording, model), recording)
            self.prepared = prepare(self.captured, quantizer)
        except (CaptureError, UnsupportedError) as error:
            self.refused = str(error)
            return
        given = pytree.tree_leaves(example_of(recording))
        inputs = [given[entry.leaf] for entry in self.captured.signature.inputs]
        after = self.prepared.annotations.module
        self.places = places(self.captured.module, after, nodes, inputs)

    @cached_property
    def call_leaves(self) -> list[Any] | None:
        """Leaves of the model's arguments as the recording has them."""
        return None if self.recording.call is None else pytree.tree_leaves(self.recording.call)

    def _last_uses(self) -> dict[int, int]:
        """Value -> index of the last operator that reads it; past the end for results."""
        found = {number: event.index for event in self.events for number in event.inputs}
        results = [leaf.index for leaf in leaves(self.recording.results[1]) if isinstance(leaf, Value)]
        return {**found, **dict.fromkeys(results, len(self.events))}

    # -- sizes ---------------------------------------------------------------------------------------------------

    def fits(self, number: int, tensor: torch.Tensor, symbols: dict[str, int]) -> bool:
        """Whether a tensor can stand for this value; free sizes it settles are added to ``symbols``."""
        if tensor.dtype is not self.recording.types[number] or tensor.device.type != "cpu":
            return False
        shape = self.shapes.get(number)
        if shape is None or tensor.dim() != len(shape):
            return shape is None
        return all(_fits(dim, size, symbols) for dim, size in zip(shape, tensor.shape, strict=True))

    def sizes(self, symbols: dict[str, int]) -> list[torch.Size | None]:
        """Size of every value; `None` where the free sizes known so far do not say."""
        key = tuple(symbols.items())
        found = self._sizes.get(key)
        if found is None:
            found = [self._size(number, symbols) for number in self.recording.types]
            if len(self._sizes) > 256:
                self._sizes.clear()
            self._sizes[key] = found
        return found

    def _size(self, number: int, symbols: dict[str, int]) -> torch.Size | None:
        try:
            return torch.Size([evaluate(dim, symbols) for dim in self.shapes[number]])
        except KeyError:
            return None

    # -- running -------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """As if nothing had been observed."""
        if self.prepared is not None:
            self.prepared.watch.batch = 0
            for observer in self.prepared.observers.values():
                observer.statistics = Statistics()

    def next_batch(self) -> None:
        if self.prepared is not None:
            self.prepared.watch.batch += self.prepared.watch.stride

    def observe(self) -> None:
        """Count the tensors of the recording itself."""
        assert self.prepared is not None
        args, kwargs = example_of(self.recording)
        batch = self.prepared.watch.batch
        self.prepared(*args, **kwargs)
        self.prepared.watch.batch = batch

    def run_event(self, event: Event, value: Callable[[int], torch.Tensor]) -> tuple[Any, Any]:
        """One operator in float: its result as recorded, and as computed."""
        model = self.model

        def leaf(spec: Any) -> Any:
            if type(spec) is Value:
                return value(spec.index)
            if type(spec) is Held:
                return held(model, spec.path)
            return spec.evaluate(lambda v, axis: value(v.index).shape[axis]) if type(spec) is Extent else spec

        args, kwargs = fill(list(event.args), leaf), fill(event.kwargs, leaf)
        if event.changed is not None:
            args[0] = args[0].clone()
        called = model.get_submodule(event.path) if event.function is None else event.function
        result = called(*args, **kwargs)
        return (Value(event.changed), args[0]) if event.changed is not None else (event.result, result)

    def converted(self, parameters: Parameters | None = None) -> Chain:
        """The same recording, its statistics made parameters."""
        made = Chain.__new__(Chain)
        made.__dict__.update(self.__dict__)
        made.lock, made.parts, made.programs, made.spare = threading.Lock(), {}, {}, {}
        if self.prepared is not None:
            made.reference = convert(self.prepared, parameters)
            made.compile_parts(dict.fromkeys((given, wanted) for given, wanted, _ in self.parts))
        return made

    def compile_parts(self, asked: Iterable[tuple[frozenset[int], tuple[int, ...]]]) -> None:
        """Ahead of the first call: those that calls of the prepared model used."""
        for given, wanted in asked:
            with contextlib.suppress(UnavailableError):
                self.part(given, wanted, frozenset())

    def part(self, given: frozenset[int], wanted: tuple[int, ...], counted: frozenset[int]) -> Made:
        """What makes some values from others: the values it reads, and a function. Raises `UnavailableError`.

        ``counted``: those that observers have counted already, which is nothing to a reference model.
        """
        key = (given, wanted, counted if self.reference is None else frozenset())
        found = self.parts.get(key)
        if found is None:
            with self.lock:
                found = self.parts.get(key)
                if found is None:
                    found = self.parts[key] = self._made(given, wanted, counted)
        return found

    def _made(self, given: frozenset[int], wanted: tuple[int, ...], counted: frozenset[int]) -> Made:
        if self.prepared is None or any(number not in self.places for number in wanted):
            raise UnavailableError
        names = {self.places[number]: number for number in sorted(given) if number in self.places}
        ends = [self.places[number] for number in wanted]
        seen = {self.places[number] for number in counted if number in self.places}
        part = part_of((self.reference or self.prepared).module, list(names), ends, seen)
        reads = [names[name] for name in part.inputs]
        if self.reference is None or not has_integers(part.module):
            return reads, lambda tensors: part.module(*tensors)
        key = (tuple(reads), wanted)
        if key not in self.programs:
            self.programs[key] = self._compiled(part, reads)
        return self.programs[key]

    def _compiled(self, part: Part, reads: list[int]) -> Made:
        assert self.reference is not None
        nodes = {node.name: node for node in part.module.graph.nodes}
        (output,) = [node for node in part.module.graph.nodes if node.op == "output"]
        example: Any = (tuple(range(len(reads))), {})
        signature = dataclasses.replace(
            self.reference.signature,
            inputs=tuple(Input(name, leaf, nodes[name].meta["type"]) for leaf, name in enumerate(part.inputs)),
            outputs=tuple(Output(node.name) for node in output.args[0]),
            in_tree=pytree.tree_structure(example),
            out_tree=pytree.tree_structure(tuple(range(len(output.args[0])))),
            fixed={}, written={}, names=(), state=(), ranges={},
        )  # fmt: skip
        reference = dataclasses.replace(self.reference, module=part.module, signature=signature)
        program = build.compile(requantize(reference))
        return reads, lambda tensors: program(*tensors)
