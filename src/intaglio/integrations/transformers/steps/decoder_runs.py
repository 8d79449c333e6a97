"""Runs of the program of a decoder with a cache of the library."""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils.generic import ModelOutput

from intaglio.errors import InputError
from intaglio.integrations.transformers.folders import Numbering
from intaglio.integrations.transformers.steps import decoder_cache
from intaglio.integrations.transformers.steps.cached_steps import StepNames
from intaglio.integrations.transformers.steps.calibration_calls import expanded_positions, own_positions
from intaglio.integrations.transformers.steps.program_arguments import (
    run_growing_step,
    run_step,
    runs_now,
    types_of_argument,
)
from intaglio.integrations.transformers.steps.text_pieces import can_divide, run_pieces

TOKEN_AXES = 2
"""Fewest axes of tokens: [batch, length]. Their embeddings have one more."""
PAST, PAST_OF_ENCODER = 1, 2
"""Positional arguments of the decoder's program: keys and values of self-attention and of cross-attention."""


def inputs_after(start: int, given: dict[str, Any], names: StepNames, numbering: Numbering) -> dict[str, Tensor]:
    """Return the arguments of a program for new tokens beside keys and values, and remove them from those of a call.

    Args:
        start: number of tokens before the call.
        given: arguments of the call by name.
        names: names of the decoder's arguments.
        numbering: how positions are computed that the call does not have.

    Raises:
        InputError: the call has no tokens, or these, its mask or its positions have another shape.
    """
    tokens = given.pop(names.tokens, None)
    if tokens is None:
        raise InputError("call", None, f"it has no {names.tokens}", remedy=f"call the model with {names.tokens}")
    if not isinstance(tokens, Tensor) or tokens.dim() < TOKEN_AXES:
        shown = (
            f"its shape is {list(tokens.shape)}" if isinstance(tokens, Tensor) else f"it is a {type(tokens).__name__}"
        )
        remedy = "pass a tensor of shape [batch, length], for one text torch.tensor([ids])"
        raise InputError(f"argument '{names.tokens}'", None, f"{shown}, not a batch of texts", remedy=remedy)
    batch, new, mask_name = tokens.shape[0], tokens.shape[1], names.mask or "attention_mask"
    mask = decoder_cache.padding_mask(given.pop(mask_name, None), start + new, new, mask_name)
    if mask is None:
        own, past = (torch.ones(batch, length, dtype=torch.long, device="cpu") for length in (new, start))
    else:
        mask = _for_every_sample(mask, batch, mask_name)
        own, past = mask.narrow(1, start, new), mask.narrow(1, 0, start)
    inputs = {"tokens": tokens, "mask": own, "past_mask": past}
    if names.positions:
        positions = given.pop(names.positions, None)
        if positions is None:
            positions = own_positions(numbering, tokens, start, mask)
        elif positions.shape[-1] != new:
            problem = f"its shape is {list(positions.shape)}, but the call has {new} tokens"
            remedy = f"pass the positions of the {new} tokens, or leave them out"
            raise InputError(f"argument '{names.positions}'", None, problem, remedy=remedy)
        inputs["positions"] = expanded_positions(positions, tokens)
    return inputs


def _for_every_sample(mask: Tensor, batch: int, name: str) -> Tensor:
    """Return a mask [1 or batch, length] for every sample of a batch. Raise `InputError` for other batch sizes."""
    if mask.shape[0] not in (1, batch):
        problem = f"it is for {mask.shape[0]} samples, but the call has {batch}"
        raise InputError(f"argument '{name}'", None, problem, remedy="pass a mask with a row for every sample")
    return mask.expand(batch, -1)


def run_tokens(
    program: Any,
    inputs: dict[str, Tensor],
    cache: Cache,
    windows: Mapping[int, int],
    cross: decoder_cache.KeyValues = (),
) -> Tensor:
    """Run the program of a decoder for the tokens behind those of a cache, append their keys and values, and return
    logits or hidden states. Long texts of decoders without an encoder are run in pieces.

    Args:
        program: the `QuantizedModel`.
        inputs: its arguments beside keys and values.
        cache: the cache of self-attention.
        windows: layers of which the program reads the last tokens only: index -> number of these.
        cross: keys and values of cross-attention, of every layer of an encoder-decoder.
    """
    if not cross and can_divide(inputs["tokens"].shape[1], cache) and runs_now(program):
        return run_pieces(functools.partial(_run, program, cache, windows, cross), inputs, cache)
    return _run(program, cache, windows, cross, inputs)


def _run(
    program: Any,
    cache: Cache,
    windows: Mapping[int, int],
    cross: decoder_cache.KeyValues,
    inputs: dict[str, Tensor],
) -> Tensor:
    past_length, batch = inputs["past_mask"].shape[1], inputs["tokens"].shape[0]
    decoder_cache.check_batch(cache, batch)
    if past_length and (logits := run_growing_step(program, inputs, cache, cross, windows)) is not None:
        return logits
    past = decoder_cache.past_of(cache, types_of_argument(program, PAST), batch, windows)
    logits, new = run_step(program, inputs, past, cross)
    decoder_cache.append(cache, new, windows)
    return logits


def new_output(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return an object of a class of results with these fields, and ``None`` in the others.

    The library's initialization, which looks at every field several times, takes twice as long.
    """
    if kind.__post_init__ is not ModelOutput.__post_init__:
        return kind(**values)
    names, result = [field.name for field in fields(kind)], kind.__new__(kind)
    vars(result).update(dict.fromkeys(names))
    for name in names:
        if values.get(name) is not None:
            result[name] = values[name]  # an attribute, too
    return result


@functools.cache
def output_class(float_class: type[PreTrainedModel]) -> tuple[Any, str | None]:
    """Return the class of results of forward, from its annotation, and the name of its field for the cache."""
    hint = typing.get_type_hints(float_class.forward)["return"]
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)
    found: Any = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, ModelOutput))
    return found, decoder_cache.cache_name(field.name for field in fields(found))
