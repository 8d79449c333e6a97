"""The integer graph: immutable, typed, in single-assignment form. No torch.

Values are names; a graph holds their types, the constants among them and the operators in execution order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from intaglio.ir.dims import Dim, symbols_of
from intaglio.ir.types import DType, QParams, TensorType


@dataclass(frozen=True)
class Origin:
    """Where an operator comes from: module path (``layer1.0.conv1``), ATen operator, line of the user's model."""

    path: str = ""
    operator: str = ""
    source: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.path, self.operator and f"({self.operator})") if part)


Attrs = Mapping[str, Any]
"""Attributes of an operator by name."""


@dataclass(frozen=True)
class Op:
    """One operator: ``outputs = kind(inputs, attrs)``.

    Kinds with a meaning of their own: ``island`` (opaque float part, attr ``key``; run by a callback), ``host`` (NumPy
    meaning, no kernel) and ``loop`` (``body`` is a graph of pointwise operators and reductions).
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
        """The first result; only islands, and sums and requantizations that keep a rest, have more."""
        return self.outputs[0]

    @property
    def is_island(self) -> bool:
        """Whether it is an opaque float part."""
        return self.kind == "island"

    @property
    def is_host(self) -> bool:
        """Whether it is a host operator: integer meaning, no kernel."""
        return self.kind == "host"

    @property
    def is_called_back(self) -> bool:
        """Whether Python runs it between two segments of the program: islands and host operators."""
        return self.is_island or self.is_host

    @property
    def is_loop(self) -> bool:
        """Whether it is a loop, which has a body."""
        return self.kind == "loop"

    def __reduce__(self) -> tuple[Any, ...]:
        return Op, (self.kind, self.inputs, self.outputs, dict(self.attrs), self.body, self.origin)


@dataclass(frozen=True)
class Graph:
    """Inputs and outputs are value names; ``constants`` are arrays of values that never change."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: Mapping[str, TensorType]
    ops: tuple[Op, ...]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "types", MappingProxyType(dict(self.types)))
        object.__setattr__(self, "constants", MappingProxyType(dict(self.constants)))

    def users(self) -> dict[str, tuple[Op, ...]]:
        """Value name -> operators that read it, in order, once per operator. Graph outputs are not operators."""
        readers: dict[str, list[Op]] = {name: [] for name in self.types}
        for op in self.ops:
            for name in dict.fromkeys(op.inputs):
                readers[name].append(op)
        return {name: tuple(ops) for name, ops in readers.items()}

    def byte_inputs(self) -> frozenset[int]:
        """Inputs that may be uint8 levels as well as floats, by position: all that reads them is
        ``pixels`` of ``bytes``, as of declared images."""
        users = self.users()
        read = {i: users[name] for i, name in enumerate(self.inputs) if name not in self.outputs}
        return frozenset(i for i, ops in read.items() if ops and all(op.attrs.get("bytes") for op in ops))

    def outside(self) -> frozenset[str]:
        """Values that callers and islands see: they lie in tensors of PyTorch's."""
        islands = [op for op in self.ops if op.is_island]
        ends = (name for op in islands for name in (*op.inputs, *op.outputs))
        return frozenset((*self.inputs, *self.outputs, *ends))

    def symbols(self) -> tuple[str, ...]:
        """Free dimensions of the inputs, sorted."""
        names = [symbols_of(dim) for name in self.inputs for dim in self.types[name].shape]
        return tuple(sorted(frozenset().union(*names)))

    def replace(self, **changes: Any) -> Graph:
        """A copy with some fields changed and values nobody mentions dropped."""
        return prune(replace(self, **changes))

    def __reduce__(self) -> tuple[Any, ...]:
        return Graph, (self.inputs, self.outputs, dict(self.types), self.ops, dict(self.constants))


def prune(graph: Graph) -> Graph:
    """The graph without operators, constants and types that no output needs."""
    needed, ops = set(graph.outputs), []
    for op in reversed(graph.ops):
        if needed.intersection(op.outputs):
            ops.append(op)
            needed.update(op.inputs)
            needed.update(op.outputs)
    needed.update(graph.inputs)
    types = {name: kind for name, kind in graph.types.items() if name in needed}
    constants = {name: array for name, array in graph.constants.items() if name in needed}
    return Graph(graph.inputs, graph.outputs, types, tuple(reversed(ops)), constants)


@dataclass(frozen=True)
class Input:
    """One tensor leaf of the model's arguments: its place in the flattened call, name, type."""

    name: str
    leaf: int
    type: TensorType


@dataclass(frozen=True)
class Output:
    """One leaf of the model's result: a graph value, or a constant of the call (``None``, a number, a string).

    ``levels``: parameters of a value that is returned as integers.
    """

    value: str | None
    constant: Any = None
    levels: QParams | None = None


@dataclass(frozen=True)
class State:
    """A buffer the model changes while it runs.

    The graph reads it as input ``name``, after those of the call, and gives what it is afterwards as ``value``, after
    all other results. ``path``: its name in the model; ``initial``: what it held when the model was captured, as levels
    where ``type`` has parameters.
    """

    name: str
    value: str
    path: str
    type: TensorType
    initial: np.ndarray = field(compare=False)


@dataclass(frozen=True)
class Signature:
    """How a call becomes graph inputs and how graph outputs become the model's result.

    ``in_tree`` and ``out_tree`` describe nested structures (torch pytree specs; opaque here). ``fixed`` maps leaves
    that are not tensors to the value they were captured with. ``written`` names inputs the model changes in place:
    leaf -> graph value copied back. ``names`` are the parameters of ``forward``. ``ranges``: free dimension -> least
    and largest size, where not every size will do. ``state``: what the model keeps from call to call.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    in_tree: Any = None
    out_tree: Any = None
    fixed: Mapping[int, Any] = field(default_factory=dict)
    written: Mapping[int, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    ranges: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    state: tuple[State, ...] = ()


@dataclass(frozen=True)
class About:
    """What travels with a model from stage to stage: its class, the bytes of its float tensors, what was decided on
    the way (``notes``, one line each), and the text of the stages behind it."""

    name: str = "model"
    bytes: int = 0
    notes: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)

    def after(self, notes: tuple[str, ...] = (), **texts: str) -> About:
        """With the notes and texts of one more stage."""
        return About(self.name, self.bytes, (*self.notes, *notes), {**self.texts, **texts})


def fresh(taken: Mapping[str, Any], stem: str) -> str:
    """``stem``, or ``stem_2``, ``stem_3`` ... if it is taken."""
    if stem not in taken:
        return stem
    number = 2
    while f"{stem}_{number}" in taken:
        number += 1
    return f"{stem}_{number}"


__all__ = ["About", "DType", "Dim", "Graph", "Input", "Op", "Origin", "Output", "Signature", "State", "fresh", "prune"]
