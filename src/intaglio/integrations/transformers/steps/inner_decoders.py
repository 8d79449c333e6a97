"""Decoders inside of other models, such as those for images and text, as parts with a key-value cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from intaglio.errors import UnsupportedError
from intaglio.integrations import CachedPart, ExportExample
from intaglio.integrations.transformers.steps import decoder_cache
from intaglio.integrations.transformers.steps.cached_steps import EMBEDDED, LOGITS_TO_KEEP, StepNames
from intaglio.integrations.transformers.steps.decoder_runs import inputs_after, output_class, run_tokens
from intaglio.integrations.transformers.steps.float_programs import FloatPrograms
from intaglio.integrations.transformers.steps.position_numbering import numbering_of
from intaglio.integrations.transformers.steps.program_arguments import check_ignorable, windows_of_program

RESULT_ARGUMENTS = ("use_cache", "return_dict")
"""Arguments of forward that its caller reads the result with."""


def inner_decoders(model: PreTrainedModel) -> dict[str, CachedPart]:
    """Return the decoder inside of a model that generates with a cache, by its path, if it takes embeddings of tokens
    that the model makes.
    """
    if not isinstance(model, GenerationMixin) or model.config.is_encoder_decoder:
        return {}
    whole: Any = model
    decoder, use_cache = whole.get_decoder(), getattr(model.config.get_text_config(decoder=True), "use_cache", False)
    if not use_cache or decoder is model or not isinstance(decoder, PreTrainedModel):
        return {}
    parameters = inspect.signature(decoder.forward).parameters
    if EMBEDDED.tokens not in parameters or decoder_cache.cache_name(parameters) is None:
        return {}
    return {path: InnerDecoder(decoder) for path, module in model.named_modules() if module is decoder}


WITH_POSITIONS_OF_TEXT = 4
"""Numbers for each token: that of text, and the time, row and column in an image or a video."""


class InnerDecoder:
    """A decoder that takes embeddings of tokens, a padding mask, positions and a cache.

    Attributes:
        config: its configuration.
        kind: its class.
        names: names of its arguments.
        outside: the submodule that makes the embeddings, which the code around the decoder calls.
    """

    def __init__(self, decoder: PreTrainedModel) -> None:
        self.config, self.kind = decoder.config, type(decoder)
        self._parameters = tuple(inspect.signature(decoder.forward).parameters)
        mask, positions = (name if name in self._parameters else None for name in (EMBEDDED.mask, EMBEDDED.positions))
        self.names = StepNames(EMBEDDED.tokens, mask, positions)
        table = cast(Any, decoder).get_input_embeddings()
        self.outside: Sequence[str] = [path for path, module in decoder.named_modules() if module is table]

    def recorded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what a call without earlier tokens is recorded as, or ``None`` for other calls."""
        given = self._given(args, kwargs)
        cache = given.pop(self._cache_name, None)
        if cache is not None and int(cache.get_seq_length()):
            return None
        for name in RESULT_ARGUMENTS:
            given.pop(name, None)
        inputs = self._inputs(0, given)
        own = {self.names.tokens: "tokens", self.names.mask: "mask", self.names.positions: "positions"}
        return {name: inputs[entry] for name, entry in own.items() if name is not None}

    def float_step(
        self, decoder: nn.Module, calls: Sequence[dict[str, Any]]
    ) -> tuple[nn.Module, Callable[[dict[str, Any]], tuple[Any, ...]], ExportExample]:
        """Return the module that is captured, what makes its arguments of a recorded call, and the call from which it
        is captured.

        Raises:
            UnsupportedError: no program can take the cache or the positions of the decoder.
        """
        where, module = type(decoder).__name__, cast(PreTrainedModel, decoder)
        if (layer := decoder_cache.unsupported_layer(self.config)) is not None:
            problem = f"a layer of its cache is a {layer}, which holds more than keys and values"
            raise UnsupportedError(where, None, problem, remedy="set model.config.use_cache = False")
        if numbering_of(module, self.names, calls[0]) != "tokens":
            problem = "it does not count positions from the first token of a call"
            raise UnsupportedError(where, None, problem, remedy="set model.config.use_cache = False")
        source = FloatPrograms.of(module, calls, self.names)
        return source.step, source.step_call, source.example()

    def run(self, program: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the program for a call of the decoder's forward, and append keys and values of the new tokens to the
        cache.

        Raises:
            InputError: an argument is missing or would change the result in a way that the program cannot.
        """
        given, windows = self._given(args, kwargs), windows_of_program(program, self.config)
        use_cache, as_tuple = given.pop("use_cache", self.config.use_cache), given.pop("return_dict", True) is False
        cache = given.pop(self._cache_name, None)
        if cache is None:
            cache = decoder_cache.new_cache(False, self.config if windows else None)
        decoder_cache.check_layers(cache, windows)
        inputs = self._inputs(int(cache.get_seq_length()), given)
        hidden: Tensor = run_tokens(program, inputs, cache, windows)
        kind, name = output_class(cast(Any, self.kind))
        result = kind(last_hidden_state=hidden, **({name: cache} if use_cache and name else {}))
        return result.to_tuple() if as_tuple else result

    def _inputs(self, start: int, given: dict[str, Any]) -> dict[str, Tensor]:
        """Return the arguments of the program for new tokens, beside keys and values.

        Of positions with several numbers for each token, `generate` passes one number more, in front, for masks.
        """
        positions = given.get(EMBEDDED.positions or "")
        if isinstance(positions, Tensor) and positions.dim() == 3 and positions.shape[0] == WITH_POSITIONS_OF_TEXT:
            given[EMBEDDED.positions or ""] = positions[1:]
        inputs = inputs_after(start, given, self.names, "tokens")
        check_ignorable(given, range(start, start + inputs["tokens"].shape[1]))
        return inputs

    @property
    def _cache_name(self) -> str:
        name = decoder_cache.cache_name(self._parameters)
        assert name is not None, self.kind  # `inner_decoders` leaves out decoders without it
        return name

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, without those that are ``None`` or are for the layer behind the
        decoder."""
        named = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        return {name: value for name, value in named.items() if value is not None and name != LOGITS_TO_KEEP}
