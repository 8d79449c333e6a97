"""`NumberArray`: many numbers in the memory of an array, for scales and zero points of channels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy as np

Number = TypeVar("Number", int, float)


class NumberArray(Sequence[Number]):
    """Sequence of numbers that equals the tuple of them, and takes a quarter of its memory or less.

    Args:
        values: One-dimensional array, which must not be changed afterwards. A broadcast array takes the memory of one
            number.
    """

    __slots__ = ("_values",)

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> Number: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Number, ...]: ...

    def __getitem__(self, index: int | slice) -> Number | tuple[Number, ...]:
        found = self._values[index].tolist()
        return tuple(found) if isinstance(index, slice) else found

    def __iter__(self) -> Iterator[Number]:
        return iter(self._values.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NumberArray):
            return np.array_equal(self._values, other._values)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._values, dtype)
