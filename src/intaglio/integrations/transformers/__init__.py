"""Quantized models of the library ``transformers``.

`intaglio.quantize` returns a `QuantizedTransformer` for a `PreTrainedModel`. Its class is a subclass of the float
model's class, because the library decides by class in many places (which pipeline accepts a model, whether it
generates), which copies of attributes alone could not answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from intaglio.argument_checks import check_arguments
from intaglio.build import load
from intaglio.integrations import Quantize
from intaglio.integrations.transformers.folders import MODEL_FILE, read_configs
from intaglio.integrations.transformers.quantized_transformer import QuantizedTransformer, with_surface

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["QuantizedTransformer", "from_pretrained", "quantize_model", "with_surface"]


def quantize_model(model: PreTrainedModel, data: Any, quantize: Quantize) -> QuantizedTransformer:
    """Return the int8 model with the surface of the float model."""
    return with_surface(quantize(model, data), type(model), model.config, getattr(model, "generation_config", None))


@check_arguments
def from_pretrained(
    folder: str | Path,
    *,
    trust: bool = False,
    isa: str | None = None,
    model_class: type[nn.Module] | None = None,
) -> QuantizedTransformer:
    """Load an int8 model that `QuantizedTransformer.save_pretrained` wrote.

    Nothing is unpickled, and only ``transformers`` is imported: ``config.json`` names the class, which must be one of
    that library. Code that the folder brings is ignored.

    Args:
        folder: the folder.
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
    kind, config, generation = read_configs(Path(folder), model_class)
    return with_surface(load(Path(folder) / MODEL_FILE, trust=trust, isa=isa), kind, config, generation)
