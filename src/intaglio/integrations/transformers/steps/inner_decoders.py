"""Decoders inside of other models, such as those for images and text, as parts with a key-value cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache

from intaglio.errors import InputError, UnsupportedError
from intaglio.integrations import AdaptedPart, ExportExample
from intaglio.integrations.transformers.steps import decoder_cache
from intaglio.integrations.transformers.steps.cached_steps import (
    ADDED,
    BLOCKS,
    EMBEDDED,
    LOGITS_TO_KEEP,
    OF_TOKENS,
    PER_LAYER,
    VISUAL_PLACES,
    VISUAL_RESULTS,
    StepNames,
    output_of,
)
from intaglio.integrations.transformers.steps.decoder_cache import ALL_TOKENS
from intaglio.integrations.transformers.steps.decoder_runs import inputs_after, output_class, run_tokens
from intaglio.integrations.transformers.steps.float_programs import CLOSE, FloatPrograms
from intaglio.integrations.transformers.steps.position_numbering import numbering_of
from intaglio.integrations.transformers.steps.program_arguments import (
    check_ignorable,
    shapes_of_inputs,
    windows_of_program,
)
from intaglio.integrations.transformers.steps.token_blocks import (
    NO_BLOCK,
    are_equal,
    can_make_masks,
    masks_with_blocks,
    padding_and_blocks,
)

RESULT_ARGUMENTS = ("use_cache", "return_dict")
"""Arguments of forward that its caller reads the result with."""
TABLE_OF_LAYERS = "embed_tokens_per_layer"
"""Name of the embeddings that each layer has for itself, in Gemma 3n and Gemma 4."""
MASK_AXES = 4
"""Axes of a mask of attention: batch, heads, new tokens, all tokens."""
WITH_POSITIONS_OF_TEXT = 4
"""Numbers for each token: that of text, and the time, row and column in an image or a video."""


def inner_decoders(model: PreTrainedModel) -> dict[str, AdaptedPart]:
    """Return the decoder inside of a model that generates with a cache of keys and values, by its path, if it takes
    embeddings of tokens that the model makes.
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
    if decoder_cache.unsupported_layer(decoder.config) is not None:
        return {}
    has_blocks = hasattr(type(model), "create_masks_for_generate")
    part = InnerDecoder(decoder, has_blocks and can_make_masks())
    return {path: part for path, module in model.named_modules() if module is decoder}


class InnerDecoder:
    """A decoder that takes embeddings of tokens, a padding mask, positions and a cache.

    Attributes:
        config: its configuration.
        kind: its class.
        names: names of its arguments.
        outside: the submodules that make embeddings, which the code around the decoder calls.
        has_blocks: whether the model around it makes masks in which tokens of images attend to later ones.
        layers_added: number of layers to whose results others are added, as far as calls have shown it.
    """

    def __init__(self, decoder: PreTrainedModel, has_blocks: bool) -> None:
        self.has_blocks, self.layers_added = has_blocks, 0
        self._first: dict[str, Any] | None = {}  # arguments of the first recorded call; None after the check
        self.config, self.kind = decoder.config, type(decoder)
        self._parameters = tuple(inspect.signature(decoder.forward).parameters)
        self._cache_name = decoder_cache.cache_name(self._parameters) or ""  # `inner_decoders` leaves out those without
        mask, positions = (name if name in self._parameters else None for name in (EMBEDDED.mask, EMBEDDED.positions))
        self.names = StepNames(EMBEDDED.tokens, mask, positions)
        tables = [cast(Any, decoder).get_input_embeddings(), getattr(decoder, TABLE_OF_LAYERS, None)]
        named = decoder.named_modules()
        self.outside: Sequence[str] = [path for path, module in named if any(module is one for one in tables)]

    def recorded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what a call without earlier tokens is recorded as, or ``None`` for other calls."""
        given = self._given(args, kwargs)
        cache = given.pop(self._cache_name, None)
        if cache is not None and int(cache.get_seq_length()):
            return None
        for name in RESULT_ARGUMENTS:
            given.pop(name, None)
        if self._first == {}:
            self._first = dict(given)
        inputs = self._inputs(0, given)
        own = {self.names.tokens: "tokens", self.names.mask: "mask", self.names.positions: "positions"}
        own |= {name: name for name in OF_TOKENS if name in inputs}
        return {name: inputs[entry] for name, entry in own.items() if name is not None}

    def float_step(
        self, decoder: nn.Module, calls: Sequence[dict[str, Any]]
    ) -> tuple[nn.Module, Callable[[dict[str, Any]], tuple[Any, ...]], ExportExample]:
        """Return the module that is captured, what makes its arguments of a recorded call, and the call from which it
        is captured.

        Raises:
            UnsupportedError: no program can take the masks or the positions of the decoder.
        """
        where, module = type(decoder).__name__, cast(PreTrainedModel, decoder)
        if numbering_of(module, self.names, calls[0]) != "tokens":
            problem = "it does not count positions from the first token of a call"
            raise UnsupportedError(where, None, problem, remedy="set model.config.use_cache = False")
        source = FloatPrograms.of(module, calls, self.names)
        if not self._has_results_of(module, source.step, source.step_call(calls[0])):
            problem = "a step without earlier tokens has other results than the decoder in the model"
            raise UnsupportedError(where, None, problem, remedy="set model.config.use_cache = False")
        return source.step, source.step_call, source.example()

    def _has_results_of(self, decoder: nn.Module, step: nn.Module, call: tuple[Any, ...]) -> bool:
        """Return whether the step of the first recorded call has the results that the decoder has in that call. It is
        compared once."""
        given, self._first = self._first, None
        if given is None:
            return True
        with torch.no_grad():
            expected, found = output_of(decoder(**given, use_cache=False)), step(*call)[0]
        kept = call[0]["mask"].bool()  # the results for padding are not read
        return bool((found - expected)[kept].abs().max() <= CLOSE * expected[kept].abs().max())

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
        shapes = shapes_of_inputs(program)
        if ADDED in shapes:
            self.layers_added = cast(int, shapes[ADDED][2])
        inputs = self._inputs(int(cache.get_seq_length()), given, cache)
        if len(shapes.get("positions", ())) > inputs.get("positions", inputs["mask"]).dim():  # those of text
            inputs["positions"] = inputs["positions"].expand(cast(int, shapes["positions"][0]), -1, -1)
        hidden: Tensor = run_tokens(program, inputs, cache, windows)
        kind, name = output_class(cast(Any, self.kind))
        result = kind(last_hidden_state=hidden, **({name: cache} if use_cache and name else {}))
        return result.to_tuple() if as_tuple else result

    def _inputs(self, start: int, given: dict[str, Any], cache: Cache | None = None) -> dict[str, Tensor]:
        """Return the arguments of the program for new tokens, beside keys and values.

        Of positions with several numbers for each token, `generate` passes one number more, in front, for masks.
        """
        if self.names.positions in given:
            positions = given[self.names.positions]
            if positions.dim() == 3 and positions.shape[0] == WITH_POSITIONS_OF_TEXT:
                given[self.names.positions] = positions[1:]
        blocks = self._without_blocks(start, given, cache)
        added, per_layer = self._without_added(given), given.pop(PER_LAYER, None)
        inputs = inputs_after(start, given, self.names, "tokens")
        if blocks is not None:
            inputs[BLOCKS] = blocks
        if added is not None:
            inputs[ADDED] = added
        if per_layer is not None:
            inputs[PER_LAYER] = per_layer
        check_ignorable(given, range(start, start + inputs["tokens"].shape[1]))
        return inputs

    def _without_blocks(self, start: int, given: dict[str, Any], cache: Cache | None) -> Tensor | None:
        """Return the block of each new token if the model may have blocks, and put the padding mask in place of masks
        of which they are part.

        Raises:
            InputError: a mask is of another kind.
        """
        tokens = given.get(self.names.tokens)
        if not self.has_blocks or not isinstance(tokens, Tensor) or self.names.mask is None:
            return None
        length, masks = start + tokens.shape[1], given.get(self.names.mask)
        blocks = torch.full(tokens.shape[:2], NO_BLOCK)
        whole = masks.get(ALL_TOKENS, masks) if isinstance(masks, dict) else masks
        if whole is None:
            given.pop(self.names.mask, None)
        if not isinstance(whole, Tensor) or whole.dim() != MASK_AXES:
            if getattr(self.config, "use_bidirectional_attention", None) is True and tokens.shape[1] > 1:
                problem = "without a mask of blocks all tokens attend to each other, which the program does not compute"
                remedy = "pass token_type_ids to the model, as its processor makes them"
                raise InputError(f"argument '{self.names.mask}'", None, problem, remedy=remedy)
            return blocks
        mask, found = padding_and_blocks(whole, length)
        given[self.names.mask] = mask
        if tokens.shape[1] == 1:
            return blocks
        expected = masks_with_blocks(self.config, tokens, mask, cache, found)
        if not are_equal(masks, expected, mask[:, start:].bool()):
            problem = "it is not the mask of a padded batch with blocks, which the program makes itself"
            remedy = "pass a mask of shape [batch, length]"
            raise InputError(f"argument '{self.names.mask}'", None, problem, remedy=remedy)
        return found

    def _without_added(self, given: dict[str, Any]) -> Tensor | None:
        """Return what is added to the results of the first layers, if anything is, and remove it from a call."""
        where, added = given.pop(VISUAL_PLACES, None), given.pop(VISUAL_RESULTS, None)
        tokens = given.get(self.names.tokens)
        if not isinstance(tokens, Tensor) or not (added or self.layers_added):
            return None
        self.layers_added = self.layers_added or len(added)
        found = tokens.new_zeros(*tokens.shape[:2], self.layers_added, tokens.shape[2])
        for index, results in enumerate(added or ()):
            found[where, index] = results
        return found

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, without those that are ``None`` or are for the layer behind the
        decoder."""
        named = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        return {name: value for name, value in named.items() if value is not None and name != LOGITS_TO_KEEP}
