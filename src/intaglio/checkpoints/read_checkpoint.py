"""`read_checkpoint`: recognize the format of a checkpoint and find its weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from intaglio.argument_checks import check_arguments
from intaglio.checkpoints.awq import AWQ_METHOD, awq_layers
from intaglio.checkpoints.checkpoint import Checkpoint, Layers, LazyMapping
from intaglio.checkpoints.compressed_tensors import COMPRESSED_METHOD, compressed_layers
from intaglio.checkpoints.gguf import gguf_checkpoint
from intaglio.checkpoints.gguf_file import is_gguf
from intaglio.checkpoints.gptq import GPTQ_METHOD, gptq_layers
from intaglio.checkpoints.tensor_folder import (
    CONFIG_NAME,
    DAMAGED,
    OTHER_PATH,
    QUANTIZE_FLOAT,
    TensorFolder,
    check_no_pickle,
    check_regular,
    read_config,
)
from intaglio.errors import ArtifactError, UnsupportedError
from intaglio.output_paths import expanded

FORMATS: Mapping[str, Callable[[TensorFolder, Mapping[str, Any]], Layers]] = {
    COMPRESSED_METHOD: compressed_layers,
    GPTQ_METHOD: gptq_layers,
    AWQ_METHOD: awq_layers,
}
"""Functions that find the quantized layers of a folder, by ``quant_method`` in config.json."""


@check_arguments
def read_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint that another tool quantized.

    Nothing is unpickled and no code is run. Tensors are read when they are asked for.

    Args:
        path: a folder with config.json and safetensors files of compressed-tensors, GPTQ or AWQ, or a GGUF file.

    Returns:
        The checkpoint, with quantized weights by module path and all other tensors by name. Those of a GGUF file have
        the names of ``transformers`` for the architectures llama, qwen2 and qwen3, else those of the file.

    Raises:
        UnsupportedError: the format is not read; the error names it.
        ArtifactError: a file is missing, damaged or malformed.

    Examples:
        >>> checkpoint = stages.read_checkpoint("Llama-3.2-1B-quantized.w8a8")
        >>> model = stages.with_weights(float_model, checkpoint.weights)
    """
    place = Path(expanded(path))
    if os.path.isdir(place):
        return _from_folder(place)
    check_no_pickle(place)
    check_regular(place)
    if is_gguf(place):
        return gguf_checkpoint(place)
    problem = "it is neither a folder with safetensors files nor a GGUF file"
    raise ArtifactError(str(place), None, problem, remedy=OTHER_PATH)


def _from_folder(folder: Path) -> Checkpoint:
    config = read_config(folder)
    settings = _settings(folder, config)
    method = str(settings.get("quant_method"))
    if method not in FORMATS:
        problem = f"its quantization method is {method!r:.60}; {', '.join(FORMATS)} are read"
        raise UnsupportedError(str(folder), None, problem, remedy=QUANTIZE_FLOAT)
    tensors = TensorFolder(folder)
    layers = FORMATS[method](tensors, settings)
    others = {name: partial(tensors.float_tensor, name) for name in tensors.files if name not in layers.used}
    kind = " ".join([method, *([str(settings["format"])] if "format" in settings else [])])
    return Checkpoint(str(folder), kind, LazyMapping(layers.weights), LazyMapping(others), config, layers.notes)


def _settings(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantization configuration of a folder.

    Raises:
        UnsupportedError: there is none.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if found is None:
        problem = f"its {CONFIG_NAME} has no quantization_config, so its weights are not quantized"
        raise UnsupportedError(str(folder), None, problem, remedy=QUANTIZE_FLOAT)
    if not isinstance(found, dict):
        raise ArtifactError(str(folder / CONFIG_NAME), None, "its quantization_config is not an object", remedy=DAMAGED)
    return found
