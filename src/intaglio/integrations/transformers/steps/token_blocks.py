"""Masks of decoders whose tokens are in blocks, such as those of an image: a token attends to the later tokens of its
block too.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, masking_utils
from transformers.cache_utils import Cache

from intaglio.integrations.transformers.steps.decoder_cache import cache_name

NO_BLOCK = -1
"""Number of the block of a token that is in none."""


def can_make_masks() -> bool:
    """Return whether this release of the library makes masks with blocks."""
    return "block_sequence_ids" in _parameters()


def _parameters() -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(masking_utils.create_masks_for_generate).parameters)


def masks_with_blocks(
    config: PreTrainedConfig, tokens: Tensor, mask: Tensor, cache: Cache | None, blocks: Tensor
) -> Any:
    """Return the masks that a decoder takes: a tensor, or one for each kind of its layers.

    Args:
        config: configuration of the decoder.
        tokens: embeddings of the new tokens [batch, new, channels].
        mask: padding mask of earlier and new tokens [batch, earlier + new].
        cache: cache with the earlier tokens.
        blocks: block of each new token [batch, new], or `NO_BLOCK`.
    """
    earlier = blocks.new_full((blocks.shape[0], mask.shape[1] - blocks.shape[1]), NO_BLOCK)
    name = cache_name(_parameters())
    assert name is not None, masking_utils  # every release with blocks has it
    make: Any = masking_utils.create_masks_for_generate
    return make(
        config=config,
        inputs_embeds=tokens,
        attention_mask=mask,
        position_ids=None,
        block_sequence_ids=torch.cat([earlier, blocks], 1),
        **{name: cache},
    )


def padding_and_blocks(mask: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the padding mask [batch, length], int64, and the block of each new token [batch, new] from which a mask of
    layers that attend to all earlier tokens was made, if it was made so.

    Args:
        mask: the mask [batch, 1, new, at least length], true or 0 where attention is allowed.
        length: number of tokens, with the earlier ones.
    """
    allowed = (mask if mask.dtype is torch.bool else mask == 0)[:, 0, :, :length]
    new = allowed.shape[1]
    places = torch.arange(length) - (length - new)
    last = torch.where(allowed, places, places[0]).amax(-1).cummax(-1).values  # last token that each may read
    before = torch.cat([last.new_full((len(last), 1), NO_BLOCK), last[:, :-1]], 1)
    in_block = (last > places[-new:]) | (before >= places[-new:])
    return allowed[:, -1].long(), torch.where(in_block, last, NO_BLOCK)


def are_equal(found: Any, expected: Any, is_token: Tensor) -> bool:
    """Return whether masks allow the same for all tokens but padding. ``None`` is a causal mask.

    Args:
        found: masks of a call: a tensor [batch, 1, new, length], or one for each kind of layers.
        expected: masks that `masks_with_blocks` has made.
        is_token: which of the new tokens are none of padding [batch, new].
    """
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            are_equal(found[name], expected[name], is_token) for name in found
        )
    if found is None or not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return found is None
    a, b = (one if one.dtype is torch.bool else one == 0 for one in (found, expected))
    rows = is_token[:, None, :, None]
    return a.shape == b.shape and torch.equal(a & rows, b & rows)
