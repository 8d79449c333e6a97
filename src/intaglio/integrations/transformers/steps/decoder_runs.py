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
        InputError: the call has no tokens, or its mask has another shape.
    """
    tokens = given.pop(names.tokens, None)
    if tokens is None:
        raise InputError("call", None, f"it has no {names.tokens}", remedy=f"call the model with {names.tokens}")
    batch, new, mask_name = tokens.shape[0], tokens.shape[1], names.mask or "attention_mask"
    mask = decoder_cache.padding_mask(given.pop(mask_name, None), start + new, new, mask_name)
    if mask is None:
        own, past = (torch.ones(batch, length, dtype=torch.long, device="cpu") for length in (new, start))
    else:
        own, past = mask.narrow(1, start, new), mask.narrow(1, 0, start)
    inputs = {"tokens": tokens, "mask": own, "past_mask": past}
    if names.positions:
        positions = given.pop(names.positions, None)
        if positions is None:
            positions = own_positions(numbering, tokens, start, mask)
        inputs["positions"] = expanded_positions(positions, tokens)
    return inputs


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
    past_length = inputs["past_mask"].shape[1]
    if past_length and (logits := run_growing_step(program, inputs, cache, cross, windows)) is not None:
        return logits
    past = decoder_cache.past_of(cache, types_of_argument(program, PAST), inputs["tokens"].shape[0], windows)
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
