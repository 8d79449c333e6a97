"""The float modules that the programs of a model with a cache are made from, and calls of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import PreTrainedModel

from intaglio.integrations import ExportExample
from intaglio.integrations.transformers.folders import CROSS, DECODER, ENCODER
from intaglio.integrations.transformers.steps import decoder_cache
from intaglio.integrations.transformers.steps.cached_steps import (
    EMBEDDED,
    EXAMPLE_BATCH,
    EXAMPLE_KEPT,
    EXAMPLE_PAST,
    EXAMPLE_WINDOW,
    LOGITS_TO_KEEP,
    PER_LAYER,
    StepNames,
    converted,
    cross_module,
    encoder_module,
    encoder_result,
    names_of,
    step_module,
)
from intaglio.integrations.transformers.steps.calibration_calls import (
    DecoderTokens,
    LazyCalls,
    UserCalls,
    decoder_tokens,
    empty_like,
    example_tokens,
    free_sizes,
    step_inputs,
)
from intaglio.integrations.transformers.steps.decoder_cache import KeyValues

OTHER_ARGUMENTS = frozenset({"use_cache", "return_dict", "labels"})
"""Arguments in batches that a step does not read."""
CLOSE = 1e-3
"""Largest difference of logits, relative to the largest, that counts as none."""


SOUND_AXES = 3
"""Largest number of axes of sounds: samples or frames of each, with features."""


@dataclass(frozen=True)
class FloatProgram:
    """The float module of one program.

    Attributes:
        module: the module.
        calls: its calls, made from the batches of the user each time they are read.
        example: the call from which it is captured.
    """

    module: nn.Module
    calls: LazyCalls
    example: ExportExample


@dataclass(frozen=True)
class FloatPrograms:
    """Float modules of a model and the calls of a user.

    Attributes:
        model: the float model.
        names: names of the decoder's arguments.
        first: the first call of the user.
        step: the step of the decoder.
        keeps_logits: whether the model computes the logits of chosen tokens only.
        encoder_names: names of the encoder's arguments in calls.
        takes_padding: see `ProgramList`.
        empty: keys and values of length 0 for a batch of one.
        encoder: the encoder, for encoder-decoders.
        cross: the keys and values of cross-attention, for encoder-decoders.
    """

    model: PreTrainedModel
    names: StepNames
    first: Mapping[str, Any]
    step: nn.Module
    keeps_logits: bool = False
    encoder_names: tuple[str, ...] = ()
    takes_padding: bool = True
    empty: KeyValues = ()
    encoder: Any = None
    cross: Any = None

    @staticmethod
    def of(model: PreTrainedModel, calls: Iterable[dict[str, Any]], names: StepNames | None = None) -> FloatPrograms:
        """Return the modules of a model.

        Args:
            model: the float model, or a decoder inside of one.
            calls: its calls, by names of arguments.
            names: names of the decoder's arguments (default: those that forward has).
        """
        parameters = inspect.signature(model.forward).parameters
        names = names or names_of(model.config.is_encoder_decoder, parameters)
        source = FloatPrograms(model, names, next(iter(calls)), step_module(model, names))
        if model.config.is_encoder_decoder:
            known = inspect.signature(model.get_encoder().forward).parameters
            own = [name for name in source.first if name in known and name not in OTHER_ARGUMENTS]
            takes_padding = not reads_source_padding(model, source.first)
            if not takes_padding:
                own = [name for name in own if name != "attention_mask"]
            if model.main_input_name == "input_ids" and "attention_mask" not in own:
                own.append("attention_mask")
            source = replace(
                source,
                encoder_names=tuple(own),
                takes_padding=takes_padding,
                encoder=encoder_module(model, own),
                cross=cross_module(model),
            )
        source = replace(source, empty=empty_like(source.past(2), 1))
        may_keep = LOGITS_TO_KEEP in parameters and names.tokens != EMBEDDED.tokens  # an inner decoder has no logits
        return replace(source, keeps_logits=may_keep and source.takes_indices())

    def programs(self, calls: UserCalls) -> dict[str, FloatProgram]:
        """Return the module of every program with its calls, in the order in which a model runs them.

        Args:
            calls: the batches of the user.
        """
        is_pair, found = self.cross is not None, dict[str, FloatProgram]()
        if is_pair:
            found[ENCODER] = FloatProgram(self.encoder, LazyCalls(calls, self.encoder_call), self.encoder_example())
            found[CROSS] = FloatProgram(self.cross, LazyCalls(calls, self.cross_call), self.cross_example())
        found[DECODER] = FloatProgram(self.step, LazyCalls(calls, self.step_call), self.example())
        if is_pair:  # selectors may mean another one of the modules
            found = {name: replace(one, example=replace(one.example, is_part=True)) for name, one in found.items()}
        return found

    @property
    def has_encoder_mask(self) -> bool:
        """Return whether the encoder's mask is one of token ids, which cross-attention reads too."""
        return self.model.main_input_name == "input_ids" and "attention_mask" in self.encoder_names

    def takes_indices(self) -> bool:
        """Return whether the model returns the logits of the tokens in a tensor of indices, and no others."""
        given = example_tokens(decoder_tokens(self.model, self.names, self.first))
        call = self._float_call(step_inputs(given, 0))
        try:
            with torch.no_grad():
                found, every = self.model(**call, **{LOGITS_TO_KEEP: torch.tensor([2, 0])}), self.model(**call)
        except (TypeError, ValueError, RuntimeError):  # a model of its own may take numbers only
            return False
        return bool(torch.allclose(found.logits, every.logits[:, [2, 0]], CLOSE, CLOSE))

    def past(self, length: int) -> KeyValues:
        """Return keys and values of the first tokens of the example, in float32."""
        call = self._float_call(
            step_inputs(example_tokens(decoder_tokens(self.model, self.names, self.first)), 0, length)
        )
        cache = decoder_cache.new_cache(self.cross is not None)  # all its layers keep all tokens
        name = decoder_cache.cache_name(inspect.signature(self.model.forward).parameters)
        assert name is not None, type(self.model)  # `cache_refusal` refuses models without it
        with torch.no_grad():
            self.model(**call, **{name: cache}, use_cache=True)
        return converted(decoder_cache.keys_and_values(decoder_cache.self_attention_of(cache)), torch.float32)

    def _windowed(self, past: KeyValues) -> KeyValues:
        """Return keys and values of which layers with a sliding window have those of the last tokens only."""
        found = list(past)
        for index in decoder_cache.windows_of(self.model.config):
            keys, values = (tensor[:, :, -EXAMPLE_WINDOW:].contiguous() for tensor in past[index])
            found[index] = keys, values
        return found

    def _float_call(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the arguments of the float model for a first step."""
        call: dict[str, Any] = {self.names.tokens: inputs["tokens"]}
        if PER_LAYER in inputs:
            call[PER_LAYER] = inputs[PER_LAYER]
        if self.cross is not None:
            hidden = self.cross_call(self.first)[0][:1].repeat(inputs["tokens"].shape[0], 1, 1)
            call["encoder_outputs"] = encoder_result(hidden)
        return call

    def encoder_call(self, call: Mapping[str, Any]) -> tuple[dict[str, Tensor]]:
        """Return the arguments of the encoder."""
        inputs: dict[str, Any] = {name: call.get(name) for name in self.encoder_names}
        if "attention_mask" in inputs:
            mask = inputs["attention_mask"]
            inputs["attention_mask"] = (
                torch.ones_like(call[self.model.main_input_name]) if mask is None else mask.long()
            )
        return (inputs,)

    def encoder_example(self) -> ExportExample:
        """Return the encoder's arguments to export it with. Sounds get a dynamic length where the model has one; the
        batch and the length of tokens get theirs in any capture."""
        (inputs,) = self.encoder_call(self.first)
        main = inputs[self.model.main_input_name]
        if not main.is_floating_point() or main.dim() > SOUND_AXES:
            return ExportExample((inputs,), None)
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        wide = {name: _repeated(value, max(EXAMPLE_BATCH, len(main))) for name, value in tensors.items()}
        shapes = dict.fromkeys(inputs) | {
            name: dict.fromkeys(range(value.dim()), Dim.AUTO) for name, value in tensors.items()
        }
        return ExportExample(({**inputs, **wide},), (shapes,))

    def cross_call(self, call: Mapping[str, Any]) -> tuple[Tensor]:
        """Return the encoder's last hidden state."""
        with torch.no_grad():
            return (self.encoder(*self.encoder_call(call)),)

    def cross_example(self) -> ExportExample:
        """Return the encoder's result to export keys and values of cross-attention with."""
        (hidden,) = self.cross_call(self.first)
        return ExportExample((_repeated(hidden[:1], EXAMPLE_BATCH),), ({0: Dim.AUTO, 1: Dim.AUTO},))

    def step_call(self, call: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return a step without a past that computes all tokens of a call.

        Queries, keys and values are those of any split into steps, so these calls calibrate all of them.
        """
        given = decoder_tokens(self.model, self.names, call)
        return self._step(given, 0, empty_like(self.empty, given.tokens.shape[0]), call)

    def _step(
        self,
        given: DecoderTokens,
        start: int,
        past: KeyValues,
        call: Mapping[str, Any],
        kept: tuple[int, ...] | None = None,
    ) -> tuple[Any, ...]:
        """Return a step for the tokens from `start` on, with the logits of the new tokens `kept`, or of all."""
        inputs = step_inputs(given, start)
        if self.keeps_logits:
            inputs["kept"] = torch.arange(given.tokens.shape[1] - start) if kept is None else torch.tensor(kept)
        if self.cross is None:
            return inputs, list(past)
        batch = given.tokens.shape[0]
        if self.has_encoder_mask:
            mask = self.encoder_call(call)[0]["attention_mask"]
            inputs["encoder_mask"] = _repeated(mask, batch)
        with torch.no_grad():
            cross = self.cross(*self.cross_call(call))
        return inputs, list(past), [(_repeated(keys, batch), _repeated(values, batch)) for keys, values in cross]

    def example(self) -> ExportExample:
        """Return a step with a past to export, and steps to check: a prompt without a past, and one new token."""
        given = example_tokens(decoder_tokens(self.model, self.names, self.first))
        batch, length = given.mask.shape
        past = self.past(EXAMPLE_PAST)
        call = self._step(given, EXAMPLE_PAST, self._windowed(past), self.first, EXAMPLE_KEPT)
        prompt = self._step(given, 0, empty_like(past, batch), self.first)
        one = self._step(given, length - 1, self._windowed(self.past(length - 1)), self.first, (0,))
        return ExportExample(call, free_sizes(call), (prompt, one), _cached_inputs(call))


def _cached_inputs(call: tuple[Any, ...]) -> dict[int, int | None]:
    """Return the positions of keys and values in a step -> those of new ones in its result, behind the logits. Those of
    cross-attention come from another program."""
    inputs, past, *cross = call
    own = {len(inputs) + index: 1 + index for index in range(2 * len(past))}
    first = len(inputs) + len(own)
    return own | dict.fromkeys(range(first, first + sum(2 * len(pairs) for pairs in cross)))


def _repeated(tensor: Tensor, batch: int) -> Tensor:
    """Return a tensor with the first samples, repeated, for another batch size."""
    return tensor if tensor.shape[0] == batch else tensor[:1].repeat(batch, *[1] * (tensor.dim() - 1))


def may_read_source_padding(model: PreTrainedModel) -> bool:
    """Return whether a model is an encoder-decoder with a padding mask for an encoder's input other than token ids."""
    is_pair, parameters = model.config.is_encoder_decoder, inspect.signature(model.forward).parameters
    return bool(is_pair and model.main_input_name != "input_ids" and "attention_mask" in parameters)


def reads_source_padding(model: PreTrainedModel, call: Mapping[str, Any]) -> bool:
    """Return whether a padding mask of the encoder's input changes what the decoder of a model computes, and the
    decoder's program has no such input: it has the mask of token ids, but encoders of sounds shorten theirs.

    Whisper takes a mask that it does not read.

    Args:
        model: the float model.
        call: a call of the user.
    """
    if not may_read_source_padding(model):
        return False
    given = {**call, "use_cache": False}
    own, features = given.pop("attention_mask", None), given[model.main_input_name]
    sizes = features.shape[1:] if own is None else own.shape[1:]
    with torch.no_grad():
        expected = model(**given).logits
        for size in sizes:
            mask = torch.ones(len(features), size, dtype=torch.long)
            mask[:, max(1, size // 2) :] = 0
            try:
                found = model(**given, attention_mask=mask).logits
            except (IndexError, RuntimeError, ValueError):  # the mask has the size of another axis
                continue
            return not torch.allclose(found, expected, CLOSE, CLOSE)
    return True


def has_source_padding(calls: UserCalls) -> bool:
    """Return whether padding masks of the encoder's input hide anything in the batches of a user."""
    masks = (call.get("attention_mask") for call in calls)
    return any(mask is not None and not mask.all() for mask in masks)
