"""Freed memory that is kept for the next tensor, which saves the kernel from clearing its pages again."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

COLLECTED_BYTES = 1 << 28
"""Bytes of a model's tensors from which it is worth a fraction of a second to free what nothing uses."""
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, MMAP_MAX = -1, -2, -3, -4
"""Parameters of ``mallopt`` in the C library of GNU."""
KEEPING_FREED = {TRIM_THRESHOLD: -1, TOP_PAD: 1 << 26, MMAP_MAX: 0}
"""Values with which blocks of any size are taken from the heap, and the heap does not shrink."""
RETURNING_FREED = {TRIM_THRESHOLD: 1 << 26, TOP_PAD: 1 << 17, MMAP_MAX: 1 << 16, MMAP_THRESHOLD: 1 << 25}
"""Values that the C library uses itself in a process that has freed large tensors."""
LEAST_MEMORY = {TRIM_THRESHOLD: 1 << 20, TOP_PAD: 1 << 17, MMAP_MAX: 1 << 16, MMAP_THRESHOLD: 1 << 20}
"""Values with which all but small tensors are returned at once, instead of leaving gaps in the heap."""


class _Users:
    """Number of blocks that keep memory, and of those that return it."""

    lock, keeping, returning = threading.Lock(), 0, 0


@contextmanager
def kept_memory() -> Iterator[None]:
    """Let the C library keep freed memory in this block, or in a function that is decorated with ``@kept_memory()``.

    The memory is returned to the system at the end. Without this, each large tensor gets new pages, and clearing them
    takes a large part of the time to quantize a model with large images. Other C libraries than that of GNU do what
    they did before.
    """
    library = _c_library()
    if library is None:
        yield
        return
    _count(library, keeping=1)
    try:
        yield
    finally:
        _count(library, keeping=-1)


@contextmanager
def returned_memory() -> Iterator[None]:
    """Let the C library return freed memory to the system in this block, also within a block that keeps it.

    Where a few tensors take more memory than all others, the heap that keeps them has twice as much as they need.
    """
    library = _c_library()
    if library is None:
        yield
        return
    _count(library, returning=1)
    try:
        yield
    finally:
        _count(library, returning=-1)


def collect_large(tensors: Iterable[torch.Tensor]) -> None:
    """Collect what only refers to itself, such as graphs, and return its memory to the system.

    Nothing happens if these tensors of the model have at most `COLLECTED_BYTES`.
    """
    if sum(tensor.nbytes for tensor in tensors) > COLLECTED_BYTES:
        gc.collect()
        return_freed()


def return_freed() -> None:
    """Return freed memory to the system, also within a block that keeps it."""
    if (library := _c_library()) is not None:
        library.malloc_trim(0)


@functools.cache
def _c_library() -> ctypes.CDLL | None:
    """Return the C library if it has these functions."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def _count(library: ctypes.CDLL, keeping: int = 0, returning: int = 0) -> None:
    """Let one block more or less keep or return memory."""
    with _Users.lock:
        before = _values()
        _Users.keeping, _Users.returning = _Users.keeping + keeping, _Users.returning + returning
        if (values := _values()) is before:
            return
        for parameter, value in values.items():
            library.mallopt(parameter, value)
        if before is KEEPING_FREED:
            library.malloc_trim(0)


def _values() -> dict[int, int]:
    """Return the parameters for the blocks that there are now."""
    return LEAST_MEMORY if _Users.returning else KEEPING_FREED if _Users.keeping else RETURNING_FREED
