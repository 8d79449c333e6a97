"""A recording and what becomes of it: captured, prepared, reference, and the parts of these that run."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from intaglio import build
from intaglio.eager.recording.events import Event, Extent, Held, RecordedTensor, fill, held, leaves
from intaglio.eager.recording.recorder import Recording
from intaglio.eager.recording.replay import example_of, replay, trimmed
from intaglio.eager.recording.torch_functions import is_factory
from intaglio.eager.recording.value_mapping import places
from intaglio.eager.segments.graph_parts import GraphPart, UnavailableError, has_integers, part_of
from intaglio.eager.segments.qtensor import QTensor
from intaglio.errors import CaptureError, UnsupportedError
from intaglio.fxgraph.node_info import known_type
from intaglio.ir import Input, Output, evaluate
from intaglio.lower import requantize
from intaglio.quant.calibrate.prepare import Prepared, prepare
from intaglio.quant.calibrate.tensor_statistics import Statistics
from intaglio.quant.qdq.convert import Reference, convert
from intaglio.quant.qdq.integer_regions import keep_regions
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.signature import settles
from intaglio.torch_private import pytree

logger = logging.getLogger("intaglio")
Made = tuple[Sequence[int], Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]]
"""The values that a part reads, and what makes the wanted ones from them."""


class Segment:
    """A straight line of operators with one set of sites; runs whole or in parts.

    ``refused``: why nothing of it can be quantized; its operators run as they are then. ``given``: parameters that a
    state dictionary brought, for a model that has counted nothing.
    """

    def __init__(self, recording: Recording, model: nn.Module, quantizer: Quantizer) -> None:
        self.recording, self.events, self.model = recording, recording.events, model
        self.quantizer = quantizer
        self.refused: str | None = None
        self.given: Parameters | None = None
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
        self._build()

    def _build(self) -> None:
        recording = self.recording
        try:
            self.captured, nodes, self.shapes = trimmed(replay(recording, self.model), recording)
            self.prepared = prepare(self.captured, self.quantizer)
        except (CaptureError, UnsupportedError) as error:
            self.refused = str(error)
            return
        given = pytree.tree_leaves(example_of(recording))
        inputs = [given[entry.leaf] for entry in self.captured.signature.inputs]
        after = self.prepared.annotations.module
        self.places = places(self.captured.module, after, nodes, inputs)

    def widen(self, misfits: Mapping[int, Collection[int]]) -> bool:
        """Builds the graph anew with these axes of inputs free; whether the model's own code allows that. What was
        observed stays."""
        inputs = {number: axes for number, axes in misfits.items() if number in self.recording.inputs}
        known = self.recording.free
        if self.prepared is None or all(set(axes) <= known.get(number, set()) for number, axes in inputs.items()):
            return False
        for number, axes in inputs.items():
            known.setdefault(number, set()).update(axes)
        before = self.prepared
        self._build()
        for name, observer in self.prepared.observers.items():
            if name in before.observers:
                observer.statistics = before.observers[name].statistics
        self.prepared.watch.batch = before.watch.batch
        for kept in (self.parts, self.programs, self.spare):
            kept.clear()
        self._sizes.clear()
        return self.refused is None

    @cached_property
    def call_leaves(self) -> list[Any] | None:
        """Leaves of the model's arguments as the recording has them."""
        return None if self.recording.call is None else pytree.tree_leaves(self.recording.call)

    @cached_property
    def call_tree(self) -> Any:
        """How the model's arguments are nested."""
        return None if self.recording.call is None else pytree.tree_structure(self.recording.call)

    @cached_property
    def constants(self) -> frozenset[str]:
        """Names of the tensors of the model that operators read."""
        specs = (leaf for event in self.events for leaf in leaves((event.args, event.kwargs)))
        modules = tuple(f"{event.path}." if event.path else "" for event in self.events if event.function is None)
        names = {path for path, _ in (*self.model.named_parameters(), *self.model.named_buffers())}
        read = {leaf.path for leaf in specs if isinstance(leaf, Held)}
        return frozenset(read | {name for name in names if name.startswith(modules)})

    @cached_property
    def folded(self) -> frozenset[int]:
        """Values that depend on no number of an input: the graph has them as constants, so that another tensor cannot
        stand for one."""
        found: set[int] = set()
        for event in self.events:
            if is_factory(event.function) or found.issuperset(event.inputs):
                found.update(event.outputs)
        return frozenset(found)

    @cached_property
    def roots(self) -> dict[int, int | str]:
        """View -> the value, or the name of the tensor the model holds, whose memory it lies in."""
        found: dict[int, int | str] = {}
        for event in self.events:
            for number, base in event.views:
                found[number] = found.get(base.index, base.index) if isinstance(base, RecordedTensor) else base.path
        return found

    @cached_property
    def kin(self) -> dict[int, tuple[int | str, ...]]:
        """Value that views share memory with -> all of that memory, the one that is no view first."""
        families: dict[int | str, tuple[int | str, ...]] = {}
        for number, root in self.roots.items():
            families[root] = (*families.get(root, (root,)), number)
        return {number: family for family in families.values() for number in family if isinstance(number, int)}

    def _last_uses(self) -> dict[int, int]:
        """Value -> index of the last operator that reads it; past the end for results."""
        found = {number: event.index for event in self.events for number in event.inputs}
        results = [leaf.index for leaf in leaves(self.recording.results[1]) if isinstance(leaf, RecordedTensor)]
        return {**found, **dict.fromkeys(results, len(self.events))}

    def misfit(self, number: int, tensor: torch.Tensor) -> tuple[int, ...]:
        """Axes along which a tensor has another size than this value was recorded with, where that is all that
        differs."""
        shape = self.shapes.get(number, ())
        if tensor.dtype is not self.recording.types[number] or tensor.dim() != len(shape):
            return ()
        fixed = enumerate(zip(shape, tensor.shape, strict=True))
        return tuple(axis for axis, (dim, size) in fixed if isinstance(dim, int) and dim != size)

    # -- sizes ---------------------------------------------------------------------------------------------------

    def fits(self, number: int, tensor: torch.Tensor, symbols: dict[str, int]) -> bool:
        """Whether a tensor can stand for this value; free sizes it settles are added to ``symbols``."""
        if tensor.dtype is not self.recording.types[number] or tensor.device.type != "cpu":
            return False
        shape = self.shapes.get(number)
        if shape is None or tensor.dim() != len(shape):
            return shape is None
        return all(settles(dim, size, symbols) for dim, size in zip(shape, tensor.shape, strict=True))

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

    def run_event(
        self, event: Event, value: Callable[[int], torch.Tensor], size: Callable[[int, int], int]
    ) -> tuple[Any, Any]:
        """One operator in float: its result as recorded, and as computed."""
        model = self.model

        def leaf(spec: Any) -> Any:
            if type(spec) is RecordedTensor:
                return value(spec.index)
            if type(spec) is Held:
                return held(model, spec.path)
            return spec.evaluate(lambda v, axis: size(v.index, axis)) if type(spec) is Extent else spec

        args, kwargs = fill(list(event.args), leaf), fill(event.kwargs, leaf)
        if event.changed is not None:
            args[0] = args[0].clone()
        called = model.get_submodule(event.path) if event.function is None else event.function
        result = called(*args, **kwargs)
        return (RecordedTensor(event.changed), args[0]) if event.changed is not None else (event.result, result)

    def converted(self, parameters: Parameters | None, model: nn.Module) -> Segment:
        """The same recording of the model, its statistics made parameters, if none are given."""
        made = self._of(model)
        if self.prepared is not None:
            if parameters is None:
                self._complete()
            made.reference = convert(self.prepared, parameters)
            made.compile_parts(dict.fromkeys((given, wanted) for given, wanted, _ in self.parts))
        return made

    def exact(self, model: nn.Module) -> Segment:
        """The same recording of the model in float: the graph that was quantized, as it was before."""
        made = self._of(model)
        made.reference = None
        if self.prepared is not None:
            made.prepared = dataclasses.replace(self.prepared, module=self.prepared.annotations.module)
        return made

    def _of(self, model: nn.Module) -> Segment:
        made = Segment.__new__(Segment)
        made.__dict__.update(self.__dict__, model=model, given=None)
        made.lock, made.parts, made.programs, made.spare = threading.Lock(), {}, {}, {}
        return made

    def _complete(self) -> None:
        """Sites that no call has reached count the tensors of the recording."""
        assert self.prepared is not None
        observers = self.prepared.observers.values()
        counted = {observer: observer.statistics for observer in observers if observer.statistics.count}
        if missing := len(observers) - len(counted):
            self.observe()
            for observer, statistics in counted.items():
                observer.statistics = statistics
            logger.info("%d sites were reached by the example inputs only", missing)

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

    def _compiled(self, part: GraphPart, reads: list[int]) -> Made:
        assert self.reference is not None
        nodes = {node.name: node for node in part.module.graph.nodes}
        (output,) = [node for node in part.module.graph.nodes if node.op == "output"]
        example: Any = (tuple(range(len(reads))), {})
        signature = dataclasses.replace(
            self.reference.signature,
            inputs=tuple(Input(name, leaf, known_type(nodes[name])) for leaf, name in enumerate(part.inputs)),
            outputs=tuple(Output(node.name) for node in output.args[0]),
            in_tree=pytree.tree_structure(example),
            out_tree=pytree.tree_structure(tuple(range(len(output.args[0])))),
            fixed={},
            written={},
            names=(),
            state=(),
            ranges={},
        )
        keep_regions(part.module.graph)
        reference = dataclasses.replace(self.reference, module=part.module, signature=signature)
        program = build.compile(requantize(reference))
        return reads, lambda tensors: program(*tensors)
