"""Conversion between the caches of ``transformers`` and the tensors that the program of a decoder takes and returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
)

from intaglio.errors import InputError
from intaglio.integrations.transformers.steps.cache_memory import MemoryLayer, layers_of, memory_for
from intaglio.ir import TensorType
from intaglio.signature import TORCH_DTYPES, Integers

KeyValues = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of every layer, each of shape [batch, heads, length, head size]."""
GROWING = (DynamicLayer, DynamicSlidingWindowLayer)
"""Kinds of layers of caches that hold keys and values of all tokens, or of the latest ones."""
CACHE_NAMES = ("cache", "past_key_values")
"""Names of forward's argument and result for the cache. Releases of the library before 5.24 use the second."""
ALL_TOKENS = "full_attention"
"""Key of the mask of layers that attend to all earlier tokens, among the masks of several kinds of layers."""
USE_DYNAMIC = "leave the cache and cache_implementation out, or pass transformers.DynamicCache()"


def cache_name(names: Iterable[str]) -> str | None:
    """Return the name of the cache among names of arguments or results, or ``None`` if there is none."""
    known = set(names)
    return next((name for name in CACHE_NAMES if name in known), None)


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of a model's configuration that is for its decoder, or all of it.

    `get_text_config` copies the configurations of encoder-decoders that have no such part.
    """
    found: PreTrainedConfig = config.get_text_config(decoder=True)
    return found if any(found is part for part in vars(config).values()) else config


def unsupported_layer(config: PreTrainedConfig) -> str | None:
    """Return the kind of the first layer whose cache does not consist of keys and values, or ``None``."""
    layers = layers_of(DynamicCache(config=config.get_text_config(decoder=True)))
    return next((type(layer).__name__ for layer in layers if type(layer) not in GROWING), None)


def windows_of(config: PreTrainedConfig) -> dict[int, int]:
    """Return the layers whose keys and values are needed for the last tokens only: index of the layer -> sliding
    window, in tokens. The result is empty for windows of several sizes, because programs then take all tokens.
    """
    layers = enumerate(DynamicCache(config=config.get_text_config(decoder=True)).layers)
    found = {index: layer.sliding_window for index, layer in layers if type(layer) is DynamicSlidingWindowLayer}
    return found if len(set(found.values())) == 1 else {}


def new_cache(is_encoder_decoder: bool, config: PreTrainedConfig | None = None) -> Cache:
    """Return an empty cache that grows with every call. With a configuration, layers with a sliding window keep the
    tokens of their window only."""
    own = DynamicCache(config=config)
    return EncoderDecoderCache(own, DynamicCache()) if is_encoder_decoder else own


def self_attention_of(cache: Cache) -> Cache:
    """Return the part of a cache that is for the tokens of the decoder."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def keys_and_values(cache: Cache) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of every layer of a cache that has them."""
    return [(layer.keys, layer.values) for layer in layers_of(cache)]


def tensors_of(pairs: KeyValues) -> list[Tensor]:
    """Return keys and values of every layer as one list."""
    return [tensor for pair in pairs for tensor in pair]


def check_layers(cache: Cache, windows: Mapping[int, int]) -> None:
    """Raise `InputError` if the program cannot read a layer of a cache, such as a static one with a sliding window.

    Args:
        cache: a cache of self-attention.
        windows: layers of which the program reads the last tokens only: index -> number of these.
    """
    for index, layer in enumerate(layers_of(cache)):
        if type(layer) in (DynamicLayer, MemoryLayer, StaticLayer):
            continue
        if isinstance(layer, DynamicSlidingWindowLayer):
            if not layer.get_seq_length() or windows.get(index, layer.sliding_window) < layer.sliding_window:
                continue
            problem = f"layer {index} of the cache keeps {layer.sliding_window - 1} tokens, but the program reads more"
        else:
            problem = f"layer {index} of the cache is a {type(layer).__name__}, whose tensors the program cannot read"
        raise InputError("the cache", None, problem, remedy=USE_DYNAMIC)


def past_of(cache: Cache, layers: list[TensorType], batch: int, windows: Mapping[int, int]) -> list[Tensor]:
    """Return keys and values of the tokens before a call, layer by layer.

    An empty layer with a sliding window is replaced by one that keeps all tokens if the program reads them all, as
    programs of earlier releases do.

    Args:
        cache: a cache of self-attention, whose layers `check_layers` accepts.
        layers: types of keys and values of every layer.
        batch: batch size of the call.
        windows: as of `check_layers`.

    Raises:
        InputError: a layer of the cache holds another data type.
    """
    past: list[Tensor] = []
    for index in range(len(layers) // 2):
        layer: Any = cache.layers[index] if index < len(cache.layers) else None
        slides = isinstance(layer, DynamicSlidingWindowLayer)
        if slides and index not in windows:
            layer, slides = DynamicLayer(), False
            cache.layers[index] = layer
        length = int(layer.get_seq_length()) if layer is not None else 0
        for kind, held in zip(layers[2 * index : 2 * index + 2], _tensors(layer), strict=True):
            if not length or held is None:
                sizes: Any = (batch, kind.shape[1], 0, kind.shape[3])
                past.append(_empty(sizes, kind))
                continue
            _check_dtype(index, held, kind)
            end = held.shape[2] if slides else length
            past.append(held[:, :, max(0, end - windows.get(index, end)) : end])
    return past


def _empty(sizes: tuple[int, ...], kind: TensorType) -> Tensor:
    return torch.empty(sizes, dtype=TORCH_DTYPES[kind.dtype])


def check_batch(cache: Cache, batch: int) -> None:
    """Raise `InputError` if a cache of self-attention holds another number of samples than a call has."""
    for layer in cache.layers[:1]:
        held: Tensor | None = getattr(layer, "keys", None)
        if held is not None and held.numel() and held.shape[0] != batch:
            problem = f"it holds tokens of {held.shape[0]} samples, but the call has {batch}"
            remedy = "pass tokens of every sample of the cache, or begin with an empty one"
            raise InputError("the cache", None, problem, remedy=remedy)


def _check_dtype(index: int, held: Tensor, kind: TensorType) -> None:
    """Raise `InputError` unless keys or values have the data type of the program, which a cache of another model may
    lack."""
    if held.dtype is not TORCH_DTYPES[kind.dtype]:
        problem = f"layer {index} holds {held.dtype}, but the program keeps its keys and values as {kind.dtype}"
        raise InputError("the cache", None, problem, remedy="begin with an empty cache: transformers.DynamicCache()")


def quantized_like(new: list[tuple[Tensor, Tensor]], kinds: list[TensorType]) -> list[tuple[Tensor, Tensor]]:
    """Return float32 keys and values as a program with these types of inputs takes them."""
    found = [
        tensor if kind.q is None else Integers.of(tensor, kind.q).values
        for tensor, kind in zip(tensors_of(new), kinds, strict=True)
    ]
    return list(zip(found[::2], found[1::2], strict=True))


def _tensors(layer: Any) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if layer is None else (layer.keys, layer.values)


def append(cache: Cache, new: list[tuple[Tensor, Tensor]], windows: Mapping[int, int]) -> None:
    """Add new keys and values to every layer of a cache.

    Dynamic caches get memory with room for more tokens, so that a step does not copy those before it.

    Args:
        cache: the cache.
        new: new keys and values of every layer.
        windows: as of `check_layers`.
    """
    memory = memory_for(cache, new[0][0].shape[2], windows) if len(new) == len(layers_of(cache)) else None
    if memory is not None:
        memory.append(tensors_of(new))
        return
    for index, (keys, values) in enumerate(new):
        cache.update(keys, values, index)


def cross_attention(cache: EncoderDecoderCache, layers: int) -> list[tuple[Tensor, Tensor]] | None:
    """Return the keys and values of cross-attention, or ``None`` if the cache does not have them yet."""
    if not all(cache.is_updated.get(index) for index in range(layers)):
        return None
    return keys_and_values(cache.cross_attention_cache)[:layers]


def keep_cross_attention(cache: EncoderDecoderCache, new: list[tuple[Tensor, Tensor]]) -> None:
    """Store the keys and values of cross-attention in a cache that does not have them."""
    append(cache.cross_attention_cache, new, {})
    cache.is_updated.update(dict.fromkeys(range(len(new)), True))


def padding_mask(mask: Any, length: int, new: int, name: str) -> Tensor | None:
    """Return the padding mask of all tokens, [batch, length], int64, or ``None`` for calls without one.

    Args:
        mask: the mask of a call: ``None``, [batch, length], or a causal one of four axes as `generate` makes for static
            caches, true or 0 where attention is allowed, alone or among those of other kinds of layers.
        length: number of tokens, the past included.
        new: number of new tokens, the last ones.
        name: name of the argument.

    Raises:
        InputError: the mask has another shape, or is not causal with padding.
    """
    if isinstance(mask, Mapping) and ALL_TOKENS in mask:
        mask = mask[ALL_TOKENS]
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        problem = f"it is a {type(mask).__name__}, which may have other masks than that of a padded batch"
        raise InputError(f"argument '{name}'", None, problem, remedy="pass a mask of shape [batch, length]")
    if mask.dim() == 4:
        return _from_causal(mask, length, new, name)
    if mask.dim() != 2 or mask.shape[1] < length:
        problem = f"its shape is {list(mask.shape)}, but there are {length} tokens with those of the cache"
        raise InputError(f"argument '{name}'", None, problem, remedy="pass a mask of the whole sequence")
    return mask[:, :length].long()


def _from_causal(mask: Tensor, length: int, new: int, name: str) -> Tensor:
    """Return the padding mask from which a causal mask of four axes was made."""
    allowed = (mask if mask.dtype is torch.bool else mask == 0)[:, :, :, :length]
    padding = allowed[:, 0, -1]
    causal = torch.ones(new, length, dtype=torch.bool).tril(length - new)
    # The rows of padding tokens are free: nothing reads what they compute.
    wanted, is_token = causal & padding[:, None], padding[:, length - new :, None]
    if allowed.shape[1] != 1 or not torch.equal(allowed[:, 0] & is_token, wanted & is_token):
        problem = "it is not the causal mask of a padded batch, which the program computes itself"
        raise InputError(f"argument '{name}'", None, problem, remedy="pass a mask of shape [batch, length]")
    return padding.long()
