"""Changes that a model makes to lists and dictionaries of its arguments, which a graph cannot make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from intaglio.errors import CaptureError

LEFT_OUT = "the model removes or replaces entries of a list or dictionary among its arguments; the graph does not"
WITHOUT_CACHE = "the key-value cache of decoders (use_cache) is neither filled nor returned"


class ContainerContents:
    """The contents of all lists and dictionaries in the arguments of a call, as they were before the call."""

    def __init__(self, arguments: Any) -> None:
        """Remember the contents.

        Args:
            arguments: positional arguments and keyword arguments.
        """
        self._before = list(_containers(arguments, ""))
        self._contents = [_entries(container) for _, container in self._before]

    def changed(self) -> bool:
        """Return whether the call has changed a list or dictionary.

        Raises:
            CaptureError: it has put a tensor there. The graph computes the result only.
        """
        found = False
        for (place, container), before in zip(self._before, self._contents, strict=True):
            after, known = _entries(container), {id(value) for value in before.values()}
            found = found or list(map(id, before.values())) != list(map(id, after.values()))
            for key, value in after.items():
                if id(value) not in known and any(True for _ in _tensors(value)):
                    raise CaptureError(
                        f"argument {place}[{key!r}]",
                        None,
                        "the model puts a tensor into a list or dictionary that it is called with, and a graph cannot",
                        remedy="return the tensor from forward, and let the caller put it there",
                    )
        return found


def _entries(container: list[Any] | dict[Any, Any]) -> dict[Any, Any]:
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))


def _containers(value: Any, place: str) -> Iterator[tuple[str, list[Any] | dict[Any, Any]]]:
    """Yield the lists and dictionaries in nested arguments, with the expressions that lead to them."""
    if isinstance(value, (list, dict)):
        yield place, value
    if isinstance(value, (list, tuple, dict)):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _containers(entry, f"{place}[{key!r}]" if place else str(key))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    if isinstance(value, (list, tuple, dict)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors(entry)
