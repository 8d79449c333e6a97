"""`QuantizedModel`: the int8 program as a module with the float model's signature."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from intaglio.argument_checks import check_arguments
from intaglio.errors import ArtifactError, BuildError, InputError, IntaglioError, did_you_mean
from intaglio.formatting.html_text import element
from intaglio.formatting.number_text import size_text
from intaglio.native.peak_throughput import int8_rates
from intaglio.runtime.calls.plan_cache import PlanCache
from intaglio.runtime.custom_op import register
from intaglio.runtime.export_c import export_c
from intaglio.runtime.program_module import INSTEAD_OF_TRACING
from intaglio.runtime.reports.clipping import Clipping, ClippingMonitor
from intaglio.runtime.reports.profile import Profile, calls_problem, profile_of
from intaglio.runtime.saved import state_dict_io
from intaglio.runtime.saved.savable_model import SavableModel
from intaglio.signature import bind, initial_state

PROBE_SECONDS = 0.002
"""Seconds per repeat of the measurement of peak int8 throughput."""

CPU_FLOAT32_REMEDY = "keep the int8 model on the CPU and in its data types, and convert its inputs and results instead"


class QuantizedModel(SavableModel):
    """Runs an int8 program and is called like the float model.

    It uses at most as many threads as ``torch.set_num_threads`` allows, and fewer if more would not help. Several
    Python threads may call it at once; they share the cores. It has no gradients and no training mode.

    Buffers that the float model changes while it runs are buffers of this model (``state0``, ...). They start with
    their values at capture, and each call updates them, so calls of such a model must be sequential. With
    ``int8_buffers`` of the `Quantizer` they are quantized to uint8.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.share_clipping(self._clipping)

    # -- public methods ------------------------------------------------------------------------------------------

    @check_arguments
    def text(self, stage: str) -> str:
        """Return the text of a stage.

        Args:
            stage: "captured", "sites", "reference", "integer", "plan" or "program" for the result of a stage;
                "quantizer" for the recipe, "parameters" for the quantization parameters of activations,
                "operators" for what was decided about every operator, as JSON, or "corrections" for what corrections
                gained.

        Raises:
            InputError: the model has no such text; the error lists those it has.
        """
        texts = self.model_info.texts
        stages = dict.fromkeys((*texts, "corrections"))
        if stage not in stages:
            problem = f"{stage!r} is not a stage; allowed are {', '.join(stages)}"
            raise InputError("text", None, problem, remedy=did_you_mean(stage, stages))
        return texts.get(stage, "no corrections\n")

    @check_arguments
    def profile(self, *args: Any, calls: int = 20, **kwargs: Any) -> Profile:
        """Measure every step of the program and every float island.

        The times are medians over ``calls`` timed calls, which alternate with as many ordinary calls after a warm-up
        call. In timed calls all threads wait for each other after each step, so the sum of the steps is a little more
        than an ordinary call takes. The peak throughput is measured before and after.

        Args:
            args: positional arguments of the call.
            calls: number of timed calls, at most 100,000.
            kwargs: keyword arguments of the call.

        Returns:
            The steps with their kernels and share of the peak throughput, and the overhead of a call.

        Raises:
            InputError: ``calls`` is less than 1 or more than 100,000.
        """
        if (problem := calls_problem(calls, 1)) is not None:
            raise InputError("profile", None, problem, remedy="leave calls out")
        if self.signature.updated_inputs:  # a call updates its inputs in place; profiling must not
            args, kwargs = copy.deepcopy((args, kwargs))
        leaves = args if self._is_positional_call(args, kwargs) else bind(self.signature, args, kwargs)
        self(*args, **kwargs)
        plan, allowed, program = self._plan_for(leaves), torch.get_num_threads(), self.artifact.program
        used = max(plan.thread_counts(allowed), default=1)
        before = _int8_rates(program.isa, used)
        clocks, call_times = [], []
        for _ in range(calls):
            begin = time.perf_counter_ns()
            self(*args, **kwargs)
            call_times.append(time.perf_counter_ns() - begin)
            clocks.append(self._timed_call(leaves, plan, allowed))
        rates = max(before, _int8_rates(program.isa, used), key=sum)
        return profile_of(program, plan.symbols, clocks, call_times, used, rates)

    def step_times(self, *args: Any, **kwargs: Any) -> list[int]:
        """Return the nanoseconds of every step of one call in execution order. The schedule search uses it."""
        if self.signature.updated_inputs:  # a call updates its inputs in place; timing must not
            args, kwargs = copy.deepcopy((args, kwargs))
        leaves = args if self._is_positional_call(args, kwargs) else bind(self.signature, args, kwargs)
        return self._timed_call(leaves, self._plan_for(leaves), torch.get_num_threads()).step_times(
            self.artifact.program
        )

    @property
    def clipping(self) -> Clipping:
        """Return which float values calls have had outside of their calibrated ranges.

        Float values are inputs, results of float islands and values that the program computes in float. Their elements
        are counted when they are quantized: those that the nearest quantized value does not represent, except masks
        (values of -9984 or less that are far below the range). Values inside of chains of integer operators saturate
        too, which is not counted: ReLU is such a bound. Steps that compute floats from quantized values only are not
        counted either.
        """
        return self._clipping.report()

    @property
    def on_clipping(self) -> str:
        """Return the policy for calls with more than 5 % of a float value outside of its calibrated range: "warn" (the
        default, once for each value), "error" or "ignore".

        Values of few elements need a larger share, so that chance alone does not warn. Files do not keep the policy.
        """
        return self._clipping.policy.value

    @on_clipping.setter
    def on_clipping(self, policy: str) -> None:
        self._clipping.set_policy(policy)

    @check_arguments
    def share_clipping(self, monitor: ClippingMonitor) -> None:
        """Count into the report of several models, which has one policy, from now on."""
        self._clipping = monitor
        for loop in self.loops.values():
            loop.body.share_clipping(monitor)

    def reset(self) -> None:
        """Reset mutable buffers to the values that they had when the float model was captured."""
        for index, tensor in enumerate(initial_state(self.signature)):
            setattr(self, f"state{index}", tensor)

    @check_arguments
    def assert_int8(self, macs: float = 1.0) -> None:
        """Raise `AssertionError`, with the reasons, if less than this share of multiply-accumulates runs in int8."""
        self.coverage.assert_int8(macs)

    @check_arguments
    def export_c(self, folder: str | Path, *, isa: str | Sequence[str] | None = None) -> None:
        """Write the program as C sources that build and run without Python, with bit-identical results.

        The folder gets sources, a header, weights, a CMake file, a small main program and a README (docs/deploying.md,
        "Without Python"). Files of the same names are replaced.

        Args:
            folder: the folder, which is created if it does not exist.
            isa: one or several instruction sets (default: the one of this model). The exported program uses the best
                one that the processor supports.

        Raises:
            UnsupportedError: parts of the model run in Python.
            BuildError: an instruction set does not exist.
            ArtifactError: the folder cannot be written.
        """
        export_c(self, folder, (isa,) if isinstance(isa, str) else isa)

    # -- overridden methods of nn.Module -------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Store the integer graph with its weights and scales, independently of the instruction set they are packed
        for."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + key: tensor for key, tensor in state_dict_io.tensors_of(self.graph).items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load weights and scales of a model with the same operators. Its program is compiled unless the cache has it.

        No other thread may be calling the model.

        Raises:
            ArtifactError: the state belongs to another model. This model is then unchanged.
        """
        start = prefix + state_dict_io.GRAPH
        own = {key.removeprefix(prefix): state_dict[key] for key in state_dict if f"{key}.".startswith(f"{start}.")}
        rest = {key: value for key, value in state_dict.items() if key.removeprefix(prefix) not in own}
        if own:
            self._load_graph(own)
        else:
            missing_keys.append(start)
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _load_graph(self, tensors: Mapping[str, Any]) -> None:
        """Replace weights and scales by those of a state dictionary, and compile the program for them if they
        differ."""
        graph = state_dict_io.graph_of(tensors, self.graph)
        here, there = state_dict_io.tensors_of(self.graph), state_dict_io.tensors_of(graph)
        if all(torch.equal(here[key], there[key]) for key in here):
            return
        assert self._recompile is not None
        try:
            made = self._recompile(self, graph)
        except IntaglioError:
            raise
        except Exception as error:  # a graph can be invalid in ways that checks do not find
            problem = f"its graph cannot be compiled: {type(error).__name__}: {error}"
            raise ArtifactError("load_state_dict", None, problem, remedy=state_dict_io.LOAD_SAME_MODEL) from error
        self.graph, self.artifact, self.libraries, self.signature = graph, made.artifact, made.libraries, made.signature
        self.model_info, self.coverage, self.example, self._plans = made.model_info, made.coverage, None, PlanCache()
        self._frames, self._size_evaluator = [], None
        self._clipping.forget()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedModel:
        """Apply `to`, `cuda`, `half` and similar methods. Raise `InputError` if tensors would leave the CPU or
        float32."""
        try:
            moved = fn(torch.zeros(1, device="cpu"))
        except (RuntimeError, AssertionError) as error:
            raise InputError("to", None, str(error), remedy=CPU_FLOAT32_REMEDY) from error
        if moved.device.type != "cpu":
            raise InputError(
                "to",
                None,
                f"an int8 model runs on the CPU and cannot be moved to device {moved.device}",
                remedy=CPU_FLOAT32_REMEDY,
            )
        if moved.dtype is not torch.float32:
            raise InputError(
                "to",
                None,
                f"the float parts of an int8 model are float32 and cannot be converted to {moved.dtype}",
                remedy=CPU_FLOAT32_REMEDY,
            )
        super()._apply(fn, recurse)
        return self

    def __prepare_scriptable__(self) -> Any:
        """Raise `InputError`: `torch.jit.script`, which calls this method, compiles no native program."""
        problem = "the model is already quantized; torch.jit.script cannot compile its program"
        raise InputError("torch.jit.script", None, problem, remedy=INSTEAD_OF_TRACING)

    def train(self, mode: bool = True) -> QuantizedModel:
        """Warn that an int8 program cannot be trained, and change nothing."""
        if mode:
            warnings.warn("an int8 model cannot be trained; train() does not change it", stacklevel=2)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without plans and arenas."""
        return {
            **self.__dict__,
            "_plans": PlanCache(),
            "_frames": [],
            "_size_evaluator": None,
            "_planned_calls": set(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._model_id = register(self)

    def __repr__(self) -> str:
        share, count, hosts = self.coverage, self.coverage.islands, len(self.coverage.hosts)
        callbacks = f"{hosts} host operator{'s' * (hosts != 1)}, " if hosts else ""
        others = f" (compiled for {', '.join(self.libraries)} too)" if self.libraries else ""
        operators = f"{share.operators_int8} of {share.operators_total} operators"
        work = f"{100 * share.macs:.1f} % of MACs" if share.macs_total else operators
        sizes = f"{size_text(share.bytes_before)} -> {size_text(share.bytes_after)}"
        return (
            f"QuantizedModel({self.model_info.name}: {work} in int8, {count} float island{'s' * (count != 1)}, "
            f"{callbacks}{sizes}, {self.artifact.program.isa}{others})"
        )

    def _repr_html_(self) -> str:
        """Return sizes and coverage for notebooks."""
        return element("p", repr(self)) + self.coverage._repr_html_()


def _int8_rates(isa: str, threads: int) -> list[float]:
    """Return the peak multiply-accumulates per second of each thread, or nothing if the measuring program cannot be
    built."""
    try:
        return int8_rates(isa, threads, PROBE_SECONDS)
    except BuildError:
        return []
