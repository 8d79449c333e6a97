"""Float modules with a key-value cache as plain tensors, which torch.export can trace: the step of a decoder, and for
encoder-decoders also the encoder and the keys and values of cross-attention.

Each is a copy of the whole model with another forward, so that module paths and selectors are those of the float model.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_outputs import MoEModelOutput

from intaglio.integrations.transformers.steps.decoder_cache import (
    KeyValues,
    cache_name,
    keys_and_values,
    tensors_of,
    windows_of,
)
from intaglio.integrations.transformers.steps.token_blocks import masks_with_blocks
from intaglio.torch_private import assume
from intaglio.tracing.copies.copy_model import copy_with_parameters

EXAMPLE_PAST, EXAMPLE_WINDOW, EXAMPLE_NEW, EXAMPLE_BATCH = 7, 5, 3, 2
EXAMPLE_KEPT = (2, 0, 1, 2)
"""Sizes of the example that is exported, and the new tokens whose logits it returns. torch.export fixes sizes of 0 and
1, and equal sizes look related. Layers with a sliding window hold `EXAMPLE_WINDOW` of the earlier tokens."""
BLOCKS, ADDED, PER_LAYER = "blocks", "added", "per_layer_inputs"
"""Entries of a step for the block of each token (see `token_blocks`), int64 [batch, new], for what is added to the
results of the first layers, float32 [batch, new, layers, channels], and for embeddings that each layer has for itself,
of the same axes, an argument of decoders with this name."""
OF_TOKENS = (BLOCKS, ADDED, PER_LAYER)
VISUAL_PLACES, VISUAL_RESULTS, ADD_RESULTS = "visual_pos_masks", "deepstack_visual_embeds", "_deepstack_process"
"""Arguments of decoders that add results of layers of a vision model to those of their first layers: where the tokens
of images are [batch, new], and the results for these tokens; and their method that adds them."""
LOGITS_TO_KEEP = "logits_to_keep"
"""Argument of forward for the tokens whose logits are computed, as a number of the last ones or as indices."""


class TracedLayer(DynamicLayer):
    """A layer of a cache that holds the past of a call and keeps new keys and values apart."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no annotation here
        self.keys, self.values, self.is_initialized = keys, values, True
        self.dtype, self.device = keys.dtype, keys.device
        self.new: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all."""
        self.new = key_states, value_states
        return super().update(key_states, value_states, *args, **kwargs)

    @property
    def made(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the new tokens."""
        assert self.new is not None, type(self)  # every layer of a cache is updated once
        return self.new

    def get_seq_length(self) -> int:
        """Return the length, which may be a dynamic dimension."""
        return 0 if self.keys is None else self.keys.shape[-2]


class TracedWindow(TracedLayer):
    """A layer with a sliding window, whose past holds the last ones of the tokens before a call."""

    is_sliding = True

    def __init__(self, keys: Tensor, values: Tensor, before: int) -> None:
        super().__init__(keys, values)
        self.before, self.held = before, keys.shape[-2]

    def get_seq_length(self) -> int:
        """Return the number of tokens before the call, which may be a dynamic dimension."""
        return self.before

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return the number of tokens that the layer attends to, and the number of those before them.

        Args:
            query_length: the number of new tokens; earlier releases of version 5 pass their positions.
        """
        every, _ = super().get_mask_sizes(query_length)
        gone = self.before - self.held
        return every - gone, gone


@dataclass(frozen=True)
class StepNames:
    """Names of the arguments of forward that a step passes on, ``None`` for those that forward does not take.

    Attributes:
        tokens: token ids of the decoder, or their embeddings.
        mask: padding mask of the decoder, of the past and the new tokens.
        positions: positions of the new tokens.
    """

    tokens: str
    mask: str | None
    positions: str | None


def names_of(has_encoder: bool, parameters: Collection[str]) -> StepNames:
    """Return the names for a model with or without an encoder, from the parameters of its forward."""
    start = "decoder_" if has_encoder else ""
    found = [f"{start}{name}" for name in ("attention_mask", "position_ids")]
    mask, positions = (name if name in parameters else None for name in found)
    return StepNames(f"{start}input_ids", mask, positions)


EMBEDDED = StepNames("inputs_embeds", "attention_mask", "position_ids")
"""Names for a decoder inside of another model, which makes the embeddings of its tokens."""


def output_of(result: Any) -> Tensor:
    """Return the logits in the result of a model, or the last hidden state of a decoder without logits."""
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def step_module(model: PreTrainedModel, names: StepNames) -> nn.Module:
    """Return a module that computes logits, and new keys and values, for new tokens after a past.

    Its forward takes a dictionary ``inputs`` with the entries ``tokens`` [batch, new] (embeddings [batch, new,
    channels]), ``mask`` [batch, new] and ``past_mask`` [batch, past], ``positions`` [batch, new] if the model takes
    positions, which may have several numbers for each token [numbers, batch, new], ``kept`` [logits] if the model
    computes logits of some tokens only, with their indices among the new ones, those of `OF_TOKENS` that the decoder
    takes, and for encoder-decoders
    ``encoder_mask`` [batch, source] if the encoder has a mask; the keys and values ``past`` of every layer, those of
    layers with a sliding window for the last tokens of the past only; and for encoder-decoders those of
    cross-attention, ``cross``.
    """
    windows = windows_of(model.config)  # of layers, by their index

    def forward(self: Any, inputs: Mapping[str, Tensor], past: KeyValues, cross: KeyValues = ()) -> Any:
        given = _decoder_arguments(names, inputs, past, windows)
        before = inputs["past_mask"].shape[1]
        layers = [
            TracedWindow(keys, values, before) if index in windows else TracedLayer(keys, values)
            for index, (keys, values) in enumerate(converted(past, model.dtype))
        ]
        cache = Cache(layers=list(layers))
        if cross:
            other = Cache(layers=[TracedLayer(keys, values) for keys, values in converted(cross, model.dtype)])
            given |= _encoder_arguments(self.config, inputs, cross)
            result = _call_with_cache(self, EncoderDecoderCache(cache, other), given)
        else:
            if BLOCKS in inputs:
                assert names.mask is not None, type(self)  # decoders without it have no blocks
                given[names.mask] = _block_masks(self, inputs, cache)
            result = _call_with_cache(self, cache, given)
        return output_of(result), converted([layer.made for layer in layers], torch.float32)

    return with_forward(model, forward)


def converted(pairs: KeyValues, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values in another data type: the model's inside of a step, and float32 outside.

    A model in bfloat16 computes in float32 when it is quantized, and a cache in bfloat16 would round what one call for
    all tokens does not round.
    """
    return [(keys.to(dtype), values.to(dtype)) for keys, values in pairs]


def _decoder_arguments(
    names: StepNames, inputs: Mapping[str, Tensor], past: KeyValues, windows: Collection[int]
) -> dict[str, Any]:
    """Return arguments of the float model's forward, and tell torch.export which sizes are equal."""
    assume(inputs["past_mask"].shape[0] == inputs["tokens"].shape[0])
    lengths = {False: inputs["past_mask"].shape[1]}
    for index, pair in enumerate(past):
        length = lengths.setdefault(index in windows, pair[0].shape[2])
        for tensor in pair:
            assume(tensor.shape[2] == length)
    for name in OF_TOKENS:
        if name in inputs:
            assume(inputs[name].shape[1] == inputs["tokens"].shape[1])
    for name in ("mask", "positions"):
        if name in inputs:
            assume(inputs[name].shape[-1] == inputs["tokens"].shape[1])
    given: dict[str, Any] = {names.tokens: inputs["tokens"]}
    if names.mask:
        given[names.mask] = torch.cat([inputs["past_mask"], inputs["mask"]], 1)
    if names.positions:
        given[names.positions] = inputs["positions"]
    if "kept" in inputs:
        given[LOGITS_TO_KEEP] = inputs["kept"]
    if PER_LAYER in inputs:
        given[PER_LAYER] = inputs[PER_LAYER]
    if ADDED in inputs:
        given |= {VISUAL_PLACES: inputs["mask"], VISUAL_RESULTS: list(inputs[ADDED].unbind(2))}
    return given


def _block_masks(model: Any, inputs: Mapping[str, Tensor], cache: Cache) -> Any:
    """Return the masks of a decoder whose tokens are in blocks."""
    mask = torch.cat([inputs["past_mask"], inputs["mask"]], 1)
    with _masks_of_any_size():
        return masks_with_blocks(model.config, inputs["tokens"], mask, cache, inputs[BLOCKS])


def _encoder_arguments(config: Any, inputs: Mapping[str, Tensor], cross: KeyValues) -> dict[str, Any]:
    """Return arguments that stand for the encoder's results: of these the decoder reads the sizes only, because the
    cache already has the keys and values of cross-attention."""
    keys = cross[0][0]
    for tensor in tensors_of(cross):
        assume(tensor.shape[2] == keys.shape[2])
    hidden = keys.new_zeros(keys.shape[0], keys.shape[2], _encoder_width(config))
    given: dict[str, Any] = {"encoder_outputs": encoder_result(hidden)}
    if "encoder_mask" in inputs:
        assume(inputs["encoder_mask"].shape[1] == keys.shape[2])
        given["attention_mask"] = inputs["encoder_mask"]
    return given


def _encoder_width(config: Any) -> int:
    """Return the number of channels of the encoder's result. Models of two others have a configuration for each."""
    own = getattr(config, "encoder", config)
    return int(getattr(own, "output_hidden_size", None) or own.hidden_size)


def encoder_module(model: PreTrainedModel, arguments: Sequence[str]) -> nn.Module:
    """Return a module that computes the encoder's last hidden state.

    Args:
        model: the float model.
        arguments: names of the encoder's arguments, in the order in which forward takes them.
    """

    def forward(self: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.get_encoder()(**{name: inputs[name] for name in arguments}, return_dict=True).last_hidden_state

    return with_forward(model, forward)


@dataclass
class EncoderResult(MoEModelOutput):
    """The encoder's result with the fields that any decoder of the library reads: those of models with experts, and the
    padding mask of Moonshine."""

    attention_mask: Tensor | None = None


def encoder_result(hidden: Tensor) -> EncoderResult:
    """Return the encoder's last hidden state as the library's encoders return it."""
    return EncoderResult(last_hidden_state=hidden)


def cross_module(model: PreTrainedModel) -> nn.Module:
    """Return a module that computes the keys and values of cross-attention from the encoder's last hidden state."""

    def forward(self: Any, hidden: Tensor) -> list[tuple[Tensor, Tensor]]:
        cache = EncoderDecoderCache(_empty_cache(), _empty_cache())
        tokens = torch.zeros(hidden.shape[0], 1, dtype=torch.long)
        _call_with_cache(self, cache, {"encoder_outputs": encoder_result(hidden), "decoder_input_ids": tokens})
        return converted(keys_and_values(cache.cross_attention_cache), torch.float32)

    return with_forward(model, forward)


def _empty_cache() -> Cache:
    return Cache(layer_class_to_replicate=DynamicLayer)


def _call_with_cache(model: Any, cache: Cache, given: Mapping[str, Any]) -> Any:
    """Return the results of the forward of a model's class, which `with_forward` hides, with a cache that it fills."""
    forward: Callable[..., Any] = types.MethodType(type(model).forward, model)
    name = cache_name(inspect.signature(forward).parameters)
    assert name is not None, type(model)  # `cache_refusal` refuses models without it
    with _masks_of_any_size():
        return forward(**given, **{name: cache}, use_cache=True)


@contextlib.contextmanager
def _masks_of_any_size() -> Iterator[None]:
    """Let the library make the masks of attention without looking for calls that need none.

    torch.export never leaves a mask out, but the search compares the number of tokens in a window with that of all,
    and the graph would then be for calls with more tokens than the window holds.
    """
    make = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = lambda **given: make(**{**given, "allow_is_causal_skip": False})
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]


def with_forward(model: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Return a copy of a model with another forward, whose cache is what that forward passes.

    It shares the parameters, which capture copies anyway and which take most of the memory.
    """
    own = copy_with_parameters(model)
    for config in {id(found): found for part in own.modules() if (found := getattr(part, "config", None))}.values():
        if getattr(config, "use_cache", None) is True:
            vars(config)["use_cache"] = False
    own.forward = types.MethodType(forward, own)
    if hasattr(own, ADD_RESULTS):
        setattr(own, ADD_RESULTS, lambda hidden, _, added: hidden + added)
    return own
