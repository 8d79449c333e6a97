"""The configuration of ``transformers`` that the metadata of a GGUF file means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from intaglio.checkpoints.checkpoint import Checkpoint
from intaglio.checkpoints.gguf_metadata import ARCHITECTURE_KEY, ARCHITECTURES, ModelSettings
from intaglio.checkpoints.tensor_folder import DAMAGED
from intaglio.errors import ArtifactError, UnsupportedError

FILL_MODEL = "fill a float model of your own: stages.with_weights(model, stages.read_checkpoint(path).weights)"
TOKEN_KEYS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
TOKENS_KEY = "tokenizer.ggml.tokens"
OTHER_SETTINGS = ("expert_count", "attention.sliding_window", "attention.scale", "attention.clamp_kqv")
"""Settings that change what a model computes in a way that is not read, unless they are 0."""
DEFAULT_THETA = 10000.0
OUTPUT_LAYER = "lm_head"


def config_entries(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the entries of config.json of the model in a GGUF file.

    Args:
        checkpoint: the checkpoint in the file.

    Raises:
        UnsupportedError: the architecture, or one of its settings, is not read.
        ArtifactError: a setting is missing or malformed.
    """
    settings = ModelSettings.of(checkpoint.metadata)
    if settings.architecture is None:
        problem = (
            f"no model can be built for the architecture {settings.name!r:.60}; {', '.join(ARCHITECTURES)} are read"
        )
        raise UnsupportedError(ARCHITECTURE_KEY, None, problem, remedy=FILL_MODEL)
    _check_settings(settings)
    layers, stored = settings.count("block_count"), len(checkpoint.weights) + len(checkpoint.tensors)
    if layers > stored:
        problem = f"it is {layers}, but the file has {stored} tensors"
        raise ArtifactError(f"{settings.name}.block_count", None, problem, remedy=DAMAGED)
    held = OUTPUT_LAYER in checkpoint.weights or f"{OUTPUT_LAYER}.weight" in checkpoint.tensors
    return {
        "architectures": [settings.architecture.model],
        "hidden_size": settings.count("embedding_length"),
        "intermediate_size": settings.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.key_heads,
        "head_dim": settings.head_size,
        "max_position_embeddings": settings.count("context_length"),
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": settings.number("rope.freq_base", DEFAULT_THETA),
        "rope_scaling": _scaling(settings),
        "sliding_window": None,
        "vocab_size": settings.count("vocab_size", _tokens(settings.metadata)),
        "tie_word_embeddings": not held,
        **token_entries(checkpoint.metadata),
    }


def token_entries(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of special tokens, as the configuration of `generate` names them."""
    found = {name: metadata.get(key) for name, key in TOKEN_KEYS.items()}
    for name, token in found.items():
        if token is not None and (type(token) is not int or token < 0):
            raise ArtifactError(TOKEN_KEYS[name], None, f"it is {token!r:.60}, not a token id", remedy=DAMAGED)
    return {name: token for name, token in found.items() if token is not None}


def inverse_frequencies(settings: ModelSettings) -> torch.Tensor:
    """Return the frequencies of rotary embeddings, as ``transformers`` computes them: float32[channels of a head / 2].

    Raises:
        UnsupportedError: positions are scaled in a way that is not read.
    """
    size, theta = settings.head_size, settings.number("rope.freq_base", DEFAULT_THETA)
    scaling = _scaling(settings)
    exponents = torch.arange(0, size, 2, dtype=torch.int64).to(torch.float32) / size
    return 1.0 / theta**exponents / (1.0 if scaling is None else scaling["factor"])


def _check_settings(settings: ModelSettings) -> None:
    """Raise `UnsupportedError` for settings that are not read."""
    problem, key = None, next((key for key in OTHER_SETTINGS if settings.value(key)), None)
    if key is not None:
        problem = f"it is {settings.value(key)!r:.60}; models without it are read"
    elif settings.value("attention.causal") is False:
        key, problem = "attention.causal", "attention is not causal; decoders are read"
    elif (rotated := settings.count("rope.dimension_count", settings.head_size)) != settings.head_size:
        key, problem = "rope.dimension_count", f"{rotated} of {settings.head_size} channels of a head are rotated"
    elif settings.count("attention.value_length", settings.head_size) != settings.head_size:
        key, problem = "attention.value_length", "heads of keys and values have different sizes"
    if problem is not None:
        raise UnsupportedError(f"{settings.name}.{key}", None, problem, remedy=FILL_MODEL)


def _scaling(settings: ModelSettings) -> dict[str, Any] | None:
    """Return how positions are scaled, as the configuration of ``transformers`` names it."""
    kind, old = settings.value("rope.scaling.type"), settings.value("rope.scale_linear")
    if kind in (None, "none") and old is None:
        return None
    if kind not in (None, "none", "linear"):
        problem = f"positions are scaled by {kind!r:.60}; 'linear' is read"
        raise UnsupportedError(f"{settings.name}.rope.scaling.type", None, problem, remedy=FILL_MODEL)
    key = "rope.scaling.factor" if kind == "linear" else "rope.scale_linear"
    return {"rope_type": "linear", "factor": settings.number(key)}


def _tokens(metadata: Mapping[str, Any]) -> int | None:
    """Return the number of tokens of the tokenizer, if the metadata has them."""
    tokens = metadata.get(TOKENS_KEY)
    return len(tokens) if isinstance(tokens, list) else None
