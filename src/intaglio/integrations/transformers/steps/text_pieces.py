"""Pieces of long texts: a step for each of them takes less time and memory than one for the whole text.

Attention of a whole text computes the scores of all pairs of tokens, also of those that the causal mask and sliding
windows leave out. A piece reads the tokens before it, and in layers with a window the last ones of these.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from intaglio.integrations.transformers.steps.cache_memory import layers_of
from intaglio.integrations.transformers.steps.cached_steps import BLOCKS, OF_TOKENS
from intaglio.integrations.transformers.steps.token_blocks import NO_BLOCK

PIECE = 512
"""Largest number of tokens of a piece. In texts of 2,048 tokens (Qwen2.5-0.5B, 4-bit weights), pieces of 256 take the
same time, pieces of 1,024 take 1.06 times as long, and the whole text 1.13 times."""


def can_divide(tokens: int, cache: Cache) -> bool:
    """Return whether a text is longer than a piece, and all layers of its cache are dynamic.

    Copies of such layers stay as they are while the cache grows.
    """
    return tokens > PIECE and all(isinstance(layer, DynamicLayer) for layer in layers_of(cache))


def pieces(inputs: dict[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], Tensor | slice]]:
    """Yield the steps that compute a text, each for about as many of its tokens: their inputs, and the positions of the
    logits that they return among those of the text. No piece ends inside of a block, whose tokens attend to each other.

    Args:
        inputs: arguments of a step for the text, as `cached_steps.step_module` takes them.
    """
    length, before = inputs["tokens"].shape[1], inputs["past_mask"].shape[1]
    size = -(-length // -(-length // PIECE))
    mask = torch.cat([inputs["past_mask"], inputs["mask"]], 1)
    joined, end = _joined(inputs.get(BLOCKS)), 0
    while end < length:
        begin, end = end, min(end + size, length)
        while end < length and end in joined:
            end += 1
        one = dict(inputs)  # in this order, in which programs take their inputs
        one["past_mask"] = mask[:, : before + begin]
        for name in ("tokens", "mask", "positions", *OF_TOKENS):
            if name in inputs:
                one[name] = inputs[name][..., begin:end] if name == "positions" else inputs[name][:, begin:end]
        places: Tensor | slice = slice(begin, end)
        if "kept" in inputs:
            kept = inputs["kept"]
            places = ((kept >= begin) & (kept < end)).nonzero().flatten()
            one["kept"] = kept[places] - begin
        yield one, places


def _joined(blocks: Tensor | None) -> set[int]:
    """Return the tokens that are in the block of the token before, in any sample."""
    if blocks is None:
        return set()
    same = (blocks[:, 1:] == blocks[:, :-1]) & (blocks[:, 1:] != NO_BLOCK)
    return {index + 1 for index in same.any(0).nonzero().flatten().tolist()}


def run_pieces(run: Callable[[dict[str, Tensor]], Tensor], inputs: dict[str, Tensor], cache: Cache) -> Tensor:
    """Run the steps of a text that `can_divide` accepts, and return the logits, or hidden states, of all.

    Args:
        run: runs a step, and appends to the cache.
        inputs: arguments of a step for the text.
        cache: the cache of self-attention. After an error it is as before.
    """
    before, result = [copy.copy(layer) for layer in cache.layers], None
    try:
        for one, places in pieces(inputs):
            logits = run(one)
            if result is None:
                batch, _, channels = logits.shape
                result = logits.new_empty(batch, len(inputs.get("kept", inputs["tokens"][0])), channels)
            result[:, places] = logits
    except BaseException:
        cache.layers[:] = before
        raise
    assert result is not None, inputs["tokens"].shape  # there are at least two steps
    return result
