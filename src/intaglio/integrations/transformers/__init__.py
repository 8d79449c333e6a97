"""Quantized models of the library ``transformers``.

`intaglio.quantize` returns a `QuantizedTransformer` for a `PreTrainedModel`, or a `QuantizedGenerator` for one that
generates with a cache. Its class is a subclass of the float
model's class, because the library decides by class in many places (which pipeline accepts a model, whether it
generates), which copies of attributes alone could not answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from intaglio.argument_checks import check_arguments
from intaglio.build import load_program, open_model
from intaglio.errors import ArtifactError
from intaglio.integrations import AdaptedPart, Quantize
from intaglio.integrations.transformers.folders import (
    MODEL_FILE,
    program_file,
    programs_of,
    read_configs,
    read_programs,
)
from intaglio.integrations.transformers.quantized_transformer import QuantizedTransformer, with_surface
from intaglio.integrations.transformers.saved_generators import stored_configs
from intaglio.ops import OpDef
from intaglio.quant.calibrate.batches import Call, Use
from intaglio.runtime import QuantizedModel
from intaglio.runtime.saved.archive import GENERATOR_ENTRY, Contents, read, read_member

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from intaglio.integrations.transformers.quantized_generator import QuantizedGenerator

__all__ = ["QuantizedTransformer", "from_pretrained", "quantize_model", "with_surface"]

logger = logging.getLogger("intaglio")


def quantize_model(model: PreTrainedModel, data: Any, quantize: Quantize) -> QuantizedTransformer | QuantizedGenerator:
    """Return the int8 model with the surface of the float model, and with a cache if the float model has one."""
    from intaglio.integrations.transformers.generation import (
        cache_refusal,
        generates_with_cache,
        quantize_generator,
        without_cache,
    )

    data = list(data) if isinstance(data, Iterator) else data
    if generates_with_cache(model, data):
        if (reason := cache_refusal(model, data)) is None:
            return quantize_generator(model, data, quantize)
        logger.warning("%s: quantized without a key-value cache, because %s", type(model).__name__, reason)
    found = with_surface(
        quantize(model, data, None), type(model), model.config, getattr(model, "generation_config", None)
    )
    without_cache(found)
    return found


def reason_for_parts(model: PreTrainedModel, data: Any) -> str | None:
    """Return why the parts of a model are quantized: it generates with a cache, or from inputs, that programs cannot
    take.
    """
    from intaglio.integrations.transformers.generation import (
        generates_with_cache,
        unsupported_cache,
        unsupported_media,
        unsupported_padding,
        unsupported_steps,
    )

    if not generates_with_cache(model, data):
        return None
    reason = unsupported_cache(model) or unsupported_media(model, data)
    return reason or unsupported_padding(model, data) or unsupported_steps(model, data)


def further_calls(model: PreTrainedModel, call: Call) -> list[Use]:
    """Return a function that generates a few tokens for the first batch, if the model can."""
    from intaglio.integrations.transformers.generation import generates_with_cache, steps_of_generate

    return steps_of_generate(model, call) if generates_with_cache(model, [call[1]]) else []


def adapted_parts(model: PreTrainedModel) -> Mapping[str, AdaptedPart]:
    """Return, by path, the decoder inside of a model that makes the embeddings of its tokens, and vision encoders for
    images of any sizes in one call."""
    from intaglio.integrations.transformers.steps.inner_decoders import inner_decoders
    from intaglio.integrations.transformers.vision.vision_encoders import vision_encoders

    return inner_decoders(model) | vision_encoders(model)


def install_hooks(model: PreTrainedModel) -> None:
    """Install the hooks of models that return results of their layers."""
    from intaglio.integrations.transformers.layer_results import install

    install(model)


def has_collected_layers(module: nn.Module) -> bool:
    """Return whether a model around a module returns results of layers inside of the module."""
    from intaglio.integrations.transformers.layer_results import has_collected_layers

    return has_collected_layers(module)


def decoder_paths(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the paths of the decoder and of the layer in front of the vocabulary, if the model generates.

    Of a decoder without that layer, such as one for embeddings of sentences, it is the path of the model itself.
    """
    from transformers import GenerationMixin
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = model.config
    if not isinstance(model, GenerationMixin):
        is_decoder = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and getattr(config, "is_decoder", True)
        return ("",) if is_decoder and not config.is_encoder_decoder else ()
    generator: Any = model
    found = (generator.get_decoder(), generator.get_output_embeddings())
    return tuple(path for path, module in model.named_modules() if any(module is one for one in found))


@check_arguments
def from_pretrained(
    folder: str | Path,
    *,
    trust: bool = False,
    isa: str | None = None,
    model_class: type[nn.Module] | None = None,
) -> Any:
    """Load an int8 model that ``save_pretrained`` of one wrote, or ``save`` of one that generates.

    Nothing is unpickled, and only ``transformers`` is imported: ``config.json`` names the class, which must be one of
    that library. Code that the folder brings is ignored.

    Args:
        folder: the folder, or the file of a model that generates.
        trust: use the compiled library in the file, as in `intaglio.load`.
        isa: instruction set, as in `intaglio.load`.
        model_class: class of the float model, if it is not part of ``transformers``.

    Returns:
        The int8 model, which is called like the float model and has its class.

    Raises:
        ArtifactError: a file is missing, damaged or malformed, or the class is unknown.
        BuildError: the compilation fails, or this machine does not support the instruction set.

    Examples:
        >>> int8.save_pretrained("folder")
        >>> int8 = intaglio.integrations.transformers.from_pretrained("folder")
    """
    if Path(folder).is_file():
        return opened_generator(Path(folder), read(Path(folder)), trust=trust, isa=isa, model_class=model_class)
    kind, config, generation = read_configs(Path(folder), model_class)

    def loaded(name: str) -> QuantizedModel:
        return load_program(Path(folder) / name, trust=trust, isa=isa)

    if (found := read_programs(Path(folder))) is not None:
        from intaglio.integrations.transformers.quantized_generator import generator_with_surface

        programs = {name: loaded(program_file(name)) for name in found.names}
        return generator_with_surface(programs, found, kind, config, generation)
    return with_surface(loaded(MODEL_FILE), kind, config, generation)


def opened_generator(
    path: Path,
    contents: Contents,
    *,
    trust: bool = False,
    isa: str | None = None,
    operators: Iterable[OpDef] = (),
    model_class: type[Any] | None = None,
) -> QuantizedGenerator:
    """Return the model of a file from its manifest and members, with compiled programs.

    Args:
        path: the file, for errors.
        contents: its contents.
        trust: as in `intaglio.load`.
        isa: as in `intaglio.load`.
        operators: as in `intaglio.load`.
        model_class: class of the float model, if it is not part of ``transformers``.

    Raises:
        ArtifactError: the contents are not valid, or ``transformers`` is missing.
        BuildError: the compilation fails, or this machine does not support the instruction set.
    """
    try:
        from intaglio.integrations.transformers.quantized_generator import generator_with_surface
    except ImportError as error:
        problem = f"it holds a model of transformers, which cannot be imported: {error}"
        raise ArtifactError(str(path), None, problem, remedy="install transformers") from error
    manifest, members = contents
    if GENERATOR_ENTRY not in manifest:
        problem = "it does not hold a model that generates"
        raise ArtifactError(str(path), None, problem, remedy="call intaglio.load(path)")
    found, operators = programs_of(path, manifest[GENERATOR_ENTRY]), tuple(operators)
    kind, config, generation = stored_configs(path, members, model_class)
    programs = {
        name: open_model(
            path, read_member(path, members, program_file(name)), trust=trust, isa=isa, operators=operators
        )
        for name in found.names
    }
    return generator_with_surface(programs, found, kind, config, generation)
