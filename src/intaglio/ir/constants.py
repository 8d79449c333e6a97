"""`Constants`: the arrays of a graph by name, some of which are read from a file whenever they are asked for."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np


@dataclass(frozen=True)
class StoredArray:
    """An array that is not in memory.

    Attributes:
        shape: Sizes of its axes.
        dtype: Element type.
        read: Reads it.
        read_packed: Reads what is stored of an array of few bits: its quantized values, and the multiples or smallest
            values of groups, both packed into bytes. ``None`` if it is stored as it is.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray] = field(repr=False)
    read_packed: Callable[[], tuple[np.ndarray, np.ndarray]] | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Return its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Constants(Mapping[str, np.ndarray]):
    """Arrays by name. An array that is stored elsewhere is read each time it is asked for, and not kept.

    ``source`` is a digest of all arrays, or empty if they do not come from a file.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray | StoredArray], source: str = "") -> None:
        entries = arrays._entries if isinstance(arrays, Constants) else arrays
        self._entries: Mapping[str, np.ndarray | StoredArray] = MappingProxyType(dict(entries))
        self.source = source or getattr(arrays, "source", "")

    def __getitem__(self, name: str) -> np.ndarray:
        found = self._entries[name]
        return found.read() if isinstance(found, StoredArray) else found

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __or__(self, others: Mapping[str, np.ndarray]) -> Constants:
        """Return these arrays and others, without reading any."""
        if not self.source:
            return Constants({**self._entries, **others})
        digest = hashlib.sha256(self.source.encode())
        for name, array in others.items():
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return Constants({**self._entries, **others}, digest.hexdigest())

    def only(self, names: Collection[str]) -> Constants:
        """Return the arrays with these names, without reading any."""
        return Constants({name: array for name, array in self._entries.items() if name in names}, self.source)

    def layout(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Return the shape and the element type of an array, without reading it."""
        found = self._entries[name]
        return tuple(found.shape), found.dtype

    def nbytes(self, name: str) -> int:
        """Return the size of an array in bytes, without reading it."""
        return self._entries[name].nbytes

    def packed(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return what is stored of an array of few bits, see `StoredArray`, or ``None`` for other arrays."""
        found = self._entries[name]
        return found.read_packed() if isinstance(found, StoredArray) and found.read_packed is not None else None

    def is_stored(self, name: str) -> bool:
        """Return whether an array is read each time it is asked for."""
        return isinstance(self._entries[name], StoredArray)
