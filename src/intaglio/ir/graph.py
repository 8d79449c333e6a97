"""The integer graph: immutable, typed, in single-assignment form. It does not use torch.

Values are names. A graph holds their types, the arrays of those that are constant, and operators in execution order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from intaglio.ir.constants import Constants
from intaglio.ir.dims import Dim, SizeCondition, symbols_of
from intaglio.ir.types import DType, QParams, TensorType


@dataclass(frozen=True)
class Origin:
    """Source of an operator: module path (``layer1.0.conv1``), ATen operator, line of the user's model."""

    path: str = ""
    operator: str = ""
    source: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.path, self.operator and f"({self.operator})") if part)


Attrs = Mapping[str, Any]
"""Attributes of an operator by name."""


@dataclass(frozen=True)
class Op:
    """An operator: ``outputs = kind(inputs, attrs)``.

    Three kinds are special: ``island`` (opaque float subgraph with attribute ``key``, run by a callback), ``host``
    (defined in NumPy, has no kernel) and ``loop`` (``body`` is a graph of pointwise operators and reductions).
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Attrs = field(default_factory=dict)
    body: Graph | None = None
    origin: Origin = Origin()

    def __post_init__(self) -> None:
        object.__setattr__(self, "attrs", MappingProxyType(dict(self.attrs)))

    @property
    def output(self) -> str:
        """Return the first result. Only islands, and sums and requantizations with 16-bit results, have several."""
        return self.outputs[0]

    @property
    def is_island(self) -> bool:
        """Return whether the operator is an opaque float subgraph."""
        return self.kind == "island"

    @property
    def is_host(self) -> bool:
        """Return whether the operator is a host operator, which has an integer definition but no kernel."""
        return self.kind == "host"

    @property
    def is_called_back(self) -> bool:
        """Return whether Python runs the operator between two segments of the program: an island or a host operator."""
        return self.is_island or self.is_host

    @property
    def is_loop(self) -> bool:
        """Return whether the operator is a loop, which has a body."""
        return self.kind == "loop"

    def __reduce__(self) -> tuple[Any, ...]:
        return Op, (self.kind, self.inputs, self.outputs, dict(self.attrs), self.body, self.origin)


@dataclass(frozen=True)
class Graph:
    """Integer graph in single-assignment form.

    Attributes:
        inputs: Names of the inputs.
        outputs: Names of the results.
        types: Type of every value.
        ops: Operators in execution order.
        constants: Arrays of the values that never change; any mapping is accepted.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: Mapping[str, TensorType]
    ops: tuple[Op, ...]
    constants: Constants = field(default_factory=lambda: Constants({}))

    def __post_init__(self) -> None:
        object.__setattr__(self, "types", MappingProxyType(dict(self.types)))
        object.__setattr__(self, "constants", Constants(self.constants))

    def users(self) -> Mapping[str, tuple[Op, ...]]:
        """Return for each value the operators that read it, in order, once per operator. Graph outputs are not
        operators.
        """
        return self._users

    @cached_property
    def _users(self) -> Mapping[str, tuple[Op, ...]]:
        readers: dict[str, list[Op]] = {name: [] for name in self.types}
        for op in self.ops:
            for name in dict.fromkeys(op.inputs):
                readers[name].append(op)
        return MappingProxyType({name: tuple(ops) for name, ops in readers.items()})

    def makers(self) -> Mapping[str, Op]:
        """Return for each value that is computed the operator that computes it."""
        return self._makers

    @cached_property
    def _makers(self) -> Mapping[str, Op]:
        return MappingProxyType({name: op for op in self.ops for name in op.outputs})

    def byte_inputs(self) -> frozenset[int]:
        """Return the positions of inputs that may be passed as uint8 quantized values instead of floats.

        These are inputs, such as declared images, that only ``pixels`` operators with the attribute ``bytes`` read.
        """
        users = self.users()
        read = {i: users[name] for i, name in enumerate(self.inputs) if name not in self.outputs}
        return frozenset(i for i, ops in read.items() if ops and all(op.attrs.get("bytes") for op in ops))

    def external_values(self) -> frozenset[str]:
        """Return the values that callers and islands see; their memory belongs to PyTorch tensors."""
        islands = [op for op in self.ops if op.is_island]
        ends = (name for op in islands for name in (*op.inputs, *op.outputs))
        return frozenset((*self.inputs, *self.outputs, *ends))

    def symbols(self) -> tuple[str, ...]:
        """Return the names of the inputs' free dimensions, sorted."""
        return self._symbols

    @cached_property
    def _symbols(self) -> tuple[str, ...]:
        names = [symbols_of(dim) for name in self.inputs for dim in self.types[name].shape]
        return tuple(sorted(frozenset().union(*names)))

    def replace(self, **changes: Any) -> Graph:
        """Return a copy with some fields changed and unused values dropped."""
        return prune(replace(self, **changes))

    def __reduce__(self) -> tuple[Any, ...]:
        return Graph, (self.inputs, self.outputs, dict(self.types), self.ops, dict(self.constants))


def prune(graph: Graph) -> Graph:
    """Return the graph without operators, constants and types that no output depends on."""
    needed, ops = set(graph.outputs), []
    for op in reversed(graph.ops):
        if needed.intersection(op.outputs):
            ops.append(op)
            needed.update(op.inputs)
            needed.update(op.outputs)
    needed.update(graph.inputs)
    types = {name: kind for name, kind in graph.types.items() if name in needed}
    return Graph(graph.inputs, graph.outputs, types, tuple(reversed(ops)), graph.constants.only(needed))


@dataclass(frozen=True)
class Input:
    """One tensor leaf of the model's arguments: name, position in the flattened call (``leaf``), type."""

    name: str
    leaf: int
    type: TensorType


@dataclass(frozen=True)
class Output:
    """One leaf of the model's result.

    Attributes:
        value: Graph value that is returned, or ``None`` for a constant.
        constant: Constant that is returned instead: ``None``, a number, a string.
        qparams: Quantization parameters of a value that is returned as integers.
    """

    value: str | None
    constant: Any = None
    qparams: QParams | None = None


@dataclass(frozen=True)
class State:
    """Buffer that the model updates while it runs.

    Attributes:
        name: Graph input that holds the buffer; such inputs follow those of the call.
        value: Graph output with the updated buffer; such outputs follow all other results.
        path: Name of the buffer in the model.
        type: Type of the buffer.
        initial: Content at capture, quantized if ``type`` has quantization parameters.
    """

    name: str
    value: str
    path: str
    type: TensorType
    initial: np.ndarray = field(compare=False)


@dataclass(frozen=True)
class Signature:
    """Mapping between the arguments and results of a call and the inputs and outputs of the graph.

    Attributes:
        inputs: Tensor leaves of the arguments.
        outputs: Leaves of the result.
        in_tree: Nested structure of the arguments (a torch pytree spec, opaque here).
        out_tree: Nested structure of the result.
        fixed: Non-tensor leaves with the values they had at capture.
        updated_inputs: Inputs that the model updates in place: leaf -> graph value that is copied back.
        names: Parameter names of ``forward``.
        ranges: Smallest and largest size of each restricted free dimension.
        state: Buffers that keep values from call to call.
        conditions: Relations of free dimensions without which the model takes another branch than in the graph.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    in_tree: Any = None
    out_tree: Any = None
    fixed: Mapping[int, Any] = field(default_factory=dict)
    updated_inputs: Mapping[int, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    ranges: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    state: tuple[State, ...] = ()
    conditions: tuple[SizeCondition, ...] = ()


class StageTexts(Mapping[str, str]):
    """Texts by the name of a stage. Some are computed when they are read for the first time."""

    def __init__(self, given: Mapping[str, str | Callable[[], str]]) -> None:
        self._given = dict(given)

    @classmethod
    def joined(cls, before: Mapping[str, str], more: Mapping[str, str | Callable[[], str]]) -> StageTexts:
        """Return texts and more of them, which replace those of the same stages."""
        return cls({**(before._given if isinstance(before, StageTexts) else before), **more})

    def __getitem__(self, stage: str) -> str:
        text = self._given[stage]
        if not isinstance(text, str):
            text = self._given[stage] = text()
        return text

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return all texts for copies and pickles, because functions may read an open file."""
        return StageTexts, (dict(self),)


@dataclass(frozen=True)
class ModelInfo:
    """Information about a model that is passed from stage to stage.

    Attributes:
        name: Class of the model.
        bytes: Bytes of its float tensors.
        notes: Decisions of the stages so far, one line each.
        texts: Text form of each earlier stage.
    """

    name: str = "model"
    bytes: int = 0
    notes: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)

    def with_stage(self, notes: tuple[str, ...] = (), **texts: str | Callable[[], str]) -> ModelInfo:
        """Return a copy with the notes and texts of one more stage. Functions return texts when these are read."""
        return ModelInfo(self.name, self.bytes, (*self.notes, *notes), StageTexts.joined(self.texts, texts))


def fresh(taken: Mapping[str, Any], stem: str) -> str:
    """Return ``stem``, or the first of ``stem_2``, ``stem_3`` ... that is not taken."""
    if stem not in taken:
        return stem
    number = 2
    while f"{stem}_{number}" in taken:
        number += 1
    return f"{stem}_{number}"


__all__ = [
    "DType",
    "Dim",
    "Graph",
    "Input",
    "ModelInfo",
    "Op",
    "Origin",
    "Output",
    "Signature",
    "State",
    "fresh",
    "prune",
]
