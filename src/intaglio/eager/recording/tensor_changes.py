"""Notice that tensors of a model were changed or replaced after graphs were built from them."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from intaglio.torch_private import DisableTorchFunction, buffers_of, parameters_of, version_of


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters, buffers and other tensor attributes of modules by dotted name.

    A tensor that several modules share has several names.
    """
    found = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        found.update({prefix + name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)})
    return found


class TensorWatch:
    """Tells whether tensors of a model are still those of an earlier time, with the contents that they had then.

    Compared are the tensor that a module holds under each name, the version that PyTorch counts for its updates in
    place, and the address of its memory, which assignments to `Tensor.data` change. This costs about 0.3 microseconds
    a tensor. Inference tensors have no version; their contents are compared. Updates that PyTorch does not count, such
    as those of `weight.data.mul_(2)` and of NumPy arrays with the same memory, are not noticed.

    Attributes:
        names: Dotted names of the tensors.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> None:
        places = {name: _place(model, name) for name in tensors if name in names}
        self.names = [name for name, place in places.items() if place is not None]
        found = [places[name] or ({}, "") for name in self.names]
        self._tables, self._keys = [table for table, _ in found], [key for _, key in found]
        self._tensors = [tensors[name] for name in self.names]
        with DisableTorchFunction():
            self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
            self._versions = list(map(version_of, self._counted))
            self._in_memory = [tensor for tensor in self._tensors if _address(tensor) is not None]
            self._addresses = list(map(torch.Tensor.data_ptr, self._in_memory))
            self._uncounted = [_bytes(t) for t in self._tensors if t.is_inference() and _address(t) is not None]
            self._contents = [found.clone() for found in self._uncounted]

    def notices_change(self) -> bool:
        """Return whether any tensor was changed or replaced."""
        with DisableTorchFunction():
            return not (
                all(map(operator.is_, map(dict.get, self._tables, self._keys), self._tensors))
                and list(map(version_of, self._counted)) == self._versions
                and list(map(torch.Tensor.data_ptr, self._in_memory)) == self._addresses
                and all(map(torch.equal, self._uncounted, self._contents))
            )

    def replaced(self) -> set[str]:
        """Return the names under which modules hold other tensors than before."""
        entries = zip(self.names, self._tables, self._keys, self._tensors, strict=True)
        return {name for name, table, key, tensor in entries if table.get(key) is not tensor}

    def changed(self) -> set[str]:
        """Return the names of all tensors that were changed or replaced."""
        with DisableTorchFunction():
            found = set(_differing(self._counted, version_of, self._versions))
            found.update(_differing(self._in_memory, torch.Tensor.data_ptr, self._addresses))
            uncounted = [t for t in self._tensors if t.is_inference() and _address(t) is not None]
            pairs = zip(uncounted, self._uncounted, self._contents, strict=False)
            found.update(id(tensor) for tensor, now, before in pairs if not torch.equal(now, before))
        entries = zip(self.names, self._tensors, strict=True)
        return self.replaced() | {name for name, tensor in entries if id(tensor) in found}


def _differing(tensors: list[torch.Tensor], state: Callable[[torch.Tensor], int], before: list[int]) -> Iterator[int]:
    """Yield the ids of tensors whose state is another than before."""
    return (id(tensor) for tensor, known in zip(tensors, before, strict=True) if state(tensor) != known)


def _place(model: nn.Module, name: str) -> tuple[dict[str, Any], str] | None:
    """Return the table in which a module holds a tensor, and its key there; None for tensors of TorchScript."""
    owner, _, key = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, torch.jit.ScriptModule):
        return None
    return next(((t, key) for t in (parameters_of(module), buffers_of(module), vars(module)) if key in t), None)


def _address(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's memory, or None for tensors without memory of their own, such as sparse ones."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        return tensor.data_ptr()
    return None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's storage, in the same memory."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
