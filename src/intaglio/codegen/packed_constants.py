"""`PackedConstants`: the constants of a program in the layout in which its kernels read them."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
from collections.abc import Callable, Hashable

import numpy as np

CONSTANT_ALIGNMENT = 64
HUGE_PAGE = 2 << 20
"""Bytes of a huge page. Linux aligns memory whose size is a multiple of them."""
HUGE_PAGE_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
"""Advice for the memory of constants, where the operating system knows it."""


def constants_memory(size: int) -> mmap.mmap:
    """Return zeros for so many bytes of constants, at least; unwritten pages use no memory.

    Linux is asked for huge pages: layers with few rows take the time of reading their weights, and a loop that only
    reads 600 MB is a third slower with pages of 4 KiB (Xeon: 13 instead of 19 GB/s on one thread, 26 instead of 38 on
    two).
    """
    memory = mmap.mmap(-1, max(-(-size // HUGE_PAGE), 1) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(memory)
    return memory


def _advise(memory: mmap.mmap) -> None:
    """Ask for huge pages, which a system may lack."""
    if HUGE_PAGE_ADVICE is not None:
        with contextlib.suppress(OSError):
            memory.madvise(HUGE_PAGE_ADVICE)


class PackedConstants:
    """Constants of a program in one aligned array. Equal arrays are stored once.

    Small arrays are added as they are. Weights are reserved, and packed when all code is printed, since their text does
    not depend on their values. The array is backed by an anonymous mmap that grows with mremap, so weights are never
    held in memory twice.
    """

    def __init__(self) -> None:
        self._memory = constants_memory(0)
        self._known: dict[Hashable, int] = {}
        self._reserved: list[tuple[int, int, Hashable, Callable[[], np.ndarray]]] = []
        self._size = 0

    def add(self, array: np.ndarray) -> int:
        """Store an array if its bytes are new, and return their offset."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        key = hashlib.sha256(data).digest()
        if key not in self._known:
            start = self._take(data.nbytes, key)
            self._memory[start : start + data.nbytes] = data
        return self._known[key]

    def reserve(self, size: int, key: Hashable, pack: Callable[[], np.ndarray]) -> int:
        """Return the offset of an array that is packed later.

        Args:
            size: Its bytes.
            key: Equal for equal arrays.
            pack: Returns the array.
        """
        if key not in self._known:
            start = self._take(size, key)
            self._reserved.append((start, size, key, pack))
        return self._known[key]

    def _take(self, size: int, key: Hashable) -> int:
        """Return the offset of new memory, which a key then names."""
        self._known[key] = start = self._size
        self._size += size + -size % CONSTANT_ALIGNMENT
        if self._size > len(self._memory):
            self._memory.resize(-(-2 * self._size // HUGE_PAGE) * HUGE_PAGE)
            _advise(self._memory)
        return start

    def array(self) -> np.ndarray:
        """Return all constants, u8[bytes]. No constant can be added afterwards.

        Raises:
            ValueError: A weight does not have the size that was reserved for it.
        """
        memory = memoryview(self._memory)
        for start, size, what, pack in self._reserved:
            data = np.ascontiguousarray(pack()).reshape(-1).view(np.uint8)
            if data.nbytes != size:
                raise ValueError(f"{what!r:.60} is packed in {data.nbytes} bytes, but {size} are reserved")
            memory[start : start + size] = data.data
        self._reserved.clear()
        return np.frombuffer(self._memory, np.uint8)[: self._size]
