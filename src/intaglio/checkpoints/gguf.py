"""Checkpoints in GGUF files: quantized weights and tensors, with the names that they have in ``transformers``."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from intaglio.checkpoints.checkpoint import Checkpoint, LazyMapping
from intaglio.checkpoints.gguf_blocks import BLOCK_TYPES, ScaledGroups
from intaglio.checkpoints.gguf_config import inverse_frequencies
from intaglio.checkpoints.gguf_file import GgufFile
from intaglio.checkpoints.gguf_metadata import ModelSettings
from intaglio.checkpoints.tensor_folder import DAMAGED, QUANTIZE_FLOAT
from intaglio.errors import ArtifactError, UnsupportedError
from intaglio.quant.imported_weights.quantized_weight import QuantizedWeight

GGUF_FORMAT = "gguf"
PARTS_KEY = "split.count"
JOIN_PARTS = "join its parts: llama-gguf-split --merge"
FACTORS_NAME, FREQUENCIES_NAME = "rope_freqs.weight", "model.rotary_emb.inv_freq"
"""The factors by which frequencies of rotary embeddings are divided, and the buffer of the result in the model."""
MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules of a decoder layer by their name in the file."""
LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]*)\.(\w+)", re.ASCII)


def gguf_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a file. Tensors of architectures that are not known keep their names.

    Raises:
        UnsupportedError: the version, or the type of a tensor, is not read, or nothing is quantized.
        ArtifactError: the file is damaged or malformed.
    """
    file = GgufFile(path)
    parts = file.metadata.get(PARTS_KEY, 1)
    if parts not in (0, 1):
        problem = f"it is one of {parts!r:.20} parts of a checkpoint, which are not read"
        raise UnsupportedError(str(path), None, problem, remedy=JOIN_PARTS)
    kinds = {tensor.type_name for tensor in file.tensors.values() if BLOCK_TYPES[tensor.type_name].groups}
    if not kinds:
        raise UnsupportedError(str(path), None, "its weights are not quantized", remedy=QUANTIZE_FLOAT)
    settings = ModelSettings.of(file.metadata)
    weights: dict[str, Callable[[], QuantizedWeight]] = {}
    others: dict[str, Callable[[], torch.Tensor]] = {}
    for name, tensor in file.tensors.items():
        known = name if settings.architecture is None else name_in_model(name)
        module, _, leaf = known.rpartition(".")
        if known in others or (module in weights and leaf == "weight"):
            raise ArtifactError(str(path), None, f"it has two tensors {known!r:.100}", remedy=DAMAGED)
        if BLOCK_TYPES[tensor.type_name].groups and leaf == "weight" and module and len(tensor.shape) > 1:
            weights[module] = partial(_weight, file, name, settings)
        else:
            read = _frequencies if known == FREQUENCIES_NAME else _floats
            others[known] = partial(read, file, name, settings)
    found = " ".join([GGUF_FORMAT, *sorted(kinds)])
    return Checkpoint(str(path), found, LazyMapping(weights), LazyMapping(others), file.metadata)


def name_in_model(name: str) -> str:
    """Return the name in ``transformers`` of a tensor of a file; the same name if it is not known."""
    if name == FACTORS_NAME:
        return FREQUENCIES_NAME
    owner, _, leaf = name.rpartition(".")
    layer = LAYER_NAME.fullmatch(owner)
    if layer is not None and layer[2] in LAYER_MODULES:
        return f"model.layers.{layer[1]}.{LAYER_MODULES[layer[2]]}.{leaf}"
    return f"{MODULES[owner]}.{leaf}" if owner in MODULES else name


def _weight(file: GgufFile, name: str, settings: ModelSettings) -> QuantizedWeight:
    """Return a quantized weight [N, ...]."""
    shape, found = file.tensors[name].shape, _groups(file, name)
    order = _row_order(name, shape[0], settings)
    scales, offsets = (
        None if part is None else torch.from_numpy(part.reshape(shape[0], -1)[order])
        for part in (found.scales, found.offsets)
    )
    assert scales is not None
    quantized = torch.from_numpy(found.quantized.reshape(shape)[order])
    return QuantizedWeight.of(quantized, scales, offsets, group=found.size)


def _groups(file: GgufFile, name: str) -> ScaledGroups:
    """Return the integers, scales and offsets of a quantized tensor."""
    groups = BLOCK_TYPES[file.tensors[name].type_name].groups
    assert groups is not None
    with np.errstate(invalid="ignore"):
        found = groups(file.blocks(name))
    if not all(part is None or np.isfinite(part).all() for part in (found.scales, found.offsets)):
        raise ArtifactError(name, None, "it has scales that are not finite", remedy=DAMAGED)
    return found


def _floats(file: GgufFile, name: str, settings: ModelSettings) -> torch.Tensor:
    """Return the float32 values of a tensor."""
    shape, floats = file.tensors[name].shape, BLOCK_TYPES[file.tensors[name].type_name].floats
    found = _groups(file, name).values() if floats is None else floats(file.blocks(name))
    return torch.from_numpy(found.reshape(shape)[_row_order(name, shape[0], settings)])


def _frequencies(file: GgufFile, name: str, settings: ModelSettings) -> torch.Tensor:
    """Return the frequencies of rotary embeddings, divided by their factors."""
    frequencies, factors = inverse_frequencies(settings), _floats(file, name, settings)
    if factors.shape != frequencies.shape or not bool((factors > 0).all()):
        problem = f"it must have {len(frequencies)} positive factors, but is {list(factors.shape)}"
        raise ArtifactError(name, None, problem, remedy=DAMAGED)
    return frequencies / factors


def _row_order(name: str, rows: int, settings: ModelSettings) -> NDArray[np.int64] | slice:
    """Return the row of a tensor in the file that each row of the tensor in the model is."""
    layer = LAYER_NAME.fullmatch(name.rpartition(".")[0])
    if settings.architecture is None or not settings.architecture.rotates_neighbours or layer is None:
        return slice(None)
    if layer[2] not in ("attn_q", "attn_k"):
        return slice(None)
    heads = settings.heads if layer[2] == "attn_q" else settings.key_heads
    if rows % (2 * heads):
        problem = f"its {rows} rows are not those of {heads} heads of rotated pairs"
        raise ArtifactError(name, None, problem, remedy=DAMAGED)
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
