"""Float models of the library with the weights of a checkpoint that another tool quantized."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from intaglio.checkpoints import Checkpoint, read_checkpoint
from intaglio.checkpoints.gguf_config import config_entries, token_entries
from intaglio.errors import ArtifactError, InputError
from intaglio.integrations.transformers.folders import Configs, configs_of, read_configs
from intaglio.quant.imported_weights.fill_model import fill_model, missing_tensors

logger = logging.getLogger("intaglio")
EXAMPLE_SHAPE = (2, 8)
"""Batch and length of token ids with which a model without data is captured."""
SHOWN_NAMES = 5


def model_from_checkpoint(path: str | Path, model_class: type[nn.Module] | None) -> PreTrainedModel:
    """Return a float model with quantized weights inside, see `intaglio.stages.with_weights`.

    Nothing is downloaded or unpickled, and code that the folder brings is ignored.

    Args:
        path: the folder of the checkpoint, or a GGUF file.
        model_class: class of the model, if it is not part of ``transformers``.

    Raises:
        UnsupportedError: the format is not read.
        ArtifactError: a file is missing, damaged or malformed, or does not fit the class.
    """
    checkpoint = read_checkpoint(path)
    kind, config, generation = _configs(checkpoint, model_class)
    try:
        model = empty_model(kind, config)
    except Exception as error:  # classes check their configurations, and have no errors in common
        problem = f"no {kind.__name__} can be made with its configuration: {type(error).__name__}: {error}"
        raise ArtifactError(checkpoint.path, None, problem, remedy=OTHER_CLASS) from error
    try:
        unknown = fill_model(model, checkpoint.weights, checkpoint.tensors)
    except InputError as error:
        problem = f"it does not fit {kind.__name__}: {error.where}: {error.problem}"
        raise ArtifactError(checkpoint.path, None, problem, remedy=OTHER_CLASS) from error
    _check_complete(model, checkpoint, unknown)
    if generation is not None:
        model.generation_config = generation
    found: PreTrainedModel = model.train(False)
    return found


def _configs(checkpoint: Checkpoint, model_class: type[nn.Module] | None) -> Configs:
    """Return the class of the model and its configurations, from a folder or from the metadata of a GGUF file."""
    path = Path(checkpoint.path)
    if os.path.isdir(path):
        return read_configs(path, model_class)
    tokens: dict[str, Any] = {**token_entries(checkpoint.metadata)}
    return configs_of(path, config_entries(checkpoint), tokens, model_class, OTHER_CLASS)


OTHER_CLASS = "check that the configuration and the tensors belong together, or pass model_class="


def empty_model(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a float32 model whose parameters are on the meta device, and whose buffers have their values."""
    for name in ("quantization_config", "compression_config"):
        if hasattr(config, name):
            delattr(config, name)
    config.dtype = torch.float32
    with _parameters_on_meta():
        model: PreTrainedModel = kind(config)
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let modules that this thread creates have parameters without memory."""
    own = threading.get_ident()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != own:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    register: Any = nn.modules.module.register_module_parameter_registration_hook  # its annotation allows no result
    handle = register(on_meta)
    try:
        yield
    finally:
        handle.remove()


def _check_complete(model: PreTrainedModel, checkpoint: Checkpoint, unknown: tuple[str, ...]) -> None:
    """Raise `ArtifactError` for a model that lacks tensors; log what the model does not use."""
    if missing := missing_tensors(model):
        problem = f"it lacks {len(missing)} tensors of {type(model).__name__}: {_listed(missing)}"
        problem += f"; its tensors {_listed(unknown)} are not known" if unknown else ""
        raise ArtifactError(checkpoint.path, None, problem, remedy=OTHER_CLASS)
    for note in checkpoint.notes:
        logger.info("%s: %s", checkpoint.path, note)
    if unknown:
        logger.warning("%s: %s does not use the tensors %s", checkpoint.path, type(model).__name__, _listed(unknown))


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def example_batch(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return token ids with which a decoder or encoder is captured.

    Raises:
        InputError: the model takes something else.
    """
    if model.main_input_name != "input_ids" or model.config.is_encoder_decoder:
        problem = f"{type(model).__name__} takes more than token ids, so that no example can be made for it"
        raise InputError("from_checkpoint", None, problem, remedy="pass data: from_checkpoint(path, batches)")
    count = EXAMPLE_SHAPE[0] * EXAMPLE_SHAPE[1]
    ids = torch.arange(count) % model.config.get_text_config(decoder=True).vocab_size
    return {"input_ids": ids.reshape(EXAMPLE_SHAPE)}
