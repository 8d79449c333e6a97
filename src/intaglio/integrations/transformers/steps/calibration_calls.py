"""Calls of the steps of a decoder with a cache: for calibration, for torch.export, and to check what it made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import PreTrainedModel

from intaglio.errors import CalibrationError, InputError
from intaglio.integrations.transformers.folders import Numbering
from intaglio.integrations.transformers.steps.cached_steps import (
    EXAMPLE_BATCH,
    EXAMPLE_NEW,
    EXAMPLE_PAST,
    OF_TOKENS,
    StepNames,
)
from intaglio.integrations.transformers.steps.decoder_cache import KeyValues
from intaglio.quant.calibrate.batches import batches, binder_for

StepCall = tuple[Any, ...]
"""Arguments of a step: inputs, past, and keys and values of cross-attention for encoder-decoders."""


@dataclass(frozen=True)
class DecoderTokens:
    """Tokens of a decoder with their padding mask and positions, each [batch, length].

    Embeddings of tokens have a further axis for their channels, and positions with several numbers for each token one
    in front. What else belongs to each token, [batch, length, ...], is in ``others``.
    """

    tokens: Tensor
    mask: Tensor
    positions: Tensor | None
    others: Mapping[str, Tensor] = field(default_factory=dict)


def padded_positions(mask: Tensor) -> Tensor:
    """Return the positions of tokens that `generate` uses: padding does not count, and has position 0."""
    return (mask.long().cumsum(1) - 1).masked_fill(mask == 0, 0)


def own_positions(numbering: Numbering, tokens: Tensor, start: int, mask: Tensor | None) -> Tensor:
    """Return the positions of tokens in a call without positions, int64 [batch, new].

    Args:
        numbering: how they are computed.
        tokens: the new tokens [batch, new].
        start: number of earlier tokens.
        mask: padding mask of earlier and new tokens [batch, start + new]; ``None`` if none of them is padding.

    Raises:
        InputError: it is not known how they are computed.
    """
    if numbering == "mask" and mask is None:
        numbering = "tokens"
    if numbering == "tokens":
        return torch.arange(start, start + tokens.shape[1], device="cpu").expand(tokens.shape[:2])
    if numbering == "mask":
        assert mask is not None
        return padded_positions(mask)[:, start:]
    if numbering is None:
        problem = "it has no positions, which the float model computes in a way that is not known"
        raise InputError("call", None, problem, remedy="pass the positions of the tokens")
    kept = tokens != numbering
    return (kept.long().cumsum(1) + start).masked_fill(~kept, 0) + numbering


class UserCalls:
    """The batches of a user as keyword arguments of the float model, each time they are read."""

    def __init__(self, model: PreTrainedModel, data: Any) -> None:
        self.model, self.data, self._bind = model, data, binder_for(model)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        names = list(self._bind.names)
        for batch in batches(self.data):
            labels = batch.get("labels") if isinstance(batch, Mapping) else None
            args, kwargs = self._bind(batch)
            found = {**dict(zip(names, args, strict=False)), **kwargs}
            yield found | ({} if labels is None else {"labels": labels})


def decoder_tokens(model: PreTrainedModel, names: StepNames, call: Mapping[str, Any]) -> DecoderTokens:
    """Return the decoder's tokens in a call. Encoder-decoders may have labels instead.

    Raises:
        CalibrationError: the call has neither.
    """
    tokens = call.get(names.tokens)
    if tokens is None and call.get("labels") is not None and model.config.is_encoder_decoder:
        tokens = _shifted_labels(model, call)
    if tokens is None:
        raise CalibrationError(
            "data",
            None,
            f"a batch has {', '.join(sorted(call))}, but no {names.tokens}",
            remedy=f"add '{names.tokens}' to the batches",
        )
    mask = call.get(names.mask) if names.mask else None
    mask = torch.ones(tokens.shape[:2], dtype=torch.long) if mask is None else mask.long()
    positions = call.get(names.positions) if names.positions else None
    if names.positions and positions is None:
        positions = padded_positions(mask)
    others = {name: call[name] for name in OF_TOKENS if name in call}
    return DecoderTokens(tokens, mask, None if positions is None else expanded_positions(positions, tokens), others)


def expanded_positions(positions: Tensor, tokens: Tensor) -> Tensor:
    """Return positions [..., 1 or batch, length] for every sample of these tokens."""
    return positions.expand(*positions.shape[:-2], *tokens.shape[:2])


def _shifted_labels(model: PreTrainedModel, call: Mapping[str, Any]) -> Tensor:
    """Return the tokens that the decoder of the float model receives in a call with labels."""
    received: list[Tensor] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        received.append(args[0] if args else kwargs["input_ids"])

    decoder: nn.Module = model.get_decoder()
    handle = decoder.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with torch.no_grad():
            model(**{**call, "use_cache": False})
    finally:
        handle.remove()
    return received[0]


def step_inputs(given: DecoderTokens, start: int, stop: int | None = None) -> dict[str, Tensor]:
    """Return the inputs of a step that computes tokens ``start`` to ``stop`` after those before."""
    inputs = {
        "tokens": given.tokens[:, start:stop],
        "mask": given.mask[:, start:stop],
        "past_mask": given.mask[:, :start],
    }
    if given.positions is not None:
        inputs["positions"] = given.positions[..., start:stop]
    return inputs | {name: tensor[:, start:stop] for name, tensor in given.others.items()}


def example_tokens(given: DecoderTokens) -> DecoderTokens:
    """Return tokens of the sizes to export, repeated from those of a batch. No token is padding."""
    length = EXAMPLE_PAST + EXAMPLE_NEW
    times = -(-length // given.tokens.shape[1])

    def repeated(tensor: Tensor) -> Tensor:
        return tensor[:1].repeat(EXAMPLE_BATCH, times, *[1] * (tensor.dim() - 2))[:, :length]

    tokens = repeated(given.tokens)
    mask, positions = torch.ones(tokens.shape[:2], dtype=torch.long), given.positions
    if positions is not None:
        positions = padded_positions(mask).expand(*positions.shape[:-2], *mask.shape)
    return DecoderTokens(tokens, mask, positions, {name: repeated(tensor) for name, tensor in given.others.items()})


def empty_like(past: KeyValues, batch: int) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of length 0 for another batch size."""
    return [
        (k.new_zeros(batch, k.shape[1], 0, k.shape[3]), v.new_zeros(batch, v.shape[1], 0, v.shape[3])) for k, v in past
    ]


def free_sizes(call: StepCall) -> Any:
    """Return the dynamic shapes of a step: batch, number of tokens and length of the past, and of the source."""
    inputs, *caches = call
    free = {name: range(2 if name in OF_TOKENS else value.dim()) for name, value in inputs.items()}
    shapes: list[Any] = [{name: dict.fromkeys(own, Dim.AUTO) for name, own in free.items()}]
    axes = {0: Dim.AUTO, 2: Dim.AUTO}
    return (*shapes, *[[(axes, axes) for _ in pairs] for pairs in caches])


class LazyCalls:
    """Calls that a function makes from the batches of a user, each time they are read."""

    def __init__(self, source: Iterable[Any], make: Any) -> None:
        self.source, self.make = source, make

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, self.source)
