"""Memory of the keys and values of dynamic caches, with room for more tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from intaglio.runtime.calls.growing_calls import TOKENS
from intaglio.torch_private import foreach_copy

GROWTH, LEAST_ROOM = 1.25, 64
"""New memory has room for a quarter more tokens than a cache holds, and for 64 more."""


@dataclass
class CacheMemory:
    """Memory of the keys and values of all layers of a cache, with room for more tokens.

    Keys and values have places: 0 and 1 in the first layer, 2 and 3 in the second.

    Attributes:
        groups: places of the tensors of every block, which have the same sizes and the same data type.
        blocks: the memory of each group, [tensors, batch, heads, capacity, size].
        tokens: number of tokens that the cache holds.
        is_left: whether a layer holds other tensors by now, so that tokens cannot be appended here.
    """

    groups: list[tuple[int, ...]]
    blocks: list[Tensor]
    tokens: int
    is_left: bool = False

    @staticmethod
    def of(held: Sequence[Tensor], end: int) -> CacheMemory:
        """Return memory with copies of keys and values, and with room for more than ``end`` tokens."""
        kinds: dict[object, list[int]] = {}
        for place, tensor in enumerate(held):
            kinds.setdefault((tensor.shape, tensor.dtype), []).append(place)
        groups, blocks = list(map(tuple, kinds.values())), list[Tensor]()
        for places in groups:
            (batch, heads, start, size), dtype = held[places[0]].shape, held[places[0]].dtype
            block = torch.empty(len(places), batch, heads, int(GROWTH * end) + LEAST_ROOM, size, dtype=dtype)
            foreach_copy(list(block.narrow(1 + TOKENS, 0, start).unbind()), [held[place] for place in places])
            blocks.append(block)
        return CacheMemory(groups, blocks, held[0].shape[TOKENS])

    def has_room(self, layers: Sequence[Any], end: int) -> bool:
        """Return whether all layers of a cache read their tensors here, and ``end`` tokens fit."""
        if self.is_left or (self.blocks[0].is_inference() and not torch.is_inference_mode_enabled()):
            return False  # PyTorch writes to such tensors in inference mode only
        here = [layer.first_place for layer in layers if type(layer) is MemoryLayer and layer.memory is self]
        places = range(0, sum(map(len, self.groups)), 2)
        return here == [*places] and all(end <= block.shape[1 + TOKENS] for block in self.blocks)

    def append(self, new: Sequence[Tensor]) -> None:
        """Copy new keys and values of all places behind those before them."""
        count = new[0].shape[TOKENS]
        for places, block in zip(self.groups, self.blocks, strict=True):
            free = block.narrow(1 + TOKENS, self.tokens, count).unbind()
            foreach_copy(list(free), [new[place] for place in places])
        self.tokens += count

    def view(self, place: int) -> Tensor:
        """Return the keys or values at a place."""
        for places, block in zip(self.groups, self.blocks, strict=True):
            if place in places:
                return block[places.index(place)].narrow(TOKENS, 0, self.tokens)
        raise IndexError(f"there are no keys or values at place {place}")


class MemoryLayer(DynamicLayer):
    """A layer of a cache whose keys and values lie in a `CacheMemory`, and are tensors once they are read.

    A decoder of 24 layers has 48 of them, and a step of one token needs none. Tensors that are assigned, for instance
    after beam search has reordered them, are held by the layer, which has then left the memory.

    Attributes:
        memory: the memory, or ``None`` once the layer has left it.
        first_place: place of its keys there, behind which its values are.
    """

    def __init__(self, memory: CacheMemory, index: int, device: torch.device) -> None:
        self.memory: CacheMemory | None = None
        self._held: list[Tensor | None] = [None, None]
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no annotation here
        self.memory, self.first_place = memory, 2 * index
        self.device, self.is_initialized = device, True

    @property
    def keys(self) -> Tensor | None:
        """Return the keys, [batch, heads, tokens, size]."""
        return self._tensor(0)

    @keys.setter
    def keys(self, tensor: Tensor | None) -> None:
        self._assign(0, tensor)

    @property
    def values(self) -> Tensor | None:
        """Return the values, [batch, heads, tokens, size]."""
        return self._tensor(1)

    @values.setter
    def values(self, tensor: Tensor | None) -> None:
        self._assign(1, tensor)

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return int(super().get_seq_length()) if self.memory is None else self.memory.tokens

    def __copy__(self) -> MemoryLayer:
        """Return a layer that holds the tensors of this one, because only one cache can append to the memory."""
        copied = MemoryLayer.__new__(MemoryLayer)
        copied.__dict__.update(self.__dict__, memory=None, _held=[self.keys, self.values])
        return copied

    def _tensor(self, which: int) -> Tensor | None:
        return self._held[which] if self.memory is None else self.memory.view(self.first_place + which)

    def _assign(self, which: int, tensor: Tensor | None) -> None:
        if self.memory is not None:
            self._held = [self.keys, self.values]
            self.memory.is_left, self.memory = True, None
        self._held[which] = tensor


def memory_for(cache: Cache, new: int) -> CacheMemory | None:
    """Return the memory of a cache with room for a number of new tokens.

    Return ``None`` unless all layers keep all tokens, hold equally many of them, and are not offloaded.
    """
    layers: list[Any] = cache.layers
    if not layers or getattr(cache, "offloading", False):
        return None
    own = layers[0].memory if type(layers[0]) is MemoryLayer else None
    if own is not None and own.has_room(layers, own.tokens + new):
        return own
    if any(type(layer) not in (DynamicLayer, MemoryLayer) for layer in layers):
        return None
    held = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    if not all(isinstance(tensor, Tensor) and tensor.dim() == 4 for tensor in held):
        return None
    tokens = held[0].shape[TOKENS]
    if not tokens or any(tensor.shape[TOKENS] != tokens for tensor in held):
        return None
    memory = CacheMemory.of(held, tokens + new)
    layers[:] = [MemoryLayer(memory, index, layer.device) for index, layer in enumerate(layers)]
    return memory
