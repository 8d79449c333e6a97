"""Checkpoints of GPTQ: unsigned integers packed in int32 words along the inputs, zero points along the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from intaglio.checkpoints.checkpoint import Layers
from intaglio.checkpoints.integer_words import WORD_BITS, check_tensor, unpack_words, zero_centered
from intaglio.checkpoints.tensor_folder import DAMAGED, FLOAT_TYPES, QUANTIZE_FLOAT, TensorFolder
from intaglio.errors import ArtifactError, UnsupportedError
from intaglio.quant.imported_weights.quantized_weight import QuantizedWeight

GPTQ_METHOD = "gptq"
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""Formats, and what their stored zero points lack."""
GPTQ_PARTS = ("qweight", "qzeros", "scales", "g_idx")


def gptq_layers(folder: TensorFolder, settings: Mapping[str, Any]) -> Layers:
    """Return the quantized layers of a checkpoint.

    Args:
        folder: its tensors.
        settings: the quantization configuration in config.json.

    Raises:
        UnsupportedError: the format is not read.
        ArtifactError: the configuration is malformed.
    """
    found = str(settings.get("checkpoint_format") or settings.get("format") or "gptq")
    found = "marlin" if settings.get("is_marlin_format") else found
    if found not in ZERO_OFFSETS:
        problem = f"the format {found!r:.60} is not read; {' and '.join(ZERO_OFFSETS)} are"
        raise UnsupportedError("GPTQ checkpoint", None, problem, remedy=QUANTIZE_FLOAT)
    bits, group = settings.get("bits"), settings.get("group_size", -1)
    if type(bits) is not int or type(group) is not int:
        problem = f"its bits are {bits!r:.20} and its group_size is {group!r:.20}; both must be numbers"
        raise ArtifactError("quantization_config", None, problem, remedy=DAMAGED)
    paths = [name.removesuffix(".qweight") for name in folder.files if name.endswith(".qweight")]
    used = {f"{path}.{part}" for path in paths for part in GPTQ_PARTS if f"{path}.{part}" in folder}
    for path in paths:
        _check_bits(path, _bits(folder, path, bits))
    return Layers(
        {path: partial(_gptq_weight, folder, path, bits, group, ZERO_OFFSETS[found]) for path in paths}, frozenset(used)
    )


def _bits(folder: TensorFolder, path: str, bits: int) -> float:
    """Return the number of bits of a layer, which may differ from that of the others."""
    if f"{path}.g_idx" not in folder:
        return bits
    rows, inputs = folder.shape(f"{path}.qweight")[0], folder.shape(f"{path}.g_idx")[0]
    return rows * 32 / max(inputs, 1)


def _check_bits(path: str, bits: float) -> None:
    if bits not in WORD_BITS:
        problem = f"its integers have {bits:g} bits; GPTQ integers of 2, 4 and 8 bits are read"
        raise UnsupportedError(path, None, problem, remedy=QUANTIZE_FLOAT)


def _gptq_weight(folder: TensorFolder, path: str, bits: int, group: int, zero_offset: int) -> QuantizedWeight:
    """Return the weight of a layer.

    Args:
        folder: the tensors.
        path: module path of the layer.
        bits: number of bits of most layers.
        group: inputs of a group of most layers, or -1 for one group.
        zero_offset: see `ZERO_OFFSETS`.
    """
    bits = int(_bits(folder, path, bits))
    words = folder.tensor(f"{path}.qweight")
    if words.dim() != 2:
        problem = f"it has {words.dim()} axes; weights with two axes are read"
        raise UnsupportedError(f"{path}.qweight", None, problem, remedy=QUANTIZE_FLOAT)
    rows, outputs = words.shape
    inputs = rows * 32 // bits
    check_tensor(f"{path}.qweight", words, (rows, outputs), (torch.int32,))
    scales = folder.tensor(f"{path}.scales")
    groups = scales.shape[0] if scales.dim() else 0
    check_tensor(f"{path}.scales", scales, (groups, outputs), FLOAT_TYPES)
    zeros = folder.tensor(f"{path}.qzeros")
    check_tensor(f"{path}.qzeros", zeros, (groups, -(-outputs * bits // 32)), (torch.int32,))
    order, size = _input_order(folder, path, inputs, groups, group)
    quantized = unpack_words(words.T, bits)
    points = unpack_words(_plus_in_each_field(zeros, bits, zero_offset), bits)[:, :outputs].T
    quantized = quantized if order is None else quantized[:, order.numpy()]
    return zero_centered(quantized, points, scales.T, size, order=order)


def _plus_in_each_field(words: torch.Tensor, bits: int, addend: int) -> torch.Tensor:
    """Return words with a number added to each of their fields, as one addition of words: writers subtract it so."""
    each = sum(addend << shift for shift in range(0, 32, bits))
    return torch.from_numpy((words.numpy().view(np.uint32) + np.uint32(each)).view(np.int32))


def _input_order(
    folder: TensorFolder, path: str, inputs: int, groups: int, group: int
) -> tuple[torch.Tensor | None, int]:
    """Return the inputs sorted by group, ``None`` if they are in order, and the number of inputs in a group.

    Raises:
        UnsupportedError: groups have different numbers of inputs.
    """
    size = group if group > 0 else inputs
    name = f"{path}.g_idx"
    if name not in folder:
        if groups != -(-inputs // size):
            problem = f"it has {groups} groups, but {inputs} inputs in groups of {size} have {-(-inputs // size)}"
            raise ArtifactError(f"{path}.scales", None, problem, remedy=DAMAGED)
        return None, size
    of_inputs = folder.tensor(name)
    check_tensor(name, of_inputs, (inputs,), (torch.int32, torch.int64))
    order = torch.argsort(of_inputs, stable=True)
    size = int(torch.bincount(of_inputs.clamp(0, groups)).max())
    if not torch.equal(of_inputs[order].long(), torch.arange(inputs) // size) or groups != -(-inputs // size):
        problem = f"its inputs do not belong to {groups} groups of equal size, which are read"
        raise UnsupportedError(name, None, problem, remedy=QUANTIZE_FLOAT)
    return (None if torch.equal(order, torch.arange(inputs)) else order), size
