"""Calls of float operators, and the builder of the loop bodies that they are decomposed into."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from intaglio.ir import DType, Op, TensorType, fresh
from intaglio.ops.loop_ops.primitives import BOOL, F32, FLOAT_TYPES, I64, PRIMITIVES, Primitive, infer


@dataclass(frozen=True)
class FloatCall:
    """One call of a float operator.

    Attributes:
        target: ATen overload.
        arguments: Arguments by schema name; a tensor is given as its type.
        result: Type of the result.
        constants: Arrays of the arguments that are constant.
    """

    target: str
    arguments: Mapping[str, Any]
    result: TensorType
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)

    def tensors(self) -> dict[str, TensorType]:
        """Return the types of all tensor arguments by name."""
        return {name: value for name, value in self.arguments.items() if isinstance(value, TensorType)}

    def kind(self, name: str) -> TensorType:
        """Return the type of an argument; raise `TypeError` if it is not a tensor."""
        found = self.arguments[name]
        if not isinstance(found, TensorType):
            raise TypeError(f"{self.target}: the argument {name} must be a tensor")
        return found

    def axis(self, name: str = "dim", of: str = "self") -> int:
        """Return an axis argument as a non-negative number."""
        value = self.arguments[name]
        given = value[0] if isinstance(value, (list, tuple)) else value
        return int(given) % max(len(self.kind(of).shape), 1)


class Body:
    """Builder for the body of one loop.

    Operands are names of values, or numbers. ``types`` are those of all values outside, whose names are taken.
    """

    def __init__(self, stem: str, types: Mapping[str, TensorType]) -> None:
        self.stem, self.types = stem, ChainMap[str, TensorType]({}, dict(types))
        self.constants: dict[str, np.ndarray] = {}
        self.arrays: dict[str, np.ndarray] = {}  # constants of the graph that the loop reads
        self.ops: list[Op] = []

    def __call__(self, kind: str, *operands: str | float, dtype: DType | None = None, **attrs: Any) -> str:
        """Append one primitive and return the name of its result.

        Operands that must be real are cast first. Where the primitive takes integers, integers stay integers, also
        together with booleans and whole numbers.
        """
        row = PRIMITIVES[kind]
        first = int(kind == "where")
        integers = self._are_integers(row, operands[first:])
        names = [self._operand(name, integers and index >= first) for index, name in enumerate(operands)]
        if row.operands[0][first:] == (FLOAT_TYPES,) * (len(names) - first) and kind != "cast" and not integers:
            names[first:] = [self.as_float(name) for name in names[first:]]
        shape = infer(kind, attrs, [self.types[name].shape for name in names])
        given = dtype or row.result_of(self.types[names[-1]].dtype) or self.types[names[0]].dtype
        name = self._name(kind)
        self.types[name] = TensorType(shape, given)
        self.ops.append(Op(kind, tuple(names), (name,), attrs))
        return name

    def _are_integers(self, row: Primitive, operands: Sequence[str | float]) -> bool:
        """Return whether a primitive computes integers: one operand is i64, the others are, booleans or numbers."""
        if not any(all(kinds == (I64,) for kinds in one[-len(operands) :]) for one in row.operands):
            return False
        kinds = [self.types[name].dtype for name in operands if isinstance(name, str)]
        numbers = [number for number in operands if not isinstance(number, str)]
        return I64 in kinds and {*kinds} <= {I64, BOOL} and all(isinstance(number, int) for number in numbers)

    def _operand(self, operand: str | float, is_integer: bool) -> str:
        """Return the name of an operand, as an integer if the primitive computes integers."""
        if not isinstance(operand, str):
            return self.integer(int(operand)) if is_integer else self.number(operand)
        return self("cast", operand, dtype=I64) if is_integer and self.types[operand].dtype is BOOL else operand

    def as_float(self, name: str) -> str:
        """Return the value as floats, cast if necessary."""
        return name if self.types[name].dtype in FLOAT_TYPES else self("cast", name, dtype=F32)

    def as_bool(self, name: str) -> str:
        """Return whether the value is not zero, as a boolean value."""
        return name if self.types[name].dtype is BOOL else self("cast", name, dtype=BOOL)

    def number(self, value: float) -> str:
        """Return the name of a scalar constant, which is added unless the body already has it."""
        return self._scalar(np.asarray(value, np.float32).reshape(()), F32)

    def integer(self, value: int) -> str:
        """Return the name of a scalar i64 constant, which is added unless the body already has it."""
        return self._scalar(np.asarray(value, np.int64).reshape(()), I64)

    def _scalar(self, array: np.ndarray, dtype: DType) -> str:
        for name, known in self.constants.items():
            if known.tobytes() == array.tobytes() and self.types[name].dtype is dtype:
                return name
        name = self._name("number")
        self.constants[name], self.types[name] = array, TensorType((), dtype)
        return name

    def array(self, label: str, array: np.ndarray, dtype: DType = F32) -> str:
        """Add a constant array and return its name."""
        name = self._name(label)
        self.arrays[name] = np.ascontiguousarray(array)
        self.types[name] = TensorType(array.shape, dtype)
        return name

    def _name(self, label: str) -> str:
        return fresh(self.types, f"{self.stem}_{label}")
