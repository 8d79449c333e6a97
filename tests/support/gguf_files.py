"""GGUF files of small models, written from the description of the format, and the float32 weights that they mean."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ2_XXS": 16,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "I32": 26,
    "BF16": 30,
    "MXFP4": 39,
}


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def metadata_value(value: Any) -> bytes:
    """A value of the metadata with its type in front."""
    if isinstance(value, bytes):  # as it is
        return value
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    items = [metadata_value(item) for item in value]
    return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file: its type, its shape with the outermost axis first, its bytes, and the values they mean."""

    kind: str
    shape: tuple[int, ...]
    data: bytes
    values: np.ndarray


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    version: int = 3,
    places: Mapping[str, int] | None = None,
) -> bytes:
    """The bytes of a file. Tensors begin where the format says, or at other places behind the header, by name."""
    alignment = metadata.get("general.alignment", 32)
    alignment = alignment if isinstance(alignment, int) and alignment > 0 else 32
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    parts += [text(key) + metadata_value(value) for key, value in metadata.items()]
    data = bytearray()
    for name, tensor in tensors.items():
        place = (places or {}).get(name, -(-len(data) // alignment) * alignment)
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        parts.append(text(name) + sizes + struct.pack("<IQ", TYPES[tensor.kind], place))
        data += bytes(max(place + len(tensor.data) - len(data), 0))
        data[place : place + len(tensor.data)] = tensor.data
    header = b"".join(parts)
    return header + bytes(-len(header) % alignment) + data


# ---- types


def floats(kind: str) -> Callable[[np.ndarray], Tensor]:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]

    def write(weight: np.ndarray) -> Tensor:
        stored = torch.from_numpy(np.ascontiguousarray(weight)).to(dtype)
        octets = stored.view(torch.uint8).numpy().tobytes()
        return Tensor(kind, weight.shape, octets, stored.to(torch.float32).numpy())

    return write


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def as_half(value: float) -> float:
    return float(np.float16(value))


def q4_0_block(scale: float, integers: list[int]) -> bytes:
    """32 integers from -8 to 7: byte i has integer i in its low four bits, and integer i + 16 in its high four bits."""
    return half(scale) + bytes((integers[i] + 8) | (integers[i + 16] + 8) << 4 for i in range(16))


def q4_1_block(scale: float, offset: float, integers: list[int]) -> bytes:
    """32 integers from 0 to 15, in the bytes of Q4_0."""
    return half(scale) + half(offset) + bytes(integers[i] | integers[i + 16] << 4 for i in range(16))


def fifth_bits(integers: list[int]) -> bytes:
    """Bit i of a little-endian word is the bit of worth 16 of integer i; their other bits follow as in Q4_0."""
    word = sum((integer >> 4) << i for i, integer in enumerate(integers))
    return struct.pack("<I", word) + bytes(integers[i] & 15 | (integers[i + 16] & 15) << 4 for i in range(16))


def q5_0_block(scale: float, integers: list[int]) -> bytes:
    """32 integers from -16 to 15."""
    return half(scale) + fifth_bits([integer + 16 for integer in integers])


def q5_1_block(scale: float, offset: float, integers: list[int]) -> bytes:
    """32 integers from 0 to 31."""
    return half(scale) + half(offset) + fifth_bits(integers)


def q8_0_block(scale: float, integers: list[int]) -> bytes:
    return half(scale) + struct.pack("<32b", *integers)


def k_header(scale: float, least: float, scales: list[int], minima: list[int]) -> bytes:
    """Two float16 numbers, and scales and minima of eight groups from 0 to 63."""
    packed = [0] * 12
    for j in range(4):
        packed[j] = scales[j] | (scales[j + 4] >> 4) << 6
        packed[j + 4] = minima[j] | (minima[j + 4] >> 4) << 6
        packed[j + 8] = (scales[j + 4] & 15) | (minima[j + 4] & 15) << 4
    return half(scale) + half(least) + bytes(packed)


def pairs_of_groups(integers: list[int]) -> bytes:
    """The low four bits of 256 integers: those of two groups of 32 that follow each other share bytes."""
    groups = [integers[first : first + 32] for first in range(0, 256, 32)]
    pairs = zip(groups[0::2], groups[1::2], strict=True)
    return bytes(low & 15 | (high & 15) << 4 for pair in pairs for low, high in zip(*pair, strict=True))


def q4_k_block(scale: float, least: float, scales: list[int], minima: list[int], integers: list[int]) -> bytes:
    """Eight groups of 32 integers from 0 to 15."""
    return k_header(scale, least, scales, minima) + pairs_of_groups(integers)


def q5_k_block(scale: float, least: float, scales: list[int], minima: list[int], integers: list[int]) -> bytes:
    """Eight groups of 32 integers from 0 to 31: bit g of byte i is the bit of worth 16 of integer i of group g."""
    high = bytes(sum((integers[32 * group + i] >> 4) << group for group in range(8)) for i in range(32))
    return k_header(scale, least, scales, minima) + high + pairs_of_groups(integers)


def q6_k_block(scale: float, scales: list[int], integers: list[int]) -> bytes:
    """16 groups of 16 integers from -32 to 31, with scales from -128 to 127."""
    low, high = [], []
    for first in (0, 128):
        rows = [[integers[first + 32 * row + i] + 32 for i in range(32)] for row in range(4)]
        low += [rows[0][i] & 15 | (rows[2][i] & 15) << 4 for i in range(32)]
        low += [rows[1][i] & 15 | (rows[3][i] & 15) << 4 for i in range(32)]
        high += [sum((rows[row][i] >> 4) << 2 * row for row in range(4)) for i in range(32)]
    return bytes(low) + bytes(high) + struct.pack("<16b", *scales) + half(scale)


def in_blocks(kind: str, size: int, write_block: Callable[[np.ndarray], tuple[bytes, np.ndarray]]):
    """A writer that rounds each block, and returns its bytes with the values, computed in float64 and rounded once."""

    def write(weight: np.ndarray) -> Tensor:
        blocks = [write_block(block) for block in weight.astype(np.float64).reshape(-1, size)]
        values = np.concatenate([values for _, values in blocks]).astype(np.float32)
        return Tensor(kind, weight.shape, b"".join(data for data, _ in blocks), values.reshape(weight.shape))

    return write


def _nearest(values: np.ndarray, low: int, high: int) -> np.ndarray:
    return np.clip(np.rint(values), low, high).astype(int)


def symmetric(most: int, write: Callable[[float, list[int]], bytes]) -> Callable[..., tuple[bytes, np.ndarray]]:
    """A writer of blocks with one scale."""

    def write_block(block: np.ndarray) -> tuple[bytes, np.ndarray]:
        scale = as_half(np.abs(block).max() / most) or 1.0
        integers = _nearest(block / scale, -most, most)
        return write(scale, integers.tolist()), scale * integers

    return write_block


def asymmetric(most: int, write: Callable[[float, float, list[int]], bytes]) -> Callable[..., tuple[bytes, np.ndarray]]:
    """A writer of blocks with a scale and an offset."""

    def write_block(block: np.ndarray) -> tuple[bytes, np.ndarray]:
        offset = as_half(block.min())
        scale = as_half((block.max() - offset) / most) or 1.0
        integers = _nearest((block - offset) / scale, 0, most)
        return write(scale, offset, integers.tolist()), scale * integers + offset

    return write_block


def in_eight_groups(most: int, write: Callable[..., bytes]) -> Callable[..., tuple[bytes, np.ndarray]]:
    """A writer of blocks of eight groups with scales and minima."""

    def write_block(block: np.ndarray) -> tuple[bytes, np.ndarray]:
        groups = block.reshape(8, 32)
        below = np.maximum(-groups.min(1), 0)
        ranges = np.maximum(groups.max(1) + below, 1e-6)
        scale, least = as_half(ranges.max() / most / 63) or 1.0, as_half(below.max() / 63) or 1.0
        scales, minima = _nearest(ranges / most / scale, 1, 63), _nearest(below / least, 0, 63)
        steps, offsets = (scale * scales)[:, None], (least * minima)[:, None]
        integers = _nearest((groups + offsets) / steps, 0, most)
        data = write(scale, least, scales.tolist(), minima.tolist(), integers.reshape(-1).tolist())
        return data, (steps * integers - offsets).reshape(-1)

    return write_block


def _q6_k(block: np.ndarray) -> tuple[bytes, np.ndarray]:
    groups = block.reshape(16, 16)
    largest = np.abs(groups).max(1)
    scale = as_half(largest.max() / 31 / 127) or 1.0
    scales = _nearest(largest / 31 / scale, 1, 127) * np.where(np.arange(16) % 2, 1, -1)
    steps = (scale * scales)[:, None]
    integers = _nearest(groups / steps, -32, 31)
    return q6_k_block(scale, scales.tolist(), integers.reshape(-1).tolist()), (steps * integers).reshape(-1)


WRITERS: Mapping[str, Callable[[np.ndarray], Tensor]] = {
    "F32": floats("F32"),
    "F16": floats("F16"),
    "BF16": floats("BF16"),
    "Q4_0": in_blocks("Q4_0", 32, symmetric(7, q4_0_block)),
    "Q4_1": in_blocks("Q4_1", 32, asymmetric(15, q4_1_block)),
    "Q5_0": in_blocks("Q5_0", 32, symmetric(15, q5_0_block)),
    "Q5_1": in_blocks("Q5_1", 32, asymmetric(31, q5_1_block)),
    "Q8_0": in_blocks("Q8_0", 32, symmetric(127, q8_0_block)),
    "Q4_K": in_blocks("Q4_K", 256, in_eight_groups(15, q4_k_block)),
    "Q5_K": in_blocks("Q5_K", 256, in_eight_groups(31, q5_k_block)),
    "Q6_K": in_blocks("Q6_K", 256, _q6_k),
}

# ---- models

IN_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ELSEWHERE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def name_in_file(name: str) -> str:
    owner, _, leaf = name.rpartition(".")
    if owner in ELSEWHERE:
        return f"{ELSEWHERE[owner]}.{leaf}"
    number, _, module = owner.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{IN_LAYERS[module]}.{leaf}"


def with_neighbours_rotated(rows: np.ndarray, heads: int) -> np.ndarray:
    """The rows of queries or keys in files of Llama: row i of a head, and then the one half a head below it."""
    found = []
    for head in np.split(rows, heads):
        first, second = np.split(head, 2)
        for pair in zip(first, second, strict=True):
            found += pair
    return np.stack(found)


def as_in_model(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `with_neighbours_rotated`."""
    return np.concatenate([np.concatenate([head[0::2], head[1::2]]) for head in np.split(rows, heads)])


def model_metadata(model: nn.Module, architecture: str, **others: Any) -> dict[str, Any]:
    config = model.config
    own = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    named = {f"{architecture}.{key}": value for key, value in own.items()}
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"token {index}" for index in range(config.vocab_size)],
        "tokenizer.ggml.scores": [float(index) for index in range(config.vocab_size)],
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_id,
        "tokenizer.ggml.padding_token_id": config.pad_token_id,
        "tokenizer.ggml.add_bos_token": True,
    }
    return {"general.architecture": architecture, **named, **tokenizer, **others}


def write_model(
    path: Path,
    model: nn.Module,
    kinds: Mapping[str, str],
    architecture: str = "llama",
    extra: Mapping[str, Tensor] | None = None,
    **metadata: Any,
) -> nn.Module:
    """Write a model and return the float model with the values in the file.

    Args:
        path: the file.
        model: the float model.
        kinds: type of the matrices by the end of the module's path; "" for all others.
        architecture: its name in the file.
        extra: further tensors.
        metadata: further entries of the metadata, with ``__`` for the dots of a key; those that are ``None`` are left
            out.
    """
    exact = type(model)(model.config).eval()
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    tensors = {}
    for name, parameter in model.named_parameters():
        module, values = name.split(".")[-2], parameter.detach().numpy()
        rotated = heads.get(module) if architecture == "llama" else None
        kind = kinds.get(module, kinds[""]) if values.ndim > 1 else "F32"
        stored = WRITERS[kind](values if rotated is None else with_neighbours_rotated(values, rotated))
        tensors[name_in_file(name)] = stored
        meant = stored.values if rotated is None else as_in_model(stored.values, rotated)
        exact.get_parameter(name).data = torch.from_numpy(np.ascontiguousarray(meant))
    exact.tie_weights()
    entries = model_metadata(model, architecture) | {key.replace("__", "."): entry for key, entry in metadata.items()}
    kept = {key: entry for key, entry in entries.items() if entry is not None}
    path.write_bytes(gguf_bytes(kept, {**tensors, **(extra or {})}))
    return exact
