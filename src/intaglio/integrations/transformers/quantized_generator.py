"""`QuantizedGenerator`: int8 programs with a key-value cache behind the surface of a model that generates."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from intaglio.argument_checks import check_arguments, check_arguments_except
from intaglio.errors import InputError
from intaglio.integrations.transformers.folders import (
    CROSS,
    DECODER,
    ENCODER,
    ProgramList,
    program_file,
    write_configs,
    write_programs,
)
from intaglio.integrations.transformers.saved_generators import write_generator
from intaglio.integrations.transformers.steps import decoder_cache
from intaglio.integrations.transformers.steps.cached_steps import LOGITS_TO_KEEP, StepNames, names_of
from intaglio.integrations.transformers.steps.calibration_calls import UserCalls
from intaglio.integrations.transformers.steps.decoder_cache import decoder_config
from intaglio.integrations.transformers.steps.decoder_runs import (
    PAST_OF_ENCODER,
    inputs_after,
    new_output,
    output_class,
    run_tokens,
)
from intaglio.integrations.transformers.steps.float_programs import FloatPrograms
from intaglio.integrations.transformers.steps.program_arguments import (
    check_ignorable,
    input_names,
    types_of_argument,
    windows_of_program,
)
from intaglio.integrations.transformers.surface import TransformerSurface, kept_logits, kept_tokens, quantized_class
from intaglio.output_paths import check_file
from intaglio.runtime import Coverage, QuantizedModel
from intaglio.runtime.reports.clipping import Clipping, ClippingMonitor
from intaglio.runtime.saved.fingerprints import fingerprint_of_programs

if TYPE_CHECKING:
    from intaglio.tune import Comparison

OPTIONAL_ATTRIBUTES = ("hf_quantizer", "hf_device_map")
"""Attributes that ``generate`` looks for in every model. Models have no submodules with these names."""


class QuantizedGenerator(TransformerSurface, nn.Module):
    """Runs a model that generates with int8 programs and a key-value cache.

    One program computes the decoder, for a prompt as well as for one new token: it takes new tokens and the keys and
    values before them, which may be none, and returns logits and the new keys and values. These are kept in the caches
    of the library, in float32 or in int8. Encoder-decoders have a program for the encoder too, and one for the keys
    and values of cross-attention. `generate`, pipelines and direct calls work as with the float model, whose class is a
    base class.

    Attributes:
        programs: the programs by name, each a `QuantizedModel`: "decoder", "encoder" and "cross_attention".
        listed: their names, and what else is stored with them.
    """

    programs: nn.ModuleDict
    _found_config: tuple[Any, Any] = None, None  # a configuration, and the part of it that is the decoder's

    def __init__(self, programs: Mapping[str, QuantizedModel], listed: ProgramList) -> None:
        nn.Module.__init__(self)
        self.programs, self.listed = nn.ModuleDict(programs), listed
        self._clipping = ClippingMonitor()
        for program in programs.values():
            program.share_clipping(self._clipping)
        self.training = False

    # -- calls --------------------------------------------------------------------------------------------------------

    def run_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call of forward, and append keys and values of the new tokens to its cache.

        Arguments beside tokens, masks, positions, the cache and the encoder's inputs are accepted if they are ``None``
        or false.

        Raises:
            InputError: an argument is missing or would change the result in a way that the programs cannot.
        """
        given = {name: value for name, value in self.named_arguments(args, kwargs).items() if value is not None}
        if (use_cache := given.pop("use_cache", None)) is None:
            use_cache = self._decoder_config().use_cache
        as_tuple, kept = given.pop("return_dict", True) is False, given.pop(LOGITS_TO_KEEP, 0)
        cache_name, programs = decoder_cache.cache_name(given), self.programs
        windows, has_encoder = windows_of_program(programs[DECODER], self.config), ENCODER in programs
        config = self.config if windows else None
        cache = given.pop(cache_name) if cache_name else decoder_cache.new_cache(has_encoder, config)
        extra: dict[str, Any] = {}
        if has_encoder:
            cache = cache if isinstance(cache, EncoderDecoderCache) else EncoderDecoderCache(cache, type(cache)())
            extra = {"encoder_last_hidden_state": self._encoder_output(given)}
        logits = self._step(given, cache, windows, extra.get("encoder_last_hidden_state"), kept)
        result_class, cache_name = output_class(cast(Any, self.float_class))
        if use_cache and cache_name:
            extra[cache_name] = cache
        result = new_output(result_class, {"logits": logits, **extra})
        return result.to_tuple() if as_tuple else result

    def _decoder_config(self) -> PreTrainedConfig:
        """Return the configuration of the decoder, which takes the library long to find."""
        known, found = self._found_config
        if known is not self.config:
            known, found = self._found_config = self.config, decoder_config(self.config)
        return found

    def _step(
        self, given: dict[str, Any], cache: Cache, windows: Mapping[int, int], hidden: Tensor | None, kept: Any
    ) -> Tensor:
        """Run the program of the decoder for new tokens, append their keys and values to the cache, and return the
        logits to keep.
        """
        names = _names_of(cast(Any, type(self)), hidden is not None)
        own, program = decoder_cache.self_attention_of(cache), self.programs[DECODER]
        decoder_cache.check_layers(own, windows)
        start = int(own.get_seq_length())
        inputs = inputs_after(start, given, names, self.listed.numbering)
        new = inputs["tokens"].shape[1]
        if keeps := "kept" in input_names(program):
            inputs["kept"] = kept_tokens(new, kept)
        encoder_mask = None if hidden is None else given.pop("attention_mask", None)
        check_ignorable(given, range(start, start + new))
        cross: decoder_cache.KeyValues = ()
        if hidden is not None:
            if "encoder_mask" in input_names(program):
                ones = torch.ones(hidden.shape[:2], dtype=torch.long)
                inputs["encoder_mask"] = ones if encoder_mask is None else encoder_mask.long()
            cross = self._cross_attention(cache, hidden)
        logits = run_tokens(program, inputs, own, windows, cross)
        return logits if keeps else kept_logits(logits, kept)

    def _cross_attention(self, cache: Cache, hidden: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of cross-attention, computed in the first call and kept in the cache."""
        assert isinstance(cache, EncoderDecoderCache)
        kinds = types_of_argument(self.programs[DECODER], PAST_OF_ENCODER)
        if (found := decoder_cache.cross_attention(cache, len(kinds) // 2)) is None:
            found = decoder_cache.quantized_like(self.programs[CROSS](hidden), kinds)
            decoder_cache.keep_cross_attention(cache, found)
        return found

    def _encoder_output(self, given: dict[str, Any]) -> Tensor:
        """Return the encoder's last hidden state, and remove the arguments of the encoder from those of a call."""
        outputs = given.pop("encoder_outputs", None)
        own = {name: given.get(name) for name in input_names(self.programs[ENCODER])}
        given.pop(self.main_input_name, None)
        if "encoder_mask" not in input_names(self.programs[DECODER]):
            mask = given.pop("attention_mask", None)
            if not self.listed.takes_padding and mask is not None and not mask.all():
                problem = "it hides part of the encoder's input, which no batch did when the model was quantized"
                remedy = "quantize the model with batches of which one has padding"
                raise InputError("argument 'attention_mask'", None, problem, remedy=remedy)
        return (self.encode(own) if outputs is None else outputs)[0]

    def encode(self, given: Mapping[str, Any]) -> BaseModelOutput:
        """Run the encoder with arguments by name. A missing mask is one of ones.

        Raises:
            InputError: an argument is missing.
        """
        program, inputs = self.programs[ENCODER], dict[str, Tensor]()
        for name in input_names(program):
            if (value := given.get(name)) is None:
                first = given.get(self.main_input_name)
                if first is None or name != "attention_mask":
                    raise InputError("call", None, f"it has no {name}", remedy=f"call the model with {name}")
                value = torch.ones(first.shape[:2], dtype=torch.long)
            inputs[name] = value.long() if name == "attention_mask" else value
        return BaseModelOutput(last_hidden_state=program(inputs))

    def __getattr__(self, name: str) -> Any:
        """Return a submodule of the float model without its weights, of which `generate` reads attributes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            is_module = not name.startswith("_") and name not in OPTIONAL_ATTRIBUTES
            children: dict[str, Any] = dict(self._structure.named_children()) if is_module else {}
            if name not in children:
                raise
            return children[name]

    @functools.cached_property
    def _structure(self) -> nn.Module:
        """Return the modules of the float model on the meta device, which has no memory."""
        with torch.device("meta"):
            return self.float_class(copy.deepcopy(self.config))

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """Return a module that runs the encoder's program and is called like the encoder of the float model."""
        return _Encoder(self)

    # -- files and copies ---------------------------------------------------------------------------------------------

    @check_arguments
    def save(self, path: str | Path, *, library: bool = True) -> None:
        """Write the model to one file for `intaglio.load`. An existing file is replaced only once the new one is
        complete.

        Args:
            path: the file.
            library: whether to store the compiled programs too, for loading with ``trust=True``.

        Raises:
            ArtifactError: the file cannot be written. An existing file is left unchanged.
        """
        check_file(path)
        float_class, configs = self.float_class, (self.config, self.generation_config)
        write_generator(Path(path), self.named_programs(), self.listed, float_class, *configs, library)

    @check_arguments
    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the model to a folder for `intaglio.integrations.transformers.from_pretrained`.

        The folder gets ``config.json``, ``generation_config.json``, the programs and a list of them. Files of the same
        names are replaced.

        Args:
            save_directory: the folder, which is created if it does not exist.

        Raises:
            ArtifactError: a file cannot be written.
        """
        folder = Path(save_directory)
        write_configs(folder, self.float_class.__name__, self.config, self.generation_config)
        for name, program in self.named_programs().items():
            program.save(folder / program_file(name))
        write_programs(folder, self.listed)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_structure"}

    # -- reports ------------------------------------------------------------------------------------------------------

    @property
    def coverage(self) -> Coverage:
        """Return the share of all programs that runs in int8, and their parts in float."""
        every = [program.coverage for program in self.named_programs().values()]
        notes = dict.fromkeys(note for one in every for note in one.notes)
        before, after = sum(one.bytes_before for one in every), sum(one.bytes_after for one in every)
        return functools.reduce(Coverage.with_body, every).with_sizes(before, after, tuple(notes))

    def fingerprint(self) -> str:
        """Return the SHA-256 digest, as 64 hexadecimal digits, of what determines the logits, as
        `QuantizedModel.fingerprint` does: the programs, and how positions are counted. The configurations do not count.
        """
        programs = {name: program.fingerprint() for name, program in self.named_programs().items()}
        return fingerprint_of_programs(programs, numbering=self.listed.numbering)

    def named_programs(self) -> dict[str, QuantizedModel]:
        """Return the programs by name, as a dictionary."""
        return {name: cast(QuantizedModel, program) for name, program in self.programs.items()}

    @check_arguments_except("float_model")
    def compare(self, float_model: PreTrainedModel, data: Any, *, samples: int | None = None) -> dict[str, Comparison]:
        """Compare every program with the float model, on calls without a past. Results that are int8 caches are left
        out.

        Args:
            float_model: the float model that was quantized.
            data: an iterable of batches, as for `quantize`.
            samples: number of samples after which to stop (default: all).

        Returns:
            The comparisons by name of the program, as `intaglio.compare` makes them.

        Raises:
            InputError: the model is of another class.
        """
        if not isinstance(float_model, self.float_class):
            problem = (
                f"the float model is a {type(float_model).__name__}, but a {self.float_class.__name__} was quantized"
            )
            raise InputError("compare", None, problem, remedy="pass the float model that was quantized")
        from intaglio.tracing import capture
        from intaglio.tune import compare

        programs = self.named_programs()
        calls = UserCalls(float_model, list(data) if isinstance(data, Iterator) else data)
        found: dict[str, Comparison] = {}
        for name, source in FloatPrograms.of(float_model, calls).programs(calls).items():
            example = source.example
            stage = capture(source.module, example.inputs, dynamic_shapes=example.dynamic_shapes)
            found[name] = compare(stage, programs[name], source.calls, samples=samples)
        return found

    @check_arguments
    def assert_int8(self, macs: float = 1.0) -> None:
        """Raise `AssertionError`, with the reasons, if less than this share of multiply-accumulates runs in int8."""
        self.coverage.assert_int8(macs)

    @property
    def clipping(self) -> Clipping:
        """Return which float values calls have had outside of their calibrated ranges, as `QuantizedModel` does."""
        return self._clipping.report()

    @property
    def on_clipping(self) -> str:
        """Return the policy for calls with values outside of their calibrated range, as of `QuantizedModel`."""
        return self._clipping.policy.value

    @on_clipping.setter
    def on_clipping(self, policy: str) -> None:
        self._clipping.set_policy(policy)

    def train(self, mode: bool = True) -> Any:
        """Warn that int8 programs cannot be trained, and change nothing."""
        for program in self.programs.values():
            program.train(mode)
        return self

    def __repr__(self) -> str:
        lines = [f"  {name}: {program!r}" for name, program in self.programs.items()]
        return "\n".join([f"QuantizedGenerator({self.float_class.__name__}:", *lines, ")"])


class _Encoder(nn.Module):
    """Runs the encoder's program of a generator."""

    def __init__(self, generator: QuantizedGenerator) -> None:
        super().__init__()
        self._generator = (generator,)  # in a tuple, so that it does not become a submodule

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutput:
        """Return the last hidden state for arguments of the float model's encoder."""
        (generator,) = self._generator
        named = dict(zip((generator.main_input_name, "attention_mask"), args, strict=False))
        return generator.encode({**named, **kwargs})


def generator_with_surface(
    programs: Mapping[str, QuantizedModel],
    listed: ProgramList,
    float_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    generation_config: GenerationConfig | None,
) -> QuantizedGenerator:
    """Return a generator with these programs and the surface of a class of ``transformers``."""
    generator: QuantizedGenerator = quantized_class(QuantizedGenerator, float_class)(programs, listed)
    generator.keep_configuration(config, generation_config)
    return generator


@functools.cache
def _names_of(model_class: type[QuantizedGenerator], has_encoder: bool) -> StepNames:
    """Return the names of the arguments of a step."""
    return names_of(has_encoder, model_class.forward_parameters)
