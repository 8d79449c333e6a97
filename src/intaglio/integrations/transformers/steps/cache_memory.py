"""Memory of the keys and values of dynamic caches, with room for more tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from intaglio.runtime.calls.growing_calls import TOKENS, EarlierTokens
from intaglio.torch_private import foreach_copy

GROWTH, LEAST_ROOM = 1.25, 64
"""New memory has room for a quarter more tokens than a cache holds, and for 64 more."""


@dataclass
class Block:
    """Memory of keys and values that have the same sizes and the same data type.

    Attributes:
        places: the keys and values in it, by number: 0 and 1 in the first layer, 2 and 3 in the second.
        memory: [tensors, batch, heads, capacity, size].
        kept: the most tokens that are held between calls, for layers with a sliding window.
        first: position of the first token that is held.
    """

    places: tuple[int, ...]
    memory: Tensor
    kept: int | None
    first: int = 0

    @staticmethod
    def of(places: Sequence[int], held: Sequence[Tensor], kept: int | None, new: int) -> Block:
        """Return memory with copies of tensors, and with room for more than a number of new tokens."""
        (batch, heads, tokens, size), dtype = held[0].shape, held[0].dtype
        room = int(GROWTH * (tokens + new)) + LEAST_ROOM
        memory = torch.empty(len(held), batch, heads, room, size, dtype=dtype)
        foreach_copy(list(memory.narrow(1 + TOKENS, 0, tokens).unbind()), list(held))
        return Block(tuple(places), memory, kept)

    def held(self, tokens: int) -> int:
        """Return how many of the tokens of a cache are held."""
        return tokens if self.kept is None else min(tokens, self.kept)

    def make_room(self, tokens: int, new: int) -> None:
        """Move to larger memory unless there is room for new tokens.

        PyTorch writes to tensors of inference mode in this mode only, so elsewhere they are copied too.
        """
        is_writable = torch.is_inference_mode_enabled() or not self.memory.is_inference()
        held = self.held(tokens)
        if not is_writable or self.first + held + new > self.memory.shape[1 + TOKENS]:
            before = self.memory.narrow(1 + TOKENS, self.first, held).unbind()
            self.memory, self.first = Block.of(self.places, before, self.kept, new).memory, 0

    def last(self, tokens: int, read: int | None) -> EarlierTokens:
        """Return the tokens that a program reads, the last ones."""
        held = self.held(tokens)
        count = held if read is None else min(held, read)
        return EarlierTokens(self.memory, self.first + held - count, count)


@dataclass
class CacheMemory:
    """Memory of the keys and values of all layers of a cache, with room for more tokens.

    Attributes:
        blocks: the memory of keys and values of one kind each.
        tokens: number of tokens that the cache has seen.
        is_left: whether a layer holds other tensors by now, so that tokens cannot be appended here.
    """

    blocks: list[Block]
    tokens: int
    is_left: bool = False

    @staticmethod
    def of(layers: Sequence[Any], new: int, windows: Mapping[int, int]) -> CacheMemory | None:
        """Return memory with copies of the keys and values of layers, and with room for new tokens.

        Return ``None`` if the cache is empty, or if layers have seen different numbers of tokens.
        """
        tokens, kinds = layers[0].get_seq_length(), dict[object, list[int]]()
        held = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        kept = [_kept(layer) for layer in layers]
        for place, tensor in enumerate(held):
            least = min(tokens, kept[place // 2] or tokens)
            if not tokens or not isinstance(tensor, Tensor) or tensor.dim() != 4 or tensor.shape[TOKENS] != least:
                return None
            kind = tensor.shape, tensor.dtype, kept[place // 2], windows.get(place // 2)
            kinds.setdefault(kind, []).append(place)
        blocks = [
            Block.of(places, [held[place] for place in places], kept[places[0] // 2], new) for places in kinds.values()
        ]
        return CacheMemory(blocks, tokens)

    def is_read_by(self, layers: Sequence[Any]) -> bool:
        """Return whether all layers of a cache read their tensors here, in the order of the places."""
        here = [layer.first_place for layer in layers if isinstance(layer, _InMemory) and layer.memory is self]
        return not self.is_left and here == [*range(0, sum(len(block.places) for block in self.blocks), 2)]

    def append(self, new: Sequence[Tensor]) -> None:
        """Copy new keys and values of all places behind those before them."""
        count = new[0].shape[TOKENS]
        for block in self.blocks:
            free = block.memory.narrow(1 + TOKENS, block.first + block.held(self.tokens), count).unbind()
            foreach_copy(list(free), [new[place] for place in block.places])
        self.count(count)

    def count(self, new: int) -> None:
        """Count new tokens, which are in the memory by now. Others leave the sliding windows."""
        for block in self.blocks:
            block.first += block.held(self.tokens) + new - block.held(self.tokens + new)
        self.tokens += new

    def view(self, place: int) -> Tensor:
        """Return the keys or values at a place."""
        for block in self.blocks:
            if place in block.places:
                memory = block.memory[block.places.index(place)]
                return memory.narrow(TOKENS, block.first, block.held(self.tokens))
        raise IndexError(f"there are no keys or values at place {place}")


class _InMemory:
    """A layer of a cache whose keys and values are in a `CacheMemory`, and become tensors once they are read.

    A decoder of 24 layers has 48 of them, and a step of one token needs none. Tensors that are assigned, for instance
    after beam search has reordered them, are held by the layer, which has then left the memory.

    Attributes:
        memory: the memory, or ``None`` once the layer has left it.
        first_place: place of its keys there, behind which its values are.
    """

    memory: CacheMemory | None = None
    first_place = 0
    _seen = 0  # tokens, outside of a memory

    def __init__(self, *args: Any) -> None:
        self._held: list[Tensor | None] = [None, None]
        super().__init__(*args)

    def enter(self, memory: CacheMemory, index: int, device: torch.device) -> None:
        """Read keys and values from a memory, as the layer of this index."""
        self.memory, self.first_place = memory, 2 * index
        self.device, self.is_initialized = device, True

    def leave(self) -> None:
        """Hold the tensors that the layer reads from the memory now."""
        if self.memory is not None:
            self._held, self._seen = [self.keys, self.values], self.memory.tokens
            self.memory.is_left, self.memory = True, None

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

    def __copy__(self) -> Any:
        """Return a layer that holds the tensors of this one, because only one cache can append to the memory."""
        copied: Any = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__, memory=None, _held=[self.keys, self.values])
        copied._seen = self._seen if self.memory is None else self.memory.tokens
        return copied

    def _tensor(self, which: int) -> Tensor | None:
        return self._held[which] if self.memory is None else self.memory.view(self.first_place + which)

    def _assign(self, which: int, tensor: Tensor | None) -> None:
        self.leave()
        self._held[which] = tensor


class MemoryLayer(_InMemory, DynamicLayer):
    """A layer in memory that keeps all tokens."""

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return int(super().get_seq_length()) if self.memory is None else self.memory.tokens


class MemoryWindow(_InMemory, DynamicSlidingWindowLayer):
    """A layer in memory that keeps the last tokens, which a sliding window needs."""

    @property
    def cumulative_length(self) -> int:
        """Return the number of tokens that the layer has seen."""
        return self._seen if self.memory is None else self.memory.tokens

    @cumulative_length.setter
    def cumulative_length(self, tokens: int) -> None:
        self.leave()
        self._seen = tokens


DUMMY = getattr(cache_utils, "DummyLayer", None)
"""Layers of a cache for layers of a model without keys and values of their own. Earlier releases lack the class."""
IN_MEMORY = (DynamicLayer, DynamicSlidingWindowLayer, MemoryLayer, MemoryWindow)
"""Layers whose keys and values can be in a memory."""


def _kept(layer: Any) -> int | None:
    """Return the most tokens that a layer holds between calls, if it has a sliding window."""
    return layer.sliding_window - 1 if isinstance(layer, DynamicSlidingWindowLayer) else None


def layers_of(cache: Cache) -> list[Any]:
    """Return the layers of a cache, up to the last one that holds anything: the last layers of a model, such as
    Gemma 3n, may read the keys and values of earlier ones."""
    layers: list[Any] = cache.layers
    count = next((index for index in range(len(layers), 0, -1) if type(layers[index - 1]) is not DUMMY), 0)
    return layers[:count]


def memory_for(cache: Cache, new: int, windows: Mapping[int, int]) -> CacheMemory | None:
    """Return the memory of a cache with room for a number of new tokens.

    Return ``None`` unless all layers are dynamic, have seen equally many tokens, and are not offloaded, or if a layer
    keeps the tokens that leave its window, as assisted generation asks.

    Args:
        cache: the cache of self-attention.
        new: number of new tokens.
        windows: layers of which the program reads the last tokens only: index -> number of these.
    """
    layers = layers_of(cache)
    if not layers or getattr(cache, "offloading", False):
        return None
    if any(type(layer) not in IN_MEMORY or getattr(layer, "record_past", False) for layer in layers):
        return None
    memory = layers[0].memory if isinstance(layers[0], _InMemory) else None
    if memory is not None and memory.is_read_by(layers):
        for block in memory.blocks:
            block.make_room(memory.tokens, new)
        return memory
    memory = CacheMemory.of(layers, new, windows)
    if memory is not None:
        for index, layer in enumerate(layers):
            kept = _kept(layer)
            cache.layers[index] = own = MemoryLayer() if kept is None else MemoryWindow(kept + 1)
            own.enter(memory, index, layer.device)
    return memory
