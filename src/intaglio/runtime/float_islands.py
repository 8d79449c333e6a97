"""Parts of a model that run outside of the compiled program: float islands, which are stored as lists of calls without
Python code, and user-defined host operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import fx, nn

from intaglio.errors import INDEX_OUT_OF_RANGE, ArtifactError, InputError, IntaglioError
from intaglio.ir import ArenaLocation, Graph, HostCall, Op, TensorType, evaluate
from intaglio.runtime.saved.island_operators import PYTHON_FUNCTIONS, check_arguments_of, function_of
from intaglio.runtime.saved.json_codec import NotStorableError, checked_identifier, decode, encode
from intaglio.signature import run_while_loop


@dataclass(frozen=True)
class TensorCall:
    """The call ``name = function(*arguments, **keywords)``."""

    name: str
    function: str
    arguments: Any
    keywords: Any


@dataclass(frozen=True)
class IslandProgram:
    """A float island as a list of calls. It takes tensors, then dynamic dimensions, and returns a tuple.

    Attributes:
        inputs: names of the arguments.
        constants: pairs of a value's name and the name of the module's tensor that it reads.
        calls: the calls in order. Arguments are JSON as `encode` writes it; a value is ``{"name": its name}``.
        outputs: names of the results.
    """

    inputs: tuple[str, ...]
    constants: tuple[tuple[str, str], ...]
    calls: tuple[TensorCall, ...]
    outputs: tuple[str, ...]

    def to_json(self) -> Any:
        """Return the program as JSON."""
        calls = [[call.name, call.function, call.arguments, call.keywords] for call in self.calls]
        return {
            "inputs": list(self.inputs),
            "constants": [list(constant) for constant in self.constants],
            "calls": calls,
            "outputs": list(self.outputs),
        }

    @staticmethod
    def from_json(entry: Any) -> IslandProgram:
        """Return the program that `to_json` wrote. Raise `ValueError` if a call uses a value before it is computed."""
        names = {checked_identifier(name) for name in entry["inputs"]}
        constants = tuple((checked_identifier(name), checked_identifier(target)) for name, target in entry["constants"])
        names.update(name for name, _ in constants)
        calls = []
        for name, function, arguments, keywords in entry["calls"]:
            missing = _values([arguments, list(keywords.values())]) - names
            if missing:
                raise ValueError(f"{function} reads {', '.join(sorted(missing))} before it is computed")
            calls.append(
                TensorCall(
                    checked_identifier(name),
                    str(function),
                    arguments,
                    {checked_identifier(k): keywords[k] for k in keywords},
                )
            )
            names.add(name)
        if missing := set(entry["outputs"]) - names:
            raise ValueError(f"no operator computes {', '.join(sorted(missing))}")
        return IslandProgram(tuple(entry["inputs"]), constants, tuple(calls), tuple(entry["outputs"]))


class HostLoop(nn.Module):
    """Runs a compiled body as long as a condition, a float island, is true."""

    condition: FloatIsland
    body: Any

    def __init__(self, carried: int, condition: FloatIsland, body: nn.Module | None = None) -> None:
        """Create a loop.

        Args:
            carried: number of values that the loop changes.
            condition: the float island that decides whether the body runs again.
            body: a `QuantizedModel`; ``None`` for a loop read from a file, until its body is compiled.
        """
        super().__init__()
        self.carried, self.condition, self.body = carried, condition, body

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the carried values of the first iteration after which the condition is false."""
        return run_while_loop(self.condition, self.body, self.carried, values)


def loops_in(module: nn.Module) -> dict[str, HostLoop]:
    """Return the loops of a float island by name."""
    inner = module.loops.items() if isinstance(module, FloatIsland) else ()
    return {name: loop for name, loop in inner if isinstance(loop, HostLoop)}


QUANTIZE_AGAIN = "call the model with inputs that the float model accepts; if these are, quantize and save it again"
LOOP_PREFIX = "loop."
"""Prefix of a loop's name in a call, in the place of an operator's name."""


class FloatIsland(nn.Module):
    """Runs an `IslandProgram`. Its tensors are buffers with their names in the float model's graph, and ``loops`` holds
    compiled loops by name."""

    def __init__(
        self,
        calls: IslandProgram,
        tensors: Mapping[str, torch.Tensor],
        loops: Mapping[str, HostLoop] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.calls, self.loops = calls, nn.ModuleDict(loops)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self._steps = _steps(calls, self.loops)

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """Run the calls on tensors, followed by the sizes of dynamic dimensions, and return the results."""
        computed = dict(zip(self.calls.inputs, values, strict=True))
        computed.update({name: getattr(self, target) for name, target in self.calls.constants})
        for name, function, arguments, keywords, last in self._steps:
            try:
                result = function(
                    *_filled(arguments, computed), **{key: _filled(keywords[key], computed) for key in keywords}
                )
            except IntaglioError:
                raise
            except Exception as error:  # PyTorch's, of many types
                if isinstance(error, IndexError) and str(error) == INDEX_OUT_OF_RANGE:
                    raise
                raise _failed_call(name, function, error) from error
            for past in last:
                del computed[past]
            computed[name] = result
        for name in self.calls.outputs:
            if not isinstance(result := computed[name], torch.Tensor):
                problem = f"it is of type {type(result).__name__}, but results of float parts are tensors"
                raise InputError(f"%{name}", None, problem, remedy=QUANTIZE_AGAIN)
        return tuple(computed[name] for name in self.calls.outputs)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_steps"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # of PyTorch
        self._steps = _steps(self.calls, self.loops)


def _failed_call(name: str, function: Callable[..., Any], error: Exception) -> InputError:
    """Return the error for a call that PyTorch refuses."""
    said = next(iter(str(error).splitlines()), "")
    problem = f"PyTorch cannot run this operator of a float part: {type(error).__name__}: {said}"
    return InputError(f"%{name}", str(function), problem, remedy=QUANTIZE_AGAIN)


@dataclass(frozen=True)
class _Value:
    """Reference to a value in decoded arguments."""

    name: str


def _steps(
    calls: IslandProgram, loops: nn.ModuleDict
) -> list[tuple[str, Callable[..., Any], Any, dict[str, Any], list[str]]]:
    """Return the calls ready to run: name of the result, function, arguments, keyword arguments, and the values that
    can be freed afterwards because no later call reads them."""
    steps, later = [], set(calls.outputs)
    for call in reversed(calls.calls):
        read = _values([call.arguments, list(call.keywords.values())])
        arguments = _decoded(call.arguments)
        keywords = {key: _decoded(value) for key, value in call.keywords.items()}
        loop = call.function.removeprefix(LOOP_PREFIX) if call.function.startswith(LOOP_PREFIX) else None
        function = function_of(call.function) if loop is None else loops[loop]
        check_arguments_of(function, arguments, keywords)
        steps.append((call.name, function, arguments, keywords, sorted(read - later)))
        later |= read
    return steps[::-1]


def _values(entry: Any) -> set[str]:
    """Return the names of all values in JSON arguments."""
    if isinstance(entry, list):
        return set().union(*map(_values, entry))
    if isinstance(entry, dict):
        return {entry["name"]} if "name" in entry else _values(list(entry.values()))
    return set()


def _decoded(entry: Any) -> Any:
    """Decode JSON arguments like `decode`, with a `_Value` for every name of a value."""
    if isinstance(entry, list):
        return [_decoded(item) for item in entry]
    if isinstance(entry, dict) and "name" in entry:
        return _Value(entry["name"])
    if isinstance(entry, dict) and "tuple" in entry:
        return tuple(map(_decoded, entry["tuple"]))
    return decode(entry)


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    """Return the arguments with every `_Value` replaced by its tensor or number."""
    if isinstance(value, _Value):
        return values[value.name]
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(item, values) for item in value)
    return value


# ---- torch.fx -> calls --------------------------------------------------------------------------------------------


def island_of(module: fx.GraphModule, loops: Mapping[str, HostLoop] = MappingProxyType({})) -> FloatIsland:
    """Return a float island cut out by lowering, or a condition of a loop, in the form that a loaded one has. It has
    tensors of its own."""
    return FloatIsland(island_program(module), {name: one.clone() for name, one in module.named_buffers()}, loops)


def island_program(module: nn.Module) -> IslandProgram:
    """Return the list of calls of a float island, from its torch.fx module or from a loaded island.

    Raises:
        ArtifactError: an operator is not allowed in files, or an argument cannot be written as JSON.
    """
    if isinstance(module, FloatIsland):
        return module.calls
    if not isinstance(module, fx.GraphModule):
        raise ArtifactError(
            type(module).__name__, None, "this float part was replaced by another module and cannot be saved"
        )
    inputs, constants, calls, outputs = [], [], [], ()
    for node in module.graph.nodes:
        match node.op:
            case "placeholder":
                inputs.append(node.name)
            case "get_attr":
                constants.append((node.name, str(node.target)))
            case "call_function":
                calls.append(_call(node))
            case "output":
                outputs = tuple(value.name for value in node.args[0])
            case _:
                raise ArtifactError(
                    node.name, str(node.target), f"a node of kind {node.op} in a float part cannot be saved"
                )
    return IslandProgram(tuple(inputs), tuple(constants), tuple(calls), outputs)


def _call(node: fx.Node) -> TensorCall:
    """Return the stored form of a node's call. Raise `ArtifactError` if it cannot be saved."""
    python = next((name for name, function in PYTHON_FUNCTIONS.items() if function is node.target), None)
    name = python or str(node.target)
    where = node.name
    try:
        if not name.startswith(LOOP_PREFIX):
            function_of(name)
        arguments = [_encoded(value) for value in node.args]
        keywords = {key: _encoded(value) for key, value in node.kwargs.items()}
    except (ArtifactError, NotStorableError) as error:
        problem = (
            error.problem if isinstance(error, ArtifactError) else f"its argument {error} cannot be stored in a file"
        )
        raise ArtifactError(
            where,
            name,
            f"this float part cannot be saved: {problem}",
            remedy="quantize only the part of the model without it",
        ) from error
    return TensorCall(node.name, name, arguments, keywords)


def _encoded(value: Any) -> Any:
    """Encode arguments like `encode`, with names for values."""
    if isinstance(value, fx.Node):
        return {"name": value.name}
    if isinstance(value, tuple):
        return {"tuple": [_encoded(item) for item in value]}
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    return encode(value)


# ---- host operators -----------------------------------------------------------------------------------------------

ReferenceFunction = Callable[[Op, Sequence[np.ndarray], Sequence[TensorType], TensorType], Any]


class Offsets(Protocol):
    """Buffer offsets of the program."""

    def __getitem__(self, index: int, /) -> int: ...


class HostOperator(Protocol):
    """The part of a host operator's record that running it needs."""

    @property
    def reference(self) -> ReferenceFunction | None:
        """Return the NumPy function that defines the operator, or ``None`` if it was not given."""


def host_names(graph: Graph) -> tuple[str, ...]:
    """Return the names of the user-defined operators of a graph."""
    return tuple(dict.fromkeys(str(op.attrs["operator"]) for op in graph.ops if op.is_host))


def run_host(
    call: HostCall, host: HostOperator, graph: Graph, arena: np.ndarray, offsets: Offsets, symbols: Mapping[str, int]
) -> None:
    """Run a user-defined operator: read quantized values from the arena, call its reference implementation, write the
    result.

    The halo of the result is filled with its zero point.

    Raises:
        InputError: the reference implementation returns another element type or shape than the program reads.
    """
    if host.reference is None:
        raise ValueError(f"{call.op.attrs['operator']} has no reference implementation")
    op, arrays = call.op, []
    for name, place in zip(call.op.inputs, call.inputs, strict=True):
        array = graph.constants[name] if place is None else _quantized_view(place, arena, offsets, symbols)
        arrays.append(array.view())
        arrays[-1].flags.writeable = False
    result = np.asarray(host.reference(op, arrays, [graph.types[name] for name in op.inputs], graph.types[op.output]))
    quantized = _quantized_view(call.output, arena, offsets, symbols)
    if result.dtype != np.uint8 or result.shape != quantized.shape:
        raise InputError(
            op.origin.path or op.output,
            op.attrs["operator"],
            f"its reference implementation returned {result.dtype}{list(result.shape)}, "
            f"but the program reads uint8{list(quantized.shape)}",
            remedy="return quantized values, quantize(...).astype(np.uint8), of the shape that infer returns",
        )
    if frame := evaluate(call.output.frame, symbols):
        start = offsets[call.output.at]
        arena[start : start + frame] = graph.types[op.output].qparams.zero
    quantized[...] = result


def _quantized_view(
    place: ArenaLocation, arena: np.ndarray, offsets: Offsets, symbols: Mapping[str, int]
) -> np.ndarray:
    """Return a view of a buffer's quantized values with their logical shape."""
    shape, strides = ([evaluate(dim, symbols) for dim in dims] for dims in (place.shape, place.strides))
    start = offsets[place.at] + evaluate(place.start, symbols)
    return np.lib.stride_tricks.as_strided(arena[start:], shape, strides)
