"""`Segment`: a recording with its captured, prepared and reference graphs, and the compiled parts of these."""

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
from intaglio.eager.recording.events import (
    Event,
    ModelTensor,
    RecordedTensor,
    SizeExpression,
    fill,
    leaves,
    model_tensor,
)
from intaglio.eager.recording.recorder import Recording
from intaglio.eager.recording.replay import example_of, replay, without_recorded_outputs
from intaglio.eager.recording.tensor_changes import model_tensors
from intaglio.eager.recording.torch_functions import is_factory
from intaglio.eager.recording.value_mapping import map_values
from intaglio.eager.segments.graph_parts import GraphPart, UnavailableError, extract_part, has_integers
from intaglio.eager.segments.qtensor import QTensor
from intaglio.errors import CaptureError, IntaglioError, UnsupportedError
from intaglio.fxgraph.node_info import known_type
from intaglio.fxgraph.passes.element_types.half_precision import UPCAST_NOTE
from intaglio.ir import Input, Output, evaluate
from intaglio.lower import requantize
from intaglio.quant.calibrate.prepare import Prepared, prepare, with_selectors_of
from intaglio.quant.calibrate.tensor_statistics import Statistics
from intaglio.quant.qdq.convert import Reference, convert
from intaglio.quant.qdq.integer_regions import keep_regions
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.runtime.reports.clipping import ClippingMonitor
from intaglio.signature import TORCH_DTYPES, match_size
from intaglio.signature.tensor_checks import unsupported_reason
from intaglio.torch_private import pytree

logger = logging.getLogger("intaglio")
Computation = tuple[Sequence[int], Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]]
"""Numbers of the values that a part reads, and the function that computes the wanted values from them."""


class Segment:
    """A straight-line sequence of operators with one set of sites, which runs as a whole or in parts.

    Attributes:
        refused: Reason why it cannot be quantized, or None. Its operators then run unchanged.
        error: Error that gave this reason, or None.
        given: Parameters loaded from a state dictionary, for a model without statistics.
        reference: Quantized graph, once converted.
        parts: Computations by given and wanted values.
        programs: Compiled computations by what they read and compute; several parts can share one.
        clipping: Counts of clipped elements in all programs of the model.
        spare: Tensors for reuse by the next call, by value number for each assignment of dynamic sizes.
    """

    def __init__(self, recording: Recording, model: nn.Module, quantizer: Quantizer) -> None:
        self.recording, self.events, self.model = recording, recording.events, model
        self.quantizer = quantizer
        self.refused: str | None = None
        self.error: IntaglioError | None = None
        self.given: Parameters | None = None
        self.prepared: Prepared | None = None
        self.reference: Reference | None = None
        self.lock = threading.Lock()
        self.parts: dict[Any, Computation] = {}
        self.programs: dict[Any, Computation] = {}
        """Parts with different given values can share one program."""
        self.clipping = ClippingMonitor()
        self._sizes: dict[Any, list[torch.Size | None]] = {}
        self.reusable: dict[Any, dict[int, QTensor]] = {}
        self.last_reads = self._find_last_reads()
        self.changed = frozenset(event.changed for event in self.events)
        self._build()

    def _build(self) -> None:
        recording = self.recording
        try:
            self.captured, nodes, self.shapes = without_recorded_outputs(replay(recording, self.model), recording)
            self.prepared = prepare(self.captured, with_selectors_of(self.quantizer, self.captured))
        except (CaptureError, UnsupportedError) as error:
            self.refused, self.error = str(error), error
            return
        given = pytree.tree_leaves(example_of(recording))
        inputs = [given[entry.leaf] for entry in self.captured.signature.inputs]
        after = self.prepared.annotations.module
        self.node_names = map_values(self.captured.module, after, nodes, inputs)

    def make_dynamic(self, free_axes: Mapping[int, Collection[int]]) -> bool:
        """Rebuild the graph with these axes of inputs dynamic, and keep the statistics.

        Return False if nothing changes or the model's code does not allow it.
        """
        inputs = {number: axes for number, axes in free_axes.items() if number in self.recording.inputs}
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
        self.prepared.observer_state.batch = before.observer_state.batch
        for kept in (self.parts, self.programs, self.reusable):
            kept.clear()
        self._sizes.clear()
        return self.refused is None

    @property
    def computes(self) -> bool:
        """Return whether the results depend on any operator; False for a model whose result is a constant."""
        nodes = () if isinstance(self.error, CaptureError) else self.captured.module.graph.nodes
        return not nodes or any(node.op == "call_function" for node in nodes)

    @cached_property
    def argument_leaves(self) -> list[Any] | None:
        """Return the recorded leaves of the model's arguments, or None if the recording begins inside the model."""
        return None if self.recording.call is None else pytree.tree_leaves(self.recording.call)

    @cached_property
    def argument_tree(self) -> Any:
        """Return the recorded pytree structure of the model's arguments, or None."""
        return None if self.recording.call is None else pytree.tree_structure(self.recording.call)

    @cached_property
    def constants(self) -> frozenset[str]:
        """Return the names of the model's tensors that the operators read."""
        specs = (leaf for event in self.events for leaf in leaves((event.args, event.kwargs)))
        return self.constants_inside | {leaf.path for leaf in specs if isinstance(leaf, ModelTensor)}

    @cached_property
    def constants_inside(self) -> frozenset[str]:
        """Return the names of the tensors of leaf modules, which recorded operands do not mention."""
        modules = tuple(f"{event.path}." if event.path else "" for event in self.events if event.function is None)
        return frozenset(name for name in model_tensors(self.model) if name.startswith(modules))

    @cached_property
    def constant_values(self) -> frozenset[int]:
        """Return the values that do not depend on the contents of inputs.

        The graph holds them as constants, so that no other tensor may replace one.
        """
        found: set[int] = set()
        for event in self.events:
            if is_factory(event.function) or found.issuperset(event.inputs):
                found.update(event.outputs)
        return frozenset(found)

    @cached_property
    def view_bases(self) -> dict[int, int | str]:
        """Return, for each view, the value number or the name of the model's tensor that owns its memory."""
        found: dict[int, int | str] = {}
        for event in self.events:
            for number, base in event.views:
                found[number] = found.get(base.index, base.index) if isinstance(base, RecordedTensor) else base.path
        return found

    @cached_property
    def memory_groups(self) -> dict[int, tuple[int | str, ...]]:
        """Return, for each value that shares memory with views, all values of that memory, with the root first."""
        families: dict[int | str, tuple[int | str, ...]] = {}
        for number, root in self.view_bases.items():
            families[root] = (*families.get(root, (root,)), number)
        return {number: family for family in families.values() for number in family if isinstance(number, int)}

    def _find_last_reads(self) -> dict[int, int]:
        """Return the index of the last operator that reads each value; the number of operators for results."""
        found = {number: event.index for event in self.events for number in event.inputs}
        results = [leaf.index for leaf in leaves(self.recording.results[1]) if isinstance(leaf, RecordedTensor)]
        return {**found, **dict.fromkeys(results, len(self.events))}

    def size_mismatch(self, number: int, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the axes along which a tensor differs in size from the recorded value, if nothing else differs."""
        shape = self.shapes.get(number, ())
        if tensor.dtype is not self.recording.types[number] or tensor.dim() != len(shape):
            return ()
        fixed = enumerate(zip(shape, tensor.shape, strict=True))
        return tuple(axis for axis, (dim, size) in fixed if isinstance(dim, int) and dim != size)

    # -- sizes ----------------------------------------------------------------------------------------------------

    def accepts(self, number: int, tensor: torch.Tensor, symbols: dict[str, int]) -> bool:
        """Return whether a tensor can replace this value, and add the dynamic sizes it determines to `symbols`."""
        if tensor.dtype is not self.recording.types[number] or unsupported_reason(tensor) is not None:
            return False
        shape = self.shapes.get(number)
        if shape is None or tensor.dim() != len(shape):
            return shape is None
        return all(match_size(dim, size, symbols) for dim, size in zip(shape, tensor.shape, strict=True))

    def sizes(self, symbols: dict[str, int]) -> list[torch.Size | None]:
        """Return the shape of each value, or None where the dynamic sizes known so far do not determine it."""
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

    # -- running --------------------------------------------------------------------------------------------------

    def clear_statistics(self) -> None:
        """Discard all statistics."""
        if self.prepared is not None:
            self.prepared.observer_state.batch = 0
            for observer in self.prepared.observers.values():
                observer.statistics = Statistics()

    def next_batch(self) -> None:
        """Count the tensors observed from now on to the next batch."""
        if self.prepared is not None:
            self.prepared.observer_state.batch += self.prepared.observer_state.stride

    def observe(self) -> None:
        """Collect statistics of the recorded tensors."""
        assert self.prepared is not None
        args, kwargs = example_of(self.recording)
        batch = self.prepared.observer_state.batch
        self.prepared(*args, **kwargs)
        self.prepared.observer_state.batch = batch

    def run_event(
        self, event: Event, value: Callable[[int], torch.Tensor], size: Callable[[int, int], int]
    ) -> tuple[Any, Any]:
        """Run one operator in float.

        Args:
            event: Operator to run. An in-place operator runs on a copy of its target.
            value: Function that returns the tensor of a value number.
            size: Function that returns the size of an axis of a value.

        Returns:
            The result as recorded, with value numbers, and the computed result.
        """
        model = self.model

        def leaf(spec: Any) -> Any:
            if type(spec) is RecordedTensor:
                return value(spec.index)
            if type(spec) is ModelTensor:
                return model_tensor(model, spec.path)
            return spec.evaluate(lambda v, axis: size(v.index, axis)) if type(spec) is SizeExpression else spec

        args, kwargs = fill(list(event.args), leaf), fill(event.kwargs, leaf)
        if event.changed is not None:
            args[0] = args[0].clone()
        result = _called(event, model)(*args, **kwargs)
        return (RecordedTensor(event.changed), args[0]) if event.changed is not None else (event.result, result)

    def converted(self, parameters: Parameters | None, model: nn.Module, clipping: ClippingMonitor) -> Segment:
        """Return the quantized segment for `model`, with the given parameters or those chosen from the statistics."""
        made = self._for_model(model)
        made.clipping = clipping
        if self.prepared is not None:
            if parameters is None:
                self._observe_unreached()
            made.reference = convert(self.prepared, parameters)
            made.compile_parts(dict.fromkeys((given, wanted) for given, wanted, _ in self.parts))
        return made

    def with_float_graph(self, model: nn.Module) -> Segment:
        """Return the segment for `model` with the float graph that was quantized."""
        made = self._for_model(model)
        made.reference = None
        if self.prepared is not None:
            made.prepared = dataclasses.replace(self.prepared, module=self.prepared.annotations.module)
        return made

    def _for_model(self, model: nn.Module) -> Segment:
        made = Segment.__new__(Segment)
        made.__dict__.update(self.__dict__, model=model, given=None)
        made.lock, made.parts, made.programs, made.reusable = threading.Lock(), {}, {}, {}
        return made

    def _observe_unreached(self) -> None:
        """Collect statistics of the recorded tensors for sites that calibration calls have not reached."""
        assert self.prepared is not None
        observers = self.prepared.observers.values()
        counted = {observer: observer.statistics for observer in observers if observer.statistics.count}
        if missing := len(observers) - len(counted):
            self.observe()
            for observer, statistics in counted.items():
                observer.statistics = statistics
            logger.info("%d sites got values from the example inputs only", missing)

    def compile_parts(self, requested: Iterable[tuple[frozenset[int], tuple[int, ...]]]) -> None:
        """Compile the parts that calls of the prepared model used, ahead of the first call."""
        for given, wanted in requested:
            with contextlib.suppress(UnavailableError):
                self.computation(given, wanted, frozenset())

    def computation(self, given: frozenset[int], wanted: tuple[int, ...], counted: frozenset[int]) -> Computation:
        """Return the computation of `wanted` from `given`: the values that it reads, and a function.

        Args:
            given: Values that are known.
            wanted: Values to compute.
            counted: Values that observers have already counted. A reference model ignores it.

        Raises:
            UnavailableError: The graph does not hold a wanted value, or cannot compute it from the given ones.
        """
        key = (given, wanted, counted if self.reference is None else frozenset())
        found = self.parts.get(key)
        if found is None:
            with self.lock:
                found = self.parts.get(key)
                if found is None:
                    found = self.parts[key] = self._new_computation(given, wanted, counted)
        return found

    def _new_computation(self, given: frozenset[int], wanted: tuple[int, ...], counted: frozenset[int]) -> Computation:
        if self.prepared is None or any(number not in self.node_names for number in wanted):
            raise UnavailableError
        names = {self.node_names[number]: number for number in sorted(given) if number in self.node_names}
        ends = [self.node_names[number] for number in wanted]
        seen = {self.node_names[number] for number in counted if number in self.node_names}
        part = extract_part((self.reference or self.prepared).module, list(names), ends, seen)
        reads = [names[name] for name in part.inputs]
        if self.reference is None or not has_integers(part.module):
            return self._in_recorded_types(part, wanted, (reads, lambda tensors: part.module(*tensors)))
        key = (tuple(reads), wanted)
        if key not in self.programs:
            self.programs[key] = self._in_recorded_types(part, wanted, self._compiled(part, reads))
        return self.programs[key]

    def _in_recorded_types(self, part: GraphPart, wanted: tuple[int, ...], computation: Computation) -> Computation:
        """Add casts to a computation, whose graph has float32 values where the model has half precision."""
        if UPCAST_NOTE not in self.captured.notes:
            return computation
        reads, run = computation
        given = [TORCH_DTYPES[known_type(node).dtype] for node in part.module.graph.nodes if node.op == "placeholder"]
        types = [self.recording.types[number] for number in wanted]

        def cast(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            results = run([tensor.to(dtype) for tensor, dtype in zip(tensors, given, strict=True)])
            return [tensor.to(dtype) for tensor, dtype in zip(results, types, strict=True)]

        return reads, cast

    def _compiled(self, part: GraphPart, reads: list[int]) -> Computation:
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
            updated_inputs={},
            names=(),
            state=(),
            ranges={},
        )
        keep_regions(part.module.graph)
        reference = dataclasses.replace(self.reference, module=part.module, signature=signature)
        program = build.compile(requantize(reference))
        program.share_clipping(self.clipping)
        return reads, lambda tensors: program(*tensors)


def _called(event: Event, model: nn.Module) -> Callable[..., Any]:
    """Return the function of an operator, or the forward of its leaf module. Hooks of a module are operators of their
    own."""
    if event.function is not None:
        return event.function
    module = model.get_submodule(event.path)
    bound: Callable[..., Any] = type(module).forward.__get__(module)
    return bound
