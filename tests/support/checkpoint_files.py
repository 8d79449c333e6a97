"""Checkpoints of a small Llama in the formats of other tools, written from the descriptions of their layouts, and the
float32 weights that they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from support.transformers_library import library

VOCABULARY = 96
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": VOCABULARY - 1,
    "pad_token_id": 0,
}


def small_llama(kind: str = "LlamaForCausalLM", **settings: Any) -> nn.Module:
    """A float model with random weights, larger than the library's, so that tokens differ."""
    found = getattr(library(), kind)
    torch.manual_seed(0)
    model = found(found.config_class(**{**SIZES, "tie_word_embeddings": False, **settings})).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
        parameter.data += 0 if parameter.dim() > 1 else torch.randn(parameter.shape) * 0.1
    return model


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"
    }


@dataclass(frozen=True)
class Stored:
    """A layer in a format: its tensors by the name of the part, and the float32 weight that they mean."""

    tensors: Mapping[str, torch.Tensor]
    weight: np.ndarray


Writer = Callable[[np.ndarray], Stored]


def write_folder(
    folder: Path, model: nn.Module, writer: Writer, settings: Mapping[str, Any], shards: int = 1
) -> nn.Module:
    """Write a checkpoint in which a writer stores the linear layers, and return the float model with their weights."""
    folder.mkdir(parents=True, exist_ok=True)
    exact = type(model)(model.config).eval()
    exact.load_state_dict(model.state_dict())
    tensors: dict[str, torch.Tensor] = {}
    layers = linear_layers(model)
    for name, module in layers.items():
        stored = writer(module.weight.detach().numpy())
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in stored.tensors.items()}
        exact.get_submodule(name).weight.data = torch.from_numpy(stored.weight)
    held = model.config.tie_word_embeddings
    for name, value in model.state_dict().items():
        if (name.rpartition(".")[0] in layers and name.endswith(".weight")) or (held and name == "lm_head.weight"):
            continue
        half = value.to(torch.bfloat16) if value.dim() > 1 else value.to(torch.float16)
        tensors[name] = half.contiguous()
        exact.state_dict()[name].copy_(half)
    if held:
        exact.tie_weights()
    names = sorted(tensors)
    if shards == 1:
        safetensors.torch.save_file(tensors, folder / "model.safetensors")
    else:
        files = {name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(names)}
        for file in set(files.values()):
            own = {name: tensors[name] for name in names if files[name] == file}
            safetensors.torch.save_file(own, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    write_config(folder, model, settings)
    return exact


def write_config(folder: Path, model: nn.Module, settings: Mapping[str, Any] | None) -> None:
    entries = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    if settings is not None:
        entries["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(entries, default=str))


def in_groups(values: np.ndarray, group: int) -> np.ndarray:
    """[n, k] as [n, k / group, group]; the groups divide the row."""
    return values.reshape(len(values), -1, group)


def rounded(
    weight: np.ndarray, bits: int, group: int, symmetric: bool, scale_type: Any = np.float32
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return unsigned integers [n, k], scales [n, k / group] and unsigned zero points of nearest rounding."""
    parts = in_groups(weight.astype(np.float64), group)
    most = 2**bits - 1
    if symmetric:
        scales = np.abs(parts).max(-1) / (most / 2)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
        scales = (high - low) / most
        zeros = np.rint(-low / np.where(scales == 0, 1, scales))
    scales = torch.from_numpy(scales).to(scale_type).to(torch.float64).numpy()
    steps = np.rint(parts / np.where(scales == 0, 1, scales)[..., None]) + zeros[..., None]
    quantized = np.clip(steps, 0, most).astype(np.uint8).reshape(weight.shape)
    return quantized, scales, zeros.astype(np.uint8)


def meant(quantized: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group: int) -> np.ndarray:
    """``scale * (q - zero)``, with the difference exact and one rounding to float32."""
    distances = in_groups(quantized.astype(np.float64), group) - zeros.astype(np.float64)[..., None]
    return (distances.astype(np.float32) * scales.astype(np.float32)[..., None]).reshape(quantized.shape)


def words_of(values: np.ndarray, bits: int) -> torch.Tensor:
    """Unsigned integers [r, c] in int32 words along the last axis, the first value in the lowest bits."""
    per_word = 32 // bits
    filled = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word))).astype(np.uint64)
    shifts = np.arange(per_word, dtype=np.uint64) * np.uint64(bits)
    words = (filled.reshape(len(values), -1, per_word) << shifts).sum(-1).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32))


# ---- compressed-tensors


def compressed_settings(
    bits: int, group: int = 0, symmetric: bool = True, activations: str = "float", strategy: str = "", **others: Any
) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy or ("group" if group else "channel"),
        "group_size": group or None,
    }
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": activations == "token", "strategy": "token"}
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None if activations == "float" else inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if activations == "float" else "int-quantized",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        **others,
    }


def compressed_packed(bits: int, group: int, symmetric: bool = True, scale_type: Any = torch.bfloat16) -> Writer:
    """Integers packed along the inputs, zero points along the outputs."""

    def write(weight: np.ndarray) -> Stored:
        own = group or weight.shape[1]
        quantized, scales, zeros = rounded(weight, bits, own, symmetric, scale_type)
        tensors = {
            "weight_packed": words_of(quantized, bits),
            "weight_scale": torch.from_numpy(scales).to(scale_type),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words_of(zeros.T, bits).T
        return Stored(tensors, meant(quantized, scales, zeros, own))

    return write


def compressed_int8(scale_type: Any = torch.bfloat16, static: bool = False) -> Writer:
    """Integers in their own type, from -128 to 127, with a scale per output channel."""

    def write(weight: np.ndarray) -> Stored:
        quantized, scales, zeros = rounded(weight, 8, weight.shape[1], True, scale_type)
        tensors = {
            "weight": torch.from_numpy((quantized.astype(np.int16) - 128).astype(np.int8)),
            "weight_scale": torch.from_numpy(scales).to(scale_type),
        }
        if static:
            tensors["input_scale"] = torch.tensor([0.05], dtype=scale_type)
        return Stored(tensors, meant(quantized, scales, zeros, weight.shape[1]))

    return write


# ---- GPTQ


def gptq_settings(bits: int, group: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "checkpoint_format": "gptq", **others}


def gptq_words(
    bits: int,
    group: int,
    symmetric: bool = True,
    *,
    missing: int = 1,
    in_order: bool = True,
    with_places: bool = True,
    scale_type: Any = torch.float16,
) -> Writer:
    """Integers packed along the inputs, zero points along the outputs.

    Args:
        bits: number of bits.
        group: inputs of a group; 0 for one group.
        symmetric: whether all zero points are in the middle.
        missing: what is subtracted from each zero point, as a subtraction of whole words.
        in_order: whether the inputs of a group are neighbours.
        with_places: whether the group of each input is stored.
        scale_type: type of the scales.
    """

    def write(weight: np.ndarray) -> Stored:
        inputs = weight.shape[1]
        own = group or inputs
        order = np.arange(inputs) if in_order else np.random.default_rng(inputs).permutation(inputs)
        quantized, scales, zeros = rounded(weight[:, order], bits, own, symmetric, scale_type)
        places, values, exact = (
            np.empty(inputs, np.int32),
            np.empty_like(quantized),
            np.empty(weight.shape, np.float32),
        )
        places[order], values[:, order] = np.arange(inputs) // own, quantized
        exact[:, order] = meant(quantized, scales, zeros, own)
        each = sum(missing << shift for shift in range(0, 32, bits))
        words = words_of(zeros.T, bits).numpy().view(np.uint32) - np.uint32(each)
        tensors = {
            "qweight": words_of(values, bits).T,
            "qzeros": torch.from_numpy(words.view(np.int32)),
            "scales": torch.from_numpy(scales.T.copy()).to(scale_type),
        }
        if with_places:
            tensors["g_idx"] = torch.from_numpy(places)
        return Stored(tensors, exact)

    return write


# ---- AWQ

STORED_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of each field of a word, from the lowest bits, in the layout of matrix products."""


def awq_settings(group: int, version: str, **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group or -1,
        "zero_point": True,
        "version": version,
        **others,
    }


def awq_gemm(group: int) -> Writer:
    """Words with eight outputs of one input each."""

    def words(values: np.ndarray) -> torch.Tensor:
        eights = values.T.reshape(values.shape[1], -1, 8)[..., STORED_OUTPUTS]
        return words_of(eights.reshape(values.shape[1], -1), 4)

    def write(weight: np.ndarray) -> Stored:
        own = group or weight.shape[1]
        quantized, scales, zeros = rounded(weight, 4, own, False, torch.float16)
        tensors = {
            "qweight": words(quantized),
            "qzeros": words(zeros),
            "scales": torch.from_numpy(scales.T.copy()).to(torch.float16),
        }
        return Stored(tensors, meant(quantized, scales, zeros, own))

    return write


def awq_gemv(group: int) -> Writer:
    """Words with eight inputs of one output each; zero points and scales are padded to whole words."""

    def write(weight: np.ndarray) -> Stored:
        own = group or weight.shape[1]
        quantized, scales, zeros = rounded(weight, 4, own, False, torch.float16)
        padding = ((0, 0), (0, -zeros.shape[1] % 8))
        tensors = {
            "qweight": words_of(quantized, 4),
            "qzeros": words_of(np.pad(zeros, padding), 4),
            "scales": torch.from_numpy(np.pad(scales, padding)).to(torch.float16),
        }
        return Stored(tensors, meant(quantized, scales, zeros, own))

    return write
