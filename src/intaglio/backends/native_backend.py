"""The native backend: one C++ program for the whole network, compiled on this machine and run by a `QuantizedModel`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from intaglio import build
from intaglio.argument_checks import check_fields
from intaglio.backends.protocol import integer_graph
from intaglio.build.planned import Planned
from intaglio.errors import InputError, did_you_mean
from intaglio.ir import Schedule
from intaglio.lower import Lowered
from intaglio.progress import report_progress
from intaglio.quant.qdq.convert import Reference
from intaglio.runtime import QuantizedModel, copied_inputs
from intaglio.runtime.calls.call_plans import NewShapePolicy
from intaglio.signature import bind
from intaglio.tune import first_sample, random_sample, search

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


@check_fields
@dataclass(frozen=True)
class CompileOptions:
    """Options of the native backend.

    Args:
        isa: instruction sets to build for, out of "amx_int8", "avx512vnni", "avxvnni", "avx2" and "portable" (default:
            the best one of this machine). The model runs the best of them that this machine supports,
            `QuantizedModel.save` stores all of them, and ``load(path, trust=True)`` selects one.
        tune: whether to measure schedules (tiles and division of work) and use the fastest, for the current number of
            threads of PyTorch. The search takes some seconds, once for every kind of layer, and its results are stored
            on disk. ``True`` measures with a batch of one. To measure with other inputs, give the arguments of a
            typical call as a tuple, a dictionary by name, or the only argument. The model's results do not depend on
            it.
        on_new_shape: policy for calls whose shapes were not planned by `QuantizedModel.warm` or else by the first call:
            "plan" memory for them, which takes microseconds, or "fallback" to the float model, to which the int8 model
            then keeps a reference.
        float_model: the model to fall back to. `intaglio.quantize` sets it.

    Raises:
        InputError: ``on_new_shape`` is not one of the two policies.
    """

    isa: str | Iterable[str] | None = None
    tune: Any = False
    on_new_shape: str = NewShapePolicy.PLAN.value
    float_model: nn.Module | None = None

    def __post_init__(self) -> None:
        if self.on_new_shape not in tuple(NewShapePolicy):
            allowed = " and ".join(repr(str(policy)) for policy in NewShapePolicy)
            problem = f"{self.on_new_shape!r} is not a policy; allowed are {allowed}"
            raise InputError("on_new_shape", None, problem, remedy=did_you_mean(self.on_new_shape, NewShapePolicy))
        if self.isa is not None and not isinstance(self.isa, str):
            object.__setattr__(self, "isa", tuple(self.isa))


class NativeBackend:
    """Compiles the integer graph. It supports every operator, because those without a kernel run in PyTorch as float
    islands."""

    name = "native"
    Options = CompileOptions
    remedy = ""

    def supports(self, op: fx.Node) -> str | None:
        """Return ``None``, because what the program cannot compute runs in PyTorch, in float islands."""
        return None

    def compile(self, stage: Reference | Lowered | Planned, options: CompileOptions) -> QuantizedModel:
        """Return the compiled model. Raise `BuildError` if this machine supports none of the instruction sets."""
        if isinstance(stage, Planned):
            return _with_fallback(compile_plan(stage, options), options)
        return compile_native(integer_graph(stage), options)


def compile_plan(planned: Planned, options: CompileOptions) -> QuantizedModel:
    """Compile a plan unchanged.

    Raises:
        InputError: the options request instruction sets or schedules, which the plan already has.
    """
    for name, asked in (("isa", options.isa is not None), ("tune", options.tune is not False)):
        if asked:
            problem = f"it cannot be set, because the plan already has an instruction set ({planned.isa}) and schedules"
            raise InputError(
                name,
                None,
                problem,
                remedy="pass isa to plan(lowered, isa=...), or compile the integer graph with compile(lowered, ...)",
            )
    _check_fallback(options)
    return build.compile_planned(planned)


def compile_native(lowered: Lowered, options: CompileOptions, example: Arguments | None = None) -> QuantizedModel:
    """Compile an integer graph.

    Args:
        lowered: the integer graph.
        options: options of the native backend.
        example: arguments of a call. With ``tune=True`` the search measures with the first sample of its batch.

    Raises:
        BuildError: this machine supports none of the instruction sets.
        InputError: ``on_new_shape="fallback"`` without a float model.
    """
    _check_fallback(options)
    report_progress("compile")
    quantized = build.compile(lowered, isa=options.isa, schedules=searched_schedules(lowered, options, example))
    return _with_fallback(quantized, options)


def _check_fallback(options: CompileOptions) -> None:
    if options.on_new_shape == NewShapePolicy.FALLBACK and options.float_model is None:
        raise InputError(
            "on_new_shape",
            None,
            '"fallback" runs new shapes in the float model, and none was given',
            remedy="pass float_model=",
        )


def _with_fallback(quantized: QuantizedModel, options: CompileOptions) -> QuantizedModel:
    if options.on_new_shape == NewShapePolicy.FALLBACK and options.float_model is not None:
        return quantized.fall_back_to(options.float_model)
    return quantized


def searched_schedules(
    lowered: Lowered, options: CompileOptions, example: Arguments | None
) -> dict[str, Schedule] | None:
    """Return the schedules of a timed search, or ``None`` if ``tune`` does not request one."""
    if options.tune is False:
        return None
    signature, bytes_too = lowered.signature, lowered.graph.byte_inputs()
    inputs: Sequence[Tensor]
    if options.tune is not True:
        inputs = copied_inputs(signature, options.tune, bytes_too)
    elif example is None:
        inputs = random_sample(signature)
    else:
        inputs = first_sample(signature, bind(signature, *example), bytes_too)
    return search(lowered, build.isas_to_build(options.isa)[0], inputs)
