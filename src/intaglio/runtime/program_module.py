"""Calls of a compiled program from PyTorch: argument checks, memory, segments and islands in order, and results."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from intaglio import config
from intaglio.argument_checks import check_arguments
from intaglio.errors import INDEX_OUT_OF_RANGE, InputError
from intaglio.ir import Dim, Graph, HostCall, IslandCall, ModelInfo, Program, Schedule, Signature
from intaglio.native.native_library import shares_threads
from intaglio.runtime.artifact import Artifact
from intaglio.runtime.calls.call_plans import (
    MAX_IDLE_FRAMES,
    CallPlan,
    Frame,
    NewShapePolicy,
    SizeEvaluator,
    with_memory_errors,
)
from intaglio.runtime.calls.plan_cache import PlanCache, key_of
from intaglio.runtime.calls.segment_values import direct_calls, segments_of
from intaglio.runtime.calls.threads import ISLAND_DELAY_SECONDS
from intaglio.runtime.custom_op import in_memory_format, refuse_call, register
from intaglio.runtime.float_islands import HostOperator, run_host
from intaglio.runtime.kept_attributes import ModelWithAttributes
from intaglio.runtime.reports.clipping import ClippingMonitor, RangeCounts
from intaglio.runtime.reports.coverage import Coverage
from intaglio.runtime.reports.profile import Clock
from intaglio.runtime.saved.model_file import Example, input_tensors
from intaglio.runtime.saved.saved_libraries import Library
from intaglio.signature import (
    TORCH_DTYPES,
    bind,
    check_memory,
    check_tensors,
    count_positional_inputs,
    dims_of,
    initial_state,
    returns_tensor,
    unflatten_result,
    update_inputs,
    updated_state,
)
from intaglio.torch_private import is_in_jit_trace, is_traced, without_global_hooks

logger = logging.getLogger("intaglio")
INSTEAD_OF_TRACING = "save the model with model.save(path) and load it with intaglio.load(path), or use model.export_c"


class ProgramModule(ModelWithAttributes):
    """Runs a compiled program, its float islands and its host operators. `QuantizedModel` is the public subclass."""

    def __init__(
        self,
        artifact: Artifact,
        signature: Signature,
        graph: Graph,
        islands: Mapping[str, tuple[nn.Module, tuple[Dim, ...]]],
        coverage: Coverage,
        model_info: ModelInfo,
        example: Example | None = None,
        libraries: Mapping[str, Library] | None = None,
        recompile: Callable[[Any, Graph], Any] | None = None,
        schedules: Mapping[str, Mapping[str, Schedule]] | None = None,
        hosts: Mapping[str, HostOperator] | None = None,
        emit: Callable[[Any, str], Program] | None = None,
    ) -> None:
        """Wrap a compiled program.

        Args:
            artifact: the compiled program.
            signature: arguments and results of a call.
            graph: the integer graph that the program was compiled from, which is saved in files.
            islands: module and size arguments of every float island, by key.
            coverage: share of the model that runs in int8.
            model_info: name, notes and stage texts of the model.
            example: a call and the digest of its results.
            libraries: compiled programs for other instruction sets.
            recompile: compiles a model like this one for a graph with other weights and scales.
            schedules: schedules that a search chose, by instruction set and output value.
            hosts: records of user-defined operators, by name.
            emit: generates the program of a model for another instruction set.
        """
        super().__init__()
        self._emit, self._recompile = emit, recompile
        self.schedules, self.hosts = dict(schedules or {}), dict(hosts or {})
        self.graph, self.example, self.libraries = graph, example, dict(libraries or {})
        self.artifact, self.signature, self.coverage, self.model_info = artifact, signature, coverage, model_info
        self.islands = nn.ModuleDict({key: module for key, (module, _) in islands.items()})
        self.island_dims = {key: dims for key, (_, dims) in islands.items()}
        self._inputs, self._outputs = graph.inputs, graph.outputs
        self._byte_inputs = graph.byte_inputs()
        self._results = sum(output.value is not None for output in signature.outputs)
        program, in_bytes = artifact.program, {graph.inputs[index] for index in self._byte_inputs}
        self._index = {external.value: i for i, external in enumerate(program.externals)}
        self._written = {e.value: TORCH_DTYPES[e.dtype] for e in program.externals if e.is_output}
        self._segments = segments_of(program, graph.outputs, in_bytes)
        self.max_plans = config.max_plans()
        self._plans = PlanCache()
        self._frames: list[Frame] = []
        self._size_evaluator: SizeEvaluator | None = None
        self._fallback_model: tuple[nn.Module, ...] = ()  # in a tuple, so that it does not become a submodule
        self._planned_calls: set[Any] = set()
        self._warned_of_fallback = False
        self._clipping = ClippingMonitor()
        self._positional_inputs = count_positional_inputs(signature)
        self._model_id = register(self)
        self._returns_tensor = returns_tensor(signature)
        self._direct = direct_calls(signature, graph, self._segments, self._index, self._written)
        for index, tensor in enumerate(initial_state(signature)):
            self.register_buffer(f"state{index}", tensor)
        super().train(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program, update mutable buffers and inputs that the float model updates in place, and return the
        result."""
        if torch.compiler.is_compiling():
            if not self.has_side_effects:
                return self._traced(args, kwargs)
        elif is_traced():
            return self._traced(args, kwargs)
        leaves = args if self._is_positional_call(args, kwargs) else bind(self.signature, args, kwargs)
        if self._fallback_model and not self._is_planned(leaves):
            with torch.no_grad():
                return self._fallback_model[0](*args, **kwargs)
        plan = self._plan_for(leaves)
        if self._direct is not None:
            check_memory(self.signature, leaves)
            frame = self._idle_frame(plan)
            result = self._direct.run(leaves, plan, frame, torch.get_num_threads())
            self._keep_frame(frame, plan)
            return result
        with torch.no_grad():
            values = self._run([*leaves, *self._state()], plan, torch.get_num_threads())
            results = tuple(in_memory_format([values[name] for name in self._outputs], leaves))
            for index, value in enumerate(updated_state(self.signature, results)):
                setattr(self, f"state{index}", value)
            results = update_inputs(self.signature, leaves, results)
        if self._positional_inputs and self._returns_tensor:
            return results[0]
        return unflatten_result(self.signature, results[: self._results], plan.symbols)

    def _traced(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the call as one custom operator while `torch.compile` or `make_fx` traces it, or for fake tensors.

        Raises:
            InputError: the trace is one of torch.export or torch.jit.trace, whose graphs are saved and loaded without
                this model, or the call has effects that the operator cannot express.
        """
        problem = None
        if torch.compiler.is_exporting():
            refuse_call("the model is already quantized; torch.export cannot trace its program", INSTEAD_OF_TRACING)
        elif is_in_jit_trace():
            problem = "the model is already quantized; torch.jit.trace cannot record its program"
        elif self.has_side_effects:
            problem = "a model that updates buffers or inputs, or has a float fallback, is not one operator in a trace"
        if problem:
            raise InputError("call", None, problem, remedy=INSTEAD_OF_TRACING)
        leaves = args if self._is_positional_call(args, kwargs) else bind(self.signature, args, kwargs)
        results = torch.ops.intaglio.call([leaf.detach() for leaf in leaves], self._model_id)
        if self._positional_inputs and self._results == 1 and self.signature.out_tree.is_leaf():
            return results[0]
        symbols = dims_of(self.signature, leaves, self._byte_inputs, in_memory=False)
        return unflatten_result(self.signature, tuple(results), symbols)

    def results(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the output tensors for the input tensors of a call."""
        with torch.no_grad():
            values = self._run(leaves, self._plan_for(leaves), torch.get_num_threads())
            return in_memory_format([values[name] for name in self._outputs], leaves)

    @property
    def has_side_effects(self) -> bool:
        """Return whether a call has effects that its custom operator cannot express: in-place updates, mutable buffers
        or a float fallback."""
        return bool(self._fallback_model or self.signature.state or self.signature.updated_inputs)

    def _state(self) -> list[torch.Tensor]:
        return [getattr(self, f"state{index}") for index in range(len(self.signature.state))]

    def _is_positional_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call is just the expected number of positional tensors, for which `bind` can be skipped."""
        if kwargs or not args or len(args) != self._positional_inputs:
            return False
        return all(map(torch.is_tensor, args))

    def _plan_for(self, leaves: Sequence[torch.Tensor]) -> CallPlan:
        """Return the plan for these tensors. Their types are checked only when the combination is new."""
        if (latest := self._plans.latest_for(leaves)) is not None:
            return latest
        try:
            key = key_of(leaves)
        except RuntimeError:  # a nested tensor has no shape
            check_tensors(self.signature, leaves, self._byte_inputs)
            raise
        found = self._plans.get(key)
        if found is None:
            symbols = dims_of(self.signature, list(leaves), self._byte_inputs, in_memory=False)  # the run checks it
            found = self._new_plan(symbols)
        self._plans.keep(leaves, key, found, self.max_plans)
        return found

    @property
    def on_new_shape(self) -> str:
        """Return the policy for calls of new shapes: "plan" their memory and run in int8, or "fallback" to the float
        model."""
        return (NewShapePolicy.FALLBACK if self._fallback_model else NewShapePolicy.PLAN).value

    @check_arguments
    def fall_back_to(self, float_model: nn.Module) -> Self:
        """Run calls whose shapes were not planned with this float model, without gradients.

        The planned calls are those given to `warm`, or otherwise the first call. A call is identified by shape,
        strides, element type and device of every tensor. Inputs of a wrong element type or device are still refused.
        The model is kept by reference and is not saved in files.
        """
        self._fallback_model = (float_model,)
        return self

    def warm(self, *calls: Any) -> None:
        """Plan calls in advance and allocate memory for the largest.

        Args:
            calls: for each call its arguments (a tuple, a dictionary by name, or the only argument), or the shapes of
                its tensors: ``(1, 128)`` for one input, ``((1, 128), (1, 128))`` for two.
        """
        frame = Frame(self.artifact)
        for call in calls:
            leaves = self._leaves_of_call(call)
            plan = self._plan_for(leaves)
            plan.thread_counts(torch.get_num_threads())
            frame.apply_layout(plan.layout)
            self._planned_calls.add(_call_key(leaves))
        self._frames.append(frame)

    def _leaves_of_call(self, call: Any) -> Sequence[torch.Tensor]:
        """Return the tensors of a call. Where only shapes are given, the tensors are uninitialized."""
        inputs = self.signature.inputs
        sizes = [call] if _is_shape(call) else list(call) if isinstance(call, (tuple, list)) else []
        if sizes and all(map(_is_shape, sizes)) and len(sizes) == len(inputs):
            kinds = [TORCH_DTYPES[entry.type.dtype] for entry in inputs]
            return [torch.empty(size, dtype=kind, device="cpu") for size, kind in zip(sizes, kinds, strict=True)]
        return input_tensors(self.signature, call, self._byte_inputs)

    def _is_planned(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Return whether a call was planned. If nothing was planned yet, plan this call."""
        check_tensors(self.signature, leaves, self._byte_inputs)
        key = _call_key(leaves)
        if not self._planned_calls:
            with contextlib.suppress(InputError):
                self._plan_for(leaves)
                self._planned_calls.add(key)
        if key not in self._planned_calls and not self._warned_of_fallback:
            self._warned_of_fallback = True
            logger.warning(
                "%s: a call has a shape without a plan and runs in the float model (on_new_shape='fallback')",
                self.model_info.name,
            )
        return key in self._planned_calls

    def _new_plan(self, symbols: dict[str, int]) -> CallPlan:
        """Return the plan for these sizes of the dynamic dimensions."""
        if self._size_evaluator is None:
            self._size_evaluator = SizeEvaluator(self.artifact, self.graph, self.island_dims)
        delayed = self.coverage.has_float_layers and not shares_threads()
        return CallPlan(self._size_evaluator, symbols, ISLAND_DELAY_SECONDS * delayed)

    @with_memory_errors
    def _run(
        self,
        leaves: Sequence[torch.Tensor],
        plan: CallPlan,
        allowed: int,
        clock: Clock | None = None,
        *,
        keep: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Run all segments and islands in order.

        Args:
            leaves: the graph's input tensors, state included.
            plan: the plan of the call.
            allowed: the largest number of threads.
            clock: collects the time of steps and islands, if given.
            keep: return all external values instead of freeing each after the last segment that uses it.

        Returns:
            The results of the graph by name, or every external value.
        """
        values = dict(zip(self._inputs, leaves, strict=True))
        check_memory(self.signature, leaves)
        frame = self._idle_frame(plan)
        if frame.layout is not plan.layout:
            frame.apply_layout(plan.layout)
        frame.run.times = clock.steps if clock else None
        prepared, thread_counts = dict[str, torch.Tensor](), plan.thread_counts(allowed)
        for number, segment in enumerate(self._segments):
            for call in segment.calls:
                if isinstance(call, HostCall):
                    self._host(call, frame, plan, clock)
                else:
                    values.update(self._island_results(call, values, plan, clock))
            if not segment.calls:
                for name in segment.written:
                    if name not in values:
                        sizes, strides = plan.outputs[name]
                        values[name] = torch.empty_strided(sizes, strides, dtype=self._written[name], device="cpu")
                        frame.external[self._index[name]] = values[name].data_ptr()
                for entry in segment.read:
                    prepared[entry.value] = entry.prepared(values[entry.value])
                    frame.set_input(entry.index, prepared[entry.value])
                plan.artifact.run(frame.run, number, thread_counts[number])
                if frame.out_of_range.value:  # the frame is dropped, not reused
                    raise IndexError(INDEX_OUT_OF_RANGE)
            for name in segment.released:
                prepared.pop(name, None)
                if not keep:
                    del values[name]
        frame.run.times = None
        self._keep_frame(frame, plan)
        return values

    def _idle_frame(self, plan: CallPlan) -> Frame:
        """Return memory for one call."""
        try:
            return self._frames.pop()
        except IndexError:
            return Frame(plan.artifact)

    def _keep_frame(self, frame: Frame, plan: CallPlan) -> None:
        """Keep the memory of a call that has ended, and note the values that it clipped."""
        clipped = frame.take_clipped()
        if len(self._frames) < MAX_IDLE_FRAMES:
            self._frames.append(frame)
        if clipped:
            if plan.range_counts is None or plan.range_counts.monitor is not self._clipping:
                plan.range_counts = self.range_counts(plan.symbols)
            plan.range_counts.note(clipped)

    def range_counts(self, symbols: Mapping[str, int]) -> RangeCounts:
        """Return what notes the elements that calls of these sizes clip."""
        return RangeCounts(self._clipping, self.artifact.program, symbols)

    def _island_results(
        self, call: IslandCall, values: Mapping[str, torch.Tensor], plan: CallPlan, clock: Clock | None
    ) -> dict[str, torch.Tensor]:
        """Run a float island and return its results by name."""
        dims = plan.island_dims[call.key]
        # islands and later segments read float32
        with torch.autocast("cpu", enabled=False), without_global_hooks():
            begin = time.perf_counter_ns()
            results = self.islands[call.key](*[values[name] for name in call.inputs], *dims)
            if clock:
                clock.islands[call.key] += time.perf_counter_ns() - begin
        for name, result in zip(call.outputs, results, strict=True):
            plan.check_island_result(name, result)
        return dict(zip(call.outputs, results, strict=True))

    def _host(self, call: HostCall, frame: Frame, plan: CallPlan, clock: Clock | None) -> None:
        """Run a user-defined operator on quantized values in the arena."""
        begin, host = time.perf_counter_ns(), self.hosts[call.op.attrs["operator"]]
        run_host(call, host, self.graph, frame.arena_bytes(), plan.layout.offsets, plan.symbols)
        if clock:
            clock.islands[call.key] += time.perf_counter_ns() - begin

    def program_for(self, isa: str) -> Program:
        """Return the source text and constants of the program for an instruction set, without compiling it."""
        if isa == self.artifact.program.isa:
            return self.artifact.program
        assert self._emit is not None
        return self._emit(self, isa)

    def _timed_call(self, leaves: Sequence[torch.Tensor], plan: CallPlan, allowed: int) -> Clock:
        """Run one call and return the time of every step."""
        program = self.artifact.program
        clock = Clock(len(program.steps), [step.island for step in program.steps if step.island])
        with torch.no_grad():
            self._run([*leaves, *self._state()], plan, allowed, clock)
        return clock


def _is_shape(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(type(size) is int for size in value)


def _call_key(leaves: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return the key of a planned call: shape, strides, element type and device of every tensor."""
    return tuple([(leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves])
