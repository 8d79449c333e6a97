"""Quantization of models that generate: one program for the decoder's steps, and the encoder's programs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from intaglio.integrations import Quantize
from intaglio.integrations.transformers.folders import PROGRAM_NAMES, ProgramList
from intaglio.integrations.transformers.quantized_generator import (
    QuantizedGenerator,
    generator_with_surface,
)
from intaglio.integrations.transformers.quantized_transformer import QuantizedTransformer
from intaglio.integrations.transformers.steps import decoder_cache
from intaglio.integrations.transformers.steps.cached_steps import (
    names_of,
)
from intaglio.integrations.transformers.steps.calibration_calls import UserCalls
from intaglio.integrations.transformers.steps.float_programs import (
    OTHER_ARGUMENTS,
    FloatPrograms,
    has_source_padding,
    may_read_source_padding,
    reads_source_padding,
)
from intaglio.integrations.transformers.steps.position_numbering import numbering_of
from intaglio.progress import progress_of
from intaglio.quant.calibrate.batches import Call, Use, is_function, peek
from intaglio.runtime import QuantizedModel
from intaglio.signature import clone_tensors

FEW_TOKENS = 2
"""Number of tokens that are generated to see how parts are called in the steps of a cache."""
NOT_FOR_GENERATE = frozenset({"labels", "position_ids", "use_cache", "return_dict", "logits_to_keep"})
"""Arguments of forward that `generate` sets itself."""


def generates_with_cache(model: PreTrainedModel, data: Any) -> bool:
    """Return whether a model generates, with a cache by its configuration or by the first batch."""
    if not isinstance(model, GenerationMixin) or data is None:
        return False
    first = {} if is_function(data) else peek(data)[0]
    wanted = first.get("use_cache") if isinstance(first, Mapping) else None
    configured = getattr(model.config.get_text_config(decoder=True), "use_cache", False)
    return bool(configured if wanted is None else wanted)


def cache_refusal(model: PreTrainedModel, data: Any) -> str | None:
    """Return why a model that generates with a cache cannot have programs with one, or ``None``."""
    parameters = inspect.signature(model.forward).parameters
    if (reason := unsupported_cache(model)) is not None:
        return reason
    if decoder_cache.cache_name(parameters) is None:
        return "its forward has no argument for a cache"
    if is_function(data):
        return "the data is a function, not batches"
    calls = UserCalls(model, data)
    if others := _other_arguments(model, next(iter(calls))):
        return _not_taken(others)
    return unsupported_padding(model, calls)


def _other_arguments(model: PreTrainedModel, call: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments of a call that no program of a model with a cache takes."""
    names = names_of(model.config.is_encoder_decoder, inspect.signature(model.forward).parameters)
    known = {names.tokens, names.mask, names.positions, *OTHER_ARGUMENTS}
    if model.config.is_encoder_decoder:
        known |= {"attention_mask", *inspect.signature(model.get_encoder().forward).parameters}
    return sorted(call.keys() - known)


def _not_taken(names: list[str]) -> str:
    return f"the batches have {', '.join(names)}, which a step of the decoder does not take"


def unsupported_cache(model: PreTrainedModel) -> str | None:
    """Return why no program can take the cache of a model, or ``None``: its layers are keys and values."""
    layer = decoder_cache.unsupported_layer(model.config)
    return None if layer is None else f"a layer of its cache is a {layer}, which holds more than keys and values"


def unsupported_padding(model: PreTrainedModel, data: Any) -> str | None:
    """Return why no program can take the padding of the data, or ``None``."""
    calls = data if isinstance(data, UserCalls) else UserCalls(model, data)
    if not may_read_source_padding(model) or not has_source_padding(calls):  # the second reads all data
        return None
    reads = reads_source_padding(model, next(iter(calls)))
    return "its decoder reads a padding mask of the encoder's input" if reads else None


def unsupported_media(model: PreTrainedModel, data: Any) -> str | None:
    """Return why no program can take the images or sounds in the batches of a decoder, or ``None``.

    Without parts, each token would cost a run of the whole model.
    """
    call = next(iter(UserCalls(model, data)))
    others = [name for name in _other_arguments(model, call) if _is_floating(call[name])]
    return _not_taken(others) if others else None


def unsupported_steps(model: PreTrainedModel, data: Any) -> str | None:
    """Return why a program without a cache cannot compute the steps of ``generate``, or ``None``.

    Steps of RWKV, for example, have the state of the steps before as an argument, and the last token alone.
    """
    if cache_refusal(model, data) is None:
        return None
    call, given = dict(next(iter(UserCalls(model, data)))), set[str]()

    def record(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        given.update(name for name, value in kwargs.items() if _has_tensor(value))

    hook = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        generates = bool(steps_of_generate(model, ((), call)))
    finally:
        hook.remove()
    others = sorted(given - call.keys() - {"input_ids", "attention_mask", *NOT_FOR_GENERATE, *OTHER_ARGUMENTS})
    if not generates or not others:
        return None
    return f"the steps of generate have {', '.join(others)}, which the batches do not have"


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in (value if isinstance(value, (list, tuple)) else [value]))


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def steps_of_generate(model: PreTrainedModel, call: Call) -> list[Use]:
    """Return a function that generates a few tokens for a call without its last token, or none if the model fails to.

    With the last token, parts would get the arguments of the call once more.
    """
    args, kwargs = call
    given = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
    ids = given.get("input_ids")
    length = ids.shape[1] if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] > 1 else None
    inputs = {
        name: value[:, :-1] if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length else value
        for name, value in given.items()
        if name not in NOT_FOR_GENERATE and value is not None
    }

    def generate(model: nn.Module) -> Any:
        tokens = {"max_new_tokens": FEW_TOKENS, "min_new_tokens": FEW_TOKENS}
        return cast(Any, model).generate(**clone_tensors(inputs), **tokens, do_sample=False, num_beams=1)

    try:
        generate(model)
    except Exception:
        return []
    return [generate]


def without_cache(quantized: QuantizedTransformer) -> None:
    """Let a model without a cache generate without one: every step computes all tokens again."""
    if isinstance(quantized, GenerationMixin):
        decoder_cache.decoder_config(quantized.config).use_cache = False
    if quantized.generation_config is not None:
        quantized.generation_config.use_cache = False


def quantize_generator(model: PreTrainedModel, data: Any, quantize: Quantize) -> QuantizedGenerator:
    """Return the int8 model with a cache. See `intaglio.integrations.Integration` for the arguments."""
    calls = UserCalls(model, data)
    source = FloatPrograms.of(model, calls)
    sources, found = source.programs(calls), dict[str, QuantizedModel]()
    for name, one in sources.items():
        with progress_of(name if len(sources) > 1 else ""):
            found[name] = quantize(one.module, one.calls, one.example)
    programs = {name: found[name] for name in PROGRAM_NAMES[-1] if name in found}
    numbering = numbering_of(model, source.names, source.first)
    listed = ProgramList(tuple(programs), numbering, source.takes_padding)
    return generator_with_surface(programs, listed, type(model), model.config, model.generation_config)
