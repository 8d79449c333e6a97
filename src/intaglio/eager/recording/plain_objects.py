"""Visit the values inside results and arguments: containers, and objects with attributes."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from intaglio.torch_private import pytree


def tensors_inside(value: Any) -> list[torch.Tensor]:
    """Return all tensors in containers and in attributes of plain objects, in order."""
    return [tensor for _, tensor in named_tensors(value)]


def named_tensors(
    value: Any, name: str = "", known: dict[int, Any] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors in containers and in attributes of plain objects, in order, with names such as ``boxes.1``.

    Args:
        value: Value to visit.
        name: Name of the value.
        known: Values that were visited, by id. It keeps them alive.
    """
    known = {} if known is None else known
    if isinstance(value, torch.Tensor):
        yield name, value
    elif id(value) not in known and not _has_no_values(value):
        known[id(value)] = value
        for key, entry in _entries(value):
            yield from named_tensors(entry, f"{name}.{key}" if name else key, known)


def iterator_inside(value: Any) -> Any:
    """Return an iterator in arguments or in a result, or None. The values of one in a result are computed after the
    call ended."""
    return next((leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Iterator)), None)


def replace_inside(value: Any, leaf: Callable[[torch.Tensor], torch.Tensor], known: dict[int, Any]) -> Any:
    """Replace the tensors in containers and in attributes of plain objects.

    Lists, dictionaries and objects keep their identity; tuples are made again.

    Args:
        value: Value to visit.
        leaf: Function that returns the replacement of a tensor.
        known: Values that were visited, by id. It keeps them alive.
    """
    if isinstance(value, torch.Tensor):
        return leaf(value)
    if id(value) in known or _has_no_values(value):
        return value
    known[id(value)] = value
    if isinstance(value, tuple):
        entries = [replace_inside(entry, leaf, known) for entry in value]
        if all(new is old for new, old in zip(entries, value, strict=True)):
            return value
        return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
    if isinstance(value, dict):
        for key, entry in list(dict.items(value)):
            if (found := replace_inside(entry, leaf, known)) is not entry:
                dict.__setitem__(value, key, found)
    elif isinstance(value, list):
        for index, entry in enumerate(list.copy(value)):
            if (found := replace_inside(entry, leaf, known)) is not entry:
                list.__setitem__(value, index, found)
    for name, entry in list(_attributes(value).items()):
        if (found := replace_inside(entry, leaf, known)) is not entry:
            object.__setattr__(value, name, found)
    return value


def _has_no_values(value: Any) -> bool:
    simple = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Generator)
    return isinstance(value, (*simple, nn.Module, type, types.ModuleType)) or callable(value)


def _entries(value: Any) -> list[tuple[str, Any]]:
    """Return the values in a container and in attributes, with their keys, positions and names.

    An attribute that is an entry too, as in the results of Transformers models, is returned once.
    """
    pairs = dict.items(value) if isinstance(value, dict) else value.items() if isinstance(value, READ_ONLY) else ()
    own = [(str(key), entry) for key, entry in pairs]
    if hasattr(value, "_fields"):  # a named tuple
        own += zip(value._fields, value, strict=False)
    elif isinstance(value, (list, tuple)):
        own += [(str(index), entry) for index, entry in enumerate(value)]
    seen = {id(entry) for _, entry in own}
    return own + [(name, entry) for name, entry in _attributes(value).items() if id(entry) not in seen]


READ_ONLY = types.MappingProxyType


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those in slots."""
    found = dict(getattr(value, "__dict__", None) or {})
    with_slots = [vars(kind) for kind in type(value).__mro__ if "__slots__" in vars(kind)]
    names = [name for kind in with_slots for name, slot in kind.items() if isinstance(slot, types.MemberDescriptorType)]
    return found | {name: getattr(value, name) for name in names if hasattr(value, name)}
