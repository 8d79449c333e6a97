"""Quantization of models that generate: one program for the decoder's steps, and the encoder's programs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import GenerationMixin, PreTrainedModel

from intaglio.integrations import ExportExample, Quantize
from intaglio.integrations.transformers import decoder_cache
from intaglio.integrations.transformers.cached_steps import (
    EXAMPLE_BATCH,
    EXAMPLE_KEPT,
    EXAMPLE_PAST,
    KEPT,
    KeyValues,
    StepNames,
    cross_module,
    encoder_module,
    names_of,
    step_module,
)
from intaglio.integrations.transformers.calibration_calls import (
    DecoderTokens,
    LazyCalls,
    UserCalls,
    decoder_tokens,
    empty_like,
    example_tokens,
    free_sizes,
    padded_positions,
    step_inputs,
)
from intaglio.integrations.transformers.quantized_generator import (
    CROSS,
    DECODER,
    ENCODER,
    QuantizedGenerator,
    generator_with_surface,
)
from intaglio.integrations.transformers.quantized_transformer import QuantizedTransformer
from intaglio.quant.calibrate.batches import peek
from intaglio.runtime import QuantizedModel

OTHER_ARGUMENTS = frozenset({"use_cache", "return_dict", "labels"})
"""Arguments in batches that a step does not read."""
CLOSE = 1e-3
"""Largest difference of logits, relative to the largest, that counts as none."""


def generates_with_cache(model: PreTrainedModel, data: Any) -> bool:
    """Return whether a model generates, with a cache by its configuration or by the first batch."""
    if not isinstance(model, GenerationMixin) or data is None:
        return False
    first = {} if _is_function(data) else peek(data)[0]
    wanted = first.get("use_cache") if isinstance(first, Mapping) else None
    configured = getattr(model.config.get_text_config(decoder=True), "use_cache", False)
    return bool(configured if wanted is None else wanted)


def _is_function(data: Any) -> bool:
    return callable(data) and not hasattr(data, "__iter__")


def cache_refusal(model: PreTrainedModel, data: Any) -> str | None:
    """Return why a model that generates with a cache cannot have programs with one, or ``None``."""
    parameters = inspect.signature(model.forward).parameters
    if (layer := decoder_cache.unsupported_layer(model.config)) is not None:
        return f"a layer of its cache is a {layer}, which holds more than keys and values"
    if decoder_cache.cache_name(parameters) is None:
        return "its forward has no argument for a cache"
    if _is_function(data):
        return "the data is a function, not batches"
    names = names_of(model.config, parameters)
    known = {names.tokens, names.mask, names.positions, *OTHER_ARGUMENTS}
    if model.config.is_encoder_decoder:
        known |= {"attention_mask", *inspect.signature(model.get_encoder().forward).parameters}
    if others := sorted(next(iter(UserCalls(model, data))).keys() - known):
        return f"the batches have {', '.join(others)}, which a step of the decoder does not take"
    return None


def without_cache(quantized: QuantizedTransformer) -> None:
    """Let a model without a cache generate without one: every step computes all tokens again."""
    if isinstance(quantized, GenerationMixin):
        quantized.config.get_text_config(decoder=True).use_cache = False
    if quantized.generation_config is not None:
        quantized.generation_config.use_cache = False


def quantize_generator(model: PreTrainedModel, data: Any, quantize: Quantize) -> QuantizedGenerator:
    """Return the int8 model with a cache. See `intaglio.integrations.Integration` for the arguments."""
    calls = UserCalls(model, data)
    source = _Source.of(model, calls)
    programs: dict[str, QuantizedModel] = {}
    if model.config.is_encoder_decoder:
        programs[ENCODER] = quantize(source.encoder, LazyCalls(calls, source.encoder_call), None)
        programs[CROSS] = quantize(source.cross, LazyCalls(calls, source.cross_call), source.cross_example())
    programs = {DECODER: quantize(source.step, LazyCalls(calls, source.step_call), source.example()), **programs}
    counts = _counts_padding(model, source.names, source.first)
    return generator_with_surface(programs, counts, type(model), model.config, model.generation_config)


@dataclass(frozen=True)
class _Source:
    """Float modules of a model and the calls of a user.

    Attributes:
        model: the float model.
        names: names of the decoder's arguments.
        first: the first call of the user.
        step: the step of the decoder.
        keeps_logits: whether the model computes the logits of chosen tokens only.
        encoder_names: names of the encoder's arguments in calls.
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
    empty: KeyValues = ()
    encoder: Any = None
    cross: Any = None

    @staticmethod
    def of(model: PreTrainedModel, calls: UserCalls) -> _Source:
        """Return the modules of a model."""
        parameters = inspect.signature(model.forward).parameters
        names = names_of(model.config, parameters)
        source = _Source(model, names, next(iter(calls)), step_module(model, names))
        if model.config.is_encoder_decoder:
            known = inspect.signature(model.get_encoder().forward).parameters
            own = [name for name in source.first if name in known and name not in OTHER_ARGUMENTS]
            if model.main_input_name == "input_ids" and "attention_mask" not in own:
                own.append("attention_mask")
            source = replace(
                source,
                encoder_names=tuple(own),
                encoder=encoder_module(model, own),
                cross=cross_module(model),
            )
        source = replace(source, empty=empty_like(source.past(2), 1))
        return replace(source, keeps_logits=KEPT in parameters and source.takes_indices())

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
                found, every = self.model(**call, **{KEPT: torch.tensor([2, 0])}), self.model(**call)
        except (TypeError, ValueError, RuntimeError):  # a model of its own may take numbers only
            return False
        return bool(torch.allclose(found.logits, every.logits[:, [2, 0]], CLOSE, CLOSE))

    def past(self, length: int) -> KeyValues:
        """Return keys and values of the first tokens of the example."""
        call = self._float_call(
            step_inputs(example_tokens(decoder_tokens(self.model, self.names, self.first)), 0, length)
        )
        cache = decoder_cache.new_cache(self.cross is not None)  # layers with a sliding window keep all tokens in it
        name = decoder_cache.cache_name(inspect.signature(self.model.forward).parameters)
        assert name is not None, type(self.model)  # `cache_refusal` refuses models without it
        with torch.no_grad():
            self.model(**call, **{name: cache}, use_cache=True)
        return decoder_cache.keys_and_values(decoder_cache.self_attention_of(cache))

    def _float_call(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the arguments of the float model for a first step."""
        call: dict[str, Any] = {self.names.tokens: inputs["tokens"]}
        if self.cross is not None:
            hidden = self.cross_call(self.first)[0][:1].repeat(inputs["tokens"].shape[0], 1, 1)
            call["encoder_outputs"] = (hidden,)
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
        batch, length = given.tokens.shape
        past = self.past(EXAMPLE_PAST)
        call = self._step(given, EXAMPLE_PAST, past, self.first, EXAMPLE_KEPT)
        prompt = self._step(given, 0, empty_like(past, batch), self.first)
        one = self._step(given, length - 1, self.past(length - 1), self.first, (0,))
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
    return tensor if tensor.shape[0] == batch else tensor[:1].expand(batch, *tensor.shape[1:])


def _counts_padding(model: PreTrainedModel, names: StepNames, call: Mapping[str, Any]) -> bool:
    """Return whether padding counts in the positions that the float model computes from a mask."""
    if names.positions is None or names.mask is None or model.config.is_encoder_decoder:
        return True
    given = example_tokens(decoder_tokens(model, names, call))
    mask = given.mask.clone()
    mask[0, :2] = 0
    shared = {names.tokens: given.tokens, names.mask: mask, "use_cache": False}
    with torch.no_grad():
        own = model(**shared).logits
        other = model(**shared, **{names.positions: padded_positions(mask)}).logits
    rows = mask.bool()
    return bool((own - other)[rows].abs().max() > CLOSE * own[rows].abs().max())
