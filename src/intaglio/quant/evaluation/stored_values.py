"""Stored values of a graph: tensors in memory up to a number of bytes, and further ones in a temporary file."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from io import BufferedRandom
from typing import Any

import numpy as np
import torch

from intaglio.torch_private import pytree


@dataclass
class StoredValue:
    """A stored value of the second track, in float, quantized, or both; ``is_16bit`` marks 16-bit quantized values."""

    real: Any = None
    quantized: Any = None
    is_16bit: bool = False


@dataclass(frozen=True)
class _Spilled:
    """A tensor in the temporary file, whose bytes start at ``offset`` in memory order."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class ValueStore:
    """Stores tensors with their strides, in memory up to a number of bytes and then in one temporary file."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.end = limit, 0, 0
        self.free: dict[int, list[int]] = {}
        self.file: BufferedRandom | None = None

    def put(self, tensor: torch.Tensor) -> torch.Tensor | _Spilled:
        """Store a tensor, and return it or its place in the file."""
        size = tensor.numel() * tensor.element_size()
        if self.used + size <= self.limit:
            self.used += size
            return tensor
        if self.file is None:
            self.file = tempfile.TemporaryFile()  # noqa: SIM115  # The unnamed file lives as long as the evaluation.
        offset = places.pop() if (places := self.free.get(size)) else self.end
        self.end = max(self.end, offset + size)
        self.file.seek(offset)
        self.file.write(_dense(tensor).as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data)
        return _Spilled(offset, tensor.shape, _dense(tensor).stride(), tensor.dtype)

    def get(self, kept: torch.Tensor | _Spilled) -> torch.Tensor:
        """Return a stored tensor."""
        if isinstance(kept, torch.Tensor):
            return kept
        assert self.file is not None
        flat = torch.empty(kept.shape.numel(), dtype=kept.dtype)
        self.file.seek(kept.offset)
        self.file.readinto(flat.view(torch.uint8).numpy().data)
        return flat.as_strided(kept.shape, kept.stride)

    def drop(self, kept: torch.Tensor | _Spilled) -> None:
        """Release the memory or the part of the file that a stored tensor uses."""
        if isinstance(kept, torch.Tensor):
            self.used -= kept.numel() * kept.element_size()
        else:
            self.free.setdefault(int(np.prod(kept.shape)) * kept.dtype.itemsize, []).append(kept.offset)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without gaps in memory, which a slice of a larger tensor may have."""
    order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride()[axis])
    return tensor if tensor.permute(order).is_contiguous() else tensor.contiguous()


@dataclass
class Track:
    """Stored values by node and batch."""

    store: ValueStore
    values: dict[str, dict[int, Any]] = field(default_factory=dict)

    def put(self, name: str, batch: int, value: Any) -> None:
        """Store the value of a node, or what it consists of."""
        parts, tree = pytree.tree_flatten(_fields(value))
        kept = [self.store.put(_dense(part)) if isinstance(part, torch.Tensor) else part for part in parts]
        self.values.setdefault(name, {})[batch] = (type(value) is StoredValue, kept, tree)

    def get(self, name: str, batch: int) -> Any:
        """Return the value of a node."""
        pair, kept, tree = self.values[name][batch]
        parts = [self.store.get(part) if isinstance(part, (torch.Tensor, _Spilled)) else part for part in kept]
        value = pytree.tree_unflatten(parts, tree)
        return StoredValue(*value) if pair else value

    def drop(self, name: str, batch: int) -> None:
        """Release the value of a node, if there is one."""
        own = self.values.get(name, {})
        _, kept, _ = own.pop(batch, (False, [], None))
        if not own:
            self.values.pop(name, None)
        for part in kept:
            if isinstance(part, (torch.Tensor, _Spilled)):
                self.store.drop(part)


def _fields(value: Any) -> Any:
    return (value.real, value.quantized, value.is_16bit) if type(value) is StoredValue else value
