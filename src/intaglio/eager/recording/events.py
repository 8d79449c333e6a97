"""Records of a model's run: one `Event` per operator, with its operands and results."""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from intaglio.eager.recording.torch_functions import attribute_path, function_at


@dataclass(frozen=True)
class RecordedTensor:
    """A tensor of a recording, identified by its number."""

    index: int

    def __str__(self) -> str:
        return f"v{self.index}"


@dataclass(frozen=True)
class ModelTensor:
    """A parameter, buffer or other tensor attribute of the model, identified by its dotted name."""

    path: str

    def __str__(self) -> str:
        return f"held(self, {self.path!r})"


@dataclass(frozen=True)
class SizeExpression:
    """A number computed from sizes of tensors: the size of an axis, or an arithmetic operator on such numbers.

    Attributes:
        operation: "size", or a key of `SIZE_OPERATORS`.
        operands: (tensor, axis) of a size, otherwise the two operands.
    """

    operation: str
    operands: tuple[Any, ...]

    def __str__(self) -> str:
        if self.operation == "size":
            return f"{self.operands[0]}.size({self.operands[1]})"
        return f"({f' {SIZE_OPERATORS[self.operation]} '.join(map(str, self.operands))})"

    def evaluate(self, size: Callable[[RecordedTensor, int], Any]) -> Any:
        """Compute the number; `size` returns the size of an axis of a value."""
        if self.operation == "size":
            return size(*self.operands)
        numbers = [o.evaluate(size) if isinstance(o, SizeExpression) else o for o in self.operands]
        return getattr(python_operator, self.operation)(*numbers)


SIZE_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}
"""Operators whose result on a `RecordedSize` is a `RecordedSize`, with their signs."""


class RecordedSize(int):
    """An int read from a tensor's shape while recording, which remembers where it came from."""

    origin: tuple[Any, ...]
    """("size", tensor, axis) or (operator, operand, operand)."""

    @classmethod
    def of(cls, number: int, *origin: Any) -> RecordedSize:
        """Return a `RecordedSize` with this value and origin."""
        made = cls(number)
        made.origin = origin
        return made


def _arithmetic(name: str, swapped: bool) -> Callable[[RecordedSize, Any], Any]:
    operation = getattr(python_operator, name)

    def compute(self: RecordedSize, other: Any) -> Any:
        if type(other) is not int and not isinstance(other, RecordedSize):
            return NotImplemented if not isinstance(other, (float, bool)) else _plain(operation, self, other, swapped)
        a, b = (other, self) if swapped else (self, other)
        return RecordedSize.of(operation(int(a), int(b)), name, a, b)

    return compute


def _plain(operation: Callable[[Any, Any], Any], length: RecordedSize, other: Any, swapped: bool) -> Any:
    return operation(other, int(length)) if swapped else operation(int(length), other)


for _name in SIZE_OPERATORS:
    setattr(RecordedSize, f"__{_name}__", _arithmetic(_name, False))
    setattr(RecordedSize, f"__r{_name}__", _arithmetic(_name, True))


def with_origins(name: str, args: tuple[Any, ...], result: Any) -> Any:
    """Wrap sizes in `RecordedSize`, which remembers the tensor and axis they come from."""
    if name in ("shape", "size") and isinstance(result, tuple):
        return tuple(RecordedSize.of(size, "size", args[0], axis) for axis, size in enumerate(result))
    if name == "size" and len(args) > 1:
        return RecordedSize.of(result, "size", args[0], args[1])
    return RecordedSize.of(result, "size", args[0], 0) if name == "__len__" else result


@dataclass(eq=False)
class Event:
    """One operator of a recording.

    Attributes:
        index: Position in the recording.
        function: Function that was called, or None for a call of the leaf module at `path`.
        path: Path of the leaf module, or of the module whose code called the function.
        call: Number of earlier calls of the module whose code runs the operator.
        args: Positional arguments, with `RecordedTensor`, `ModelTensor` and `SizeExpression` for tensors and sizes.
        kwargs: Keyword arguments, in the same form.
        result: Result, in the same form.
        changed: For an in-place operator, the value that its first argument represents afterwards.
        views: Values of the result that are views, each with its base.
        source: `file:line, in function`.
    """

    index: int
    function: Callable[..., Any] | None
    path: str
    call: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    changed: int | None = None
    views: tuple[tuple[int, RecordedTensor | ModelTensor], ...] = ()
    source: str = ""
    slots: tuple[int, ...] = ()
    """Value numbers of `args`, with -1 for arguments that are not tensors; speeds up comparisons."""
    makes: int = -1
    """Number of the value if it is the entire result and no argument is updated in place, otherwise -1."""

    def __post_init__(self) -> None:
        self.slots = tuple(spec.index if isinstance(spec, RecordedTensor) else -1 for spec in self.args)
        if isinstance(self.result, RecordedTensor) and self.changed is None:
            self.makes = self.result.index

    def __getstate__(self) -> dict[str, Any]:
        """Store functions of PyTorch by name, because most of them cannot be pickled."""
        parts = None if self.function is None else attribute_path(self.function)
        return vars(self) if parts is None else {**vars(self), "function": parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        function = state["function"]
        vars(self).update(state, function=function_at(function) if isinstance(function, tuple) else function)

    @property
    def name(self) -> str:
        """Return the name of the operator for error messages."""
        return operator_name(self.function)

    def __str__(self) -> str:
        return f"{self.name} in {self.path}" if self.function is not None and self.path else self.path or self.name

    @property
    def key(self) -> tuple[str, Any]:
        """Return path and function; operators of a model are found by it."""
        return self.path, self.function

    @property
    def place(self) -> tuple[str, str, str]:
        """Return path, name and calling function, which identify an operator that is not part of a recording."""
        return place_of(self.path, self.function, self.source)

    @property
    def inputs(self) -> list[int]:
        """Return the value numbers of all tensors among the arguments."""
        return [leaf.index for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, RecordedTensor)]

    @property
    def outputs(self) -> list[int]:
        """Return the numbers of the values that this operator makes, without inputs that it passes on."""
        taken = set(self.inputs)
        made = [
            leaf.index for leaf in leaves(self.result) if isinstance(leaf, RecordedTensor) and leaf.index not in taken
        ]
        if self.changed is not None and self.changed not in made:
            made.append(self.changed)
        return made


def leaves(spec: Any) -> Iterator[Any]:
    """Yield the leaves of nested containers, including the operands of an `SizeExpression`."""
    if isinstance(spec, (tuple, list)):
        for entry in spec:
            yield from leaves(entry)
    elif isinstance(spec, dict):
        for entry in spec.values():
            yield from leaves(entry)
    elif isinstance(spec, slice):
        yield from leaves((spec.start, spec.stop, spec.step))
    elif isinstance(spec, SizeExpression):
        yield from leaves(spec.operands)
    else:
        yield spec


def fill(spec: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return the same nested containers with every leaf replaced by `leaf(value)`. Classes of containers are kept."""
    if isinstance(spec, torch.Tensor):
        return leaf(spec)
    if isinstance(spec, tuple):
        entries = [fill(entry, leaf) for entry in spec]
        if hasattr(spec, "_fields"):
            return type(spec)._make(entries)  # type: ignore[attr-defined]  # PackedSequence() checks its fields
        return type(spec)(entries) if type(spec).__module__ == "torch.return_types" else tuple(entries)
    if isinstance(spec, list):
        return [fill(entry, leaf) for entry in spec]
    if isinstance(spec, dict):
        return {key: fill(entry, leaf) for key, entry in spec.items()}
    if isinstance(spec, slice):
        return slice(fill(spec.start, leaf), fill(spec.stop, leaf), fill(spec.step, leaf))
    return leaf(spec)


def tensors(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested containers."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def operator_name(function: Any) -> str:
    """Return the name of an event's function for messages, if possible as in PyTorch's documentation."""
    if function is None:
        return "call of the module"
    if isinstance(function, torch.ScriptMethod):
        return str(function.name)
    return torch.overrides.resolve_name(function) or getattr(function, "__name__", str(function))


def operator_or_class(model: nn.Module, path: str, function: Any) -> str:
    """Return the name of a function, or of the class of the leaf module at `path` if it is None, for reports."""
    return type(model.get_submodule(path)).__name__ if function is None else operator_name(function)


def place_of(path: str, function: Any, source: str) -> tuple[str, str, str]:
    """Return path, name and calling function of an operator; `source` is its line as in `Event`."""
    return path, operator_name(function), source.rpartition(", in ")[2]


def model_tensor(model: nn.Module, path: str) -> torch.Tensor:
    """Return the tensor with this dotted name in the model."""
    owner, _, name = path.rpartition(".")
    found: torch.Tensor = getattr(model.get_submodule(owner), name)
    return found
