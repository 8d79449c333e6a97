"""Attention in segments of one sequence, such as the patches of each image of a call, as tensors that a graph can have
as inputs.

The library divides queries, keys and values at the boundaries of segments, whose number and lengths a graph would fix.
Here the tokens of each segment are one sequence of a padded batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

IMPLEMENTATION = "segmented_flash_attention"
"""Name of the attention of this module for the library, which passes boundaries of segments to implementations with
"flash" in their names."""


class Segments(NamedTuple):
    """Places of tokens in a padded batch with one segment in each row, all int64.

    Attributes:
        tokens: index of the token at each place [segments, longest], 0 at padding.
        present: 1 where a token is, 0 at padding [segments, longest].
        places: index of each token's place in the flattened batch [tokens].
    """

    tokens: Tensor
    present: Tensor
    places: Tensor

    @staticmethod
    def of(boundaries: Tensor) -> Segments:
        """Return the places for segments that follow one another.

        Args:
            boundaries: index of the first token of each segment, and the number of all tokens [segments + 1].
        """
        starts, lengths = boundaries[:-1].long(), boundaries.diff().long()
        index = torch.arange(int(lengths.max()))
        present = index < lengths[:, None]
        tokens = torch.where(present, starts[:, None] + index, 0)
        return Segments(tokens, present.long(), present.flatten().nonzero()[:, 0])


_current: ContextVar[tuple[tuple[Tensor, Segments], ...]] = ContextVar("intaglio_attention_segments", default=())


@contextlib.contextmanager
def known_segments(boundaries: Sequence[Tensor], segments: Sequence[Segments]) -> Iterator[None]:
    """Let attention find the segments of tensors of boundaries, which modules pass on to it."""
    token = _current.set(tuple(zip(boundaries, segments, strict=True)))
    try:
        yield
    finally:
        _current.reset(token)


def attend_in_segments(module: nn.Module) -> None:
    """Let the attention of a module of the library, and of those inside of it, read `known_segments`."""
    configs = [vars(part)["config"] for part in module.modules() if "config" in vars(part)]
    for config in {id(one): one for one in configs}.values():
        config._attn_implementation = IMPLEMENTATION


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the results of attention [1, tokens, heads, channels] for queries, keys and values [1, heads, tokens,
    channels]. The arguments are those of the library."""
    segments = next(one for boundaries, one in _current.get() if boundaries is cu_seq_lens_q)

    def padded(tensor: Tensor) -> Tensor:
        by_token = tensor[0].transpose(0, 1)
        return by_token[segments.tokens.flatten()].unflatten(0, segments.tokens.shape).transpose(1, 2)

    mask, grouped = segments.present.bool()[:, None, None], query.shape[1] != key.shape[1]
    found = scaled_dot_product_attention(
        padded(query), padded(key), padded(value), attn_mask=mask, scale=scaling, enable_gqa=grouped
    )
    return found.transpose(1, 2).flatten(0, 1)[segments.places][None], None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Return no mask, because segments say which tokens attend to each other."""


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _no_mask)
