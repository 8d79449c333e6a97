"""Measurement of a quantized model beside its float model: whole calls, and operators one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from statistics import median
from typing import Any

import torch
from torch import fx, nn

from intaglio.errors import InputError, IntaglioError, did_you_mean
from intaglio.lower.facts.operator_facts import ModelFacts
from intaglio.progress import report_progress
from intaglio.quant.calibrate.batches import Call
from intaglio.reporting.operators import graph_report, steps_of
from intaglio.reporting.report_data import OperatorReport
from intaglio.runtime import QuantizedModel
from intaglio.runtime.reports.speed import MeasuredSpeed, OperatorSpeed, is_slower
from intaglio.signature import bind, clone_tensors
from intaglio.tracing import Captured, capture
from intaglio.tracing.copies.copy_model import copy_model
from intaglio.tune import first_sample
from intaglio.tune.capture_again import capture_call_again
from intaglio.tune.schedule_search import unflatten_call

TIMED_BLOCKS = 8
BLOCK_SECONDS = 0.05
"""Seconds of the calls of a block; a block has at least one timed call."""
MOST_CALLS = 200
"""Largest number of calls of a block."""
Timer = Callable[[], Mapping[str, float]]
"""Runs one call and returns microseconds by name."""
CALL = ""
"""Name of the time of a whole call."""


class Measure(StrEnum):
    """Values of the argument ``measure`` of `quantize` other than ``True`` and ``False``."""

    KEEP_FASTER = "keep_faster"
    """Leave operators in float that take longer in int8, if the model is then faster."""


def check_measure(measure: bool | str) -> None:
    """Raise `InputError` if an argument ``measure`` has a value that is not allowed."""
    if isinstance(measure, str) and measure not in tuple(Measure):
        problem = f"measure={measure!r}; allowed are True, False and 'keep_faster'"
        raise InputError("quantize", None, problem, remedy=did_you_mean(measure, Measure))


def quantize_and_measure(
    model: nn.Module, call: Call, dynamic_shapes: Any, quantize: Callable[[tuple[str, ...]], Any], measure: bool | str
) -> Any:
    """Return the quantized model with its measured times as the attribute ``measured``.

    Args:
        model: the float model.
        call: arguments of one call, of whose batch the first sample is used.
        dynamic_shapes: the dynamic dimensions with which the model was captured.
        quantize: quantizes the model and leaves these selectors in float, in addition to those of the recipe.
        measure: the argument of `quantize`.
    """
    found = quantize(())
    report_progress("measure")
    found.measured = measure_speed(model, found, call, dynamic_shapes)
    losing = tuple(dict.fromkeys(one.selector for one in found.measured.losing if one.selector))
    if measure != Measure.KEEP_FASTER or not losing:
        return found
    try:
        other = quantize(losing)
    except IntaglioError as error:
        return _noted(found, f"{', '.join(losing)} could not be left in float: {error.problem.splitlines()[0]}")
    args, kwargs = sample_call(found, call)
    copies = updates_inputs(found)
    runs = {name: whole_call(one, args, kwargs, copies=copies) for name, one in (("all", found), ("left", other))}
    times = alternate(runs)
    before, after = times["all"][CALL], times["left"][CALL]
    if not is_slower(before, after):
        took = f"a call takes {median(after):.1f} us instead of {median(before):.1f} us"
        return _noted(found, f"with {', '.join(losing)} in float {took}, so they stay in int8")
    other.measured = replace(
        measure_speed(model, other, call, dynamic_shapes), left_in_float=losing, before=tuple(before)
    )
    return other


def _noted(model: Any, limit: str) -> Any:
    model.measured = replace(model.measured, limits=(*model.measured.limits, limit))
    return model


def measure_speed(
    model: nn.Module, quantized: Any, call: Call, dynamic_shapes: Any = None, most_calls: int = MOST_CALLS
) -> MeasuredSpeed:
    """Time a quantized model and its float model in alternation, whole and by operator.

    Args:
        model: the float model. It is not changed.
        quantized: what `quantize` returned for it.
        call: arguments of one call. The first sample is used if the batch size is free.
        dynamic_shapes: the dynamic dimensions with which the model was captured (default: those of the quantized
            model).
        most_calls: largest number of calls of a block.
    """
    exact = copy_model(model).eval()
    args, kwargs = sample_call(quantized, call)
    models, copies = {"int8": quantized, "float": exact}, updates_inputs(quantized)
    runs: dict[str, Timer] = {name: whole_call(one, args, kwargs, copies=copies) for name, one in models.items()}
    operators: tuple[OperatorReport, ...] = ()
    limits: tuple[str, ...] = ()
    try:
        captured, operators = _operators(exact, quantized, call, dynamic_shapes)
        runs["int8 steps"] = _step_timer(quantized, operators, args, kwargs)
        runs["float operators"] = _operator_timer(captured, args, kwargs)
    except IntaglioError as error:
        limits = (f"operators were not timed one by one: {error.problem.splitlines()[0]}",)
    times = alternate(runs, most_calls)
    int8, float32 = tuple(times["int8"][CALL]), tuple(times["float"][CALL])
    speeds = _speeds(operators, times) if not limits else ()
    return MeasuredSpeed(torch.get_num_threads(), int8, float32, speeds, limits=limits)


def _operators(
    exact: nn.Module, quantized: Any, call: Call, dynamic_shapes: Any
) -> tuple[Captured, tuple[OperatorReport, ...]]:
    """Return the captured float model, and the operators of the program with the steps that compute them."""
    if not isinstance(quantized, QuantizedModel) or "operators" not in quantized.model_info.texts:
        problem = "Python runs between the programs of this model"
        raise InputError("quantize", None, problem)
    facts = ModelFacts.from_json(quantized.model_info.texts["operators"])
    found = graph_report("", facts, steps_of(facts, quantized)).operators
    if dynamic_shapes is None:
        return capture_call_again(exact, call, quantized), found
    return capture(exact, call[0], example_kwargs=call[1], dynamic_shapes=dynamic_shapes), found


def sample_call(quantized: Any, call: Call) -> Call:
    """Return the first sample of a call if the model is one program, and otherwise the call."""
    if not isinstance(quantized, QuantizedModel):
        return call
    signature = quantized.signature
    leaves = bind(signature, *call)
    args, kwargs = unflatten_call(signature, first_sample(signature, leaves, quantized.graph.byte_inputs()))
    return args, dict(kwargs)


# -- timers -----------------------------------------------------------------------------------------------------------


def whole_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, copies: bool) -> Timer:
    """Return a timer of whole calls.

    Args:
        model: the model.
        args: positional arguments of a call.
        kwargs: keyword arguments of a call.
        copies: whether every call gets copies of the tensors, because the model writes into them. PyTorch copies large
            tensors in several threads, which then spin and take time from the threads of the call.
    """

    def timed() -> Mapping[str, float]:
        own_args, own_kwargs = clone_tensors((args, kwargs)) if copies else (args, kwargs)
        with torch.no_grad():
            begin = time.perf_counter_ns()
            model(*own_args, **own_kwargs)
            return {CALL: (time.perf_counter_ns() - begin) / 1e3}

    return timed


def updates_inputs(quantized: Any) -> bool:
    """Return whether a call of a quantized model, and of its float model, may write into the tensors it is given."""
    return not isinstance(quantized, QuantizedModel) or bool(quantized.signature.updated_inputs)


def _step_timer(
    model: QuantizedModel, operators: Sequence[OperatorReport], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Timer:
    """Return a timer of the steps of a program, by the name of the operator that they are counted for."""

    def timed() -> Mapping[str, float]:
        with torch.no_grad():
            steps = model.step_times(*args, **kwargs)
        return {one.name: sum(steps[index] for index in one.steps) / 1e3 for one in operators if one.steps}

    return timed


class _TimedGraph(fx.Interpreter):
    """Runs a graph and notes the time of each operator, by name of the node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.times: dict[str, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; reading arguments and constants is not an operator."""
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        begin = time.perf_counter_ns()
        result = n.target(*args, **kwargs)
        self.times[n.name] = (time.perf_counter_ns() - begin) / 1e3
        return result


def _operator_timer(captured: Captured, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Timer:
    """Return a timer of the operators of the float model as PyTorch runs them one by one, by name of the node."""

    def timed() -> Mapping[str, float]:
        own_args, own_kwargs = clone_tensors((args, kwargs))
        graph = _TimedGraph(captured.module)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            graph.run(*bind(captured.signature, own_args, own_kwargs), *captured.state)
        return graph.times

    return timed


def _speeds(
    operators: Sequence[OperatorReport], times: Mapping[str, Mapping[str, Sequence[float]]]
) -> tuple[OperatorSpeed, ...]:
    """Return the times of each kernel of the program all of whose operators were timed in float."""
    nodes = {one.name: one.facts.node for one in operators}
    steps, exact = times["int8 steps"], times["float operators"]
    found = []
    for one in operators:
        members = [nodes[name] for name in (one.name, *one.fused)]
        if one.name in steps and all(node in exact for node in members):
            float32 = tuple(map(sum, zip(*(exact[node] for node in members), strict=True)))
            found.append(OperatorSpeed(one.name, one.facts.selector, tuple(steps[one.name]), float32))
    return tuple(found)


def alternate(runs: Mapping[str, Timer], most_calls: int = MOST_CALLS) -> dict[str, dict[str, list[float]]]:
    """Time the runs in alternation, and return for each the medians of its blocks of calls, by name of the time."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in runs}
    for timed in runs.values():
        timed()
    for _ in range(TIMED_BLOCKS):
        for name, timed in runs.items():
            timed()  # threads of the run before go to sleep, and its data leaves the caches
            for key, value in _block_medians(timed, most_calls).items():
                found[name].setdefault(key, []).append(value)
    return found


def _block_medians(timed: Timer, most_calls: int) -> dict[str, float]:
    """Return the medians of the calls of one block, by name of the time."""
    calls: list[Mapping[str, float]] = []
    end = time.perf_counter() + BLOCK_SECONDS
    while not calls or (time.perf_counter() < end and len(calls) < most_calls):
        calls.append(timed())
    return {key: median(call[key] for call in calls) for key in calls[0]}
