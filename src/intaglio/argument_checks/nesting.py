"""Containers that contain themselves, or that are nested too deeply for PyTorch to flatten."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

MOST_LEVELS = 100
"""Levels of nesting above which a `RecursionError` is blamed on the nesting."""
WITHOUT_CYCLES = "nest lists and dictionaries less deeply, and none in itself"


def nesting_problem(value: Any) -> str | None:
    """Return what is wrong with the nesting of lists, tuples, dictionaries and sets, or ``None``.

    Call it for a `RecursionError`, to which deep nesting may have led, or before results are flattened.
    """
    path: list[int] = []
    open_values = [iter([value])]
    while open_values:
        entry = next(open_values[-1], path)
        if entry is path:
            open_values.pop()
            if path:
                path.pop()
            continue
        entries = _entries(entry)
        if entries is None:
            continue
        if id(entry) in path:
            return f"a {type(entry).__name__} in it contains itself"
        if len(path) >= MOST_LEVELS:
            return f"it is nested more than {MOST_LEVELS} levels deep"
        path.append(id(entry))
        open_values.append(iter(entries))
    return None


def _entries(value: Any) -> Iterable[Any] | None:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, (list, tuple, set, frozenset, deque)) else None
