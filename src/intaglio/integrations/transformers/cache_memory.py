"""Memory of the keys and values of dynamic caches, with room for more tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

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
        shown: the parts that the layers of the cache hold, by place. A cache whose layers hold other tensors, for
            instance after beam search has reordered them, has left this memory.
        tokens: number of tokens that these parts have.
    """

    groups: list[tuple[int, ...]]
    blocks: list[Tensor]
    shown: list[Tensor]
    tokens: int

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
        return CacheMemory(groups, blocks, list(held), held[0].shape[TOKENS])

    def has_room(self, held: Sequence[Tensor], end: int) -> bool:
        """Return whether the layers of a cache still hold the beginning of this memory, and ``end`` tokens fit."""
        if self.blocks[0].is_inference() and not torch.is_inference_mode_enabled():
            return False  # PyTorch writes to such tensors in inference mode only
        return (
            len(held) == len(self.shown)
            and all(map(is_, held, self.shown))
            and all(end <= block.shape[1 + TOKENS] for block in self.blocks)
        )

    def append(self, cache: Cache, new: Sequence[Tensor]) -> None:
        """Copy new keys and values of all places behind those before them, and let the cache hold them."""
        count = new[0].shape[TOKENS]
        for places, block in zip(self.groups, self.blocks, strict=True):
            free = block.narrow(1 + TOKENS, self.tokens, count).unbind()
            foreach_copy(list(free), [new[place] for place in places])
        self.show(cache, self.tokens + count)

    def show(self, cache: Cache, tokens: int) -> None:
        """Let the layers of a cache hold the first ``tokens`` tokens of this memory."""
        for places, block in zip(self.groups, self.blocks, strict=True):
            for place, tensor in zip(places, block.narrow(1 + TOKENS, 0, tokens).unbind(), strict=True):
                self.shown[place] = tensor
        self.tokens = tokens
        layers: list[Any] = cache.layers
        for layer, keys, values in zip(layers, self.shown[::2], self.shown[1::2], strict=True):
            layer.keys, layer.values = keys, values


_MEMORY: WeakKeyDictionary[Cache, CacheMemory] = WeakKeyDictionary()
"""Memory of dynamic caches to which tokens were appended."""


def memory_for(cache: Cache, new: int) -> CacheMemory | None:
    """Return the memory of a cache with room for a number of new tokens.

    Return ``None`` unless all layers keep all tokens, hold equally many of them, and are not offloaded.
    """
    layers: list[Any] = cache.layers
    if not layers or any(type(layer) is not DynamicLayer for layer in layers) or getattr(cache, "offloading", False):
        return None
    held = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    own = _MEMORY.get(cache)
    if own is not None and own.has_room(held, own.tokens + new):
        return own
    if not all(isinstance(tensor, Tensor) and tensor.dim() == 4 for tensor in held):
        return None
    tokens = held[0].shape[TOKENS]
    if not tokens or any(tensor.shape[TOKENS] != tokens for tensor in held):
        return None
    _MEMORY[cache] = CacheMemory.of(held, tokens + new)
    return _MEMORY[cache]
