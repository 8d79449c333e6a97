"""Checkpoints of AWQ: unsigned integers of 4 bits packed in int32 words along the outputs, or along the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from intaglio.checkpoints.checkpoint import Layers
from intaglio.checkpoints.integer_words import check_tensor, unpack_words, zero_centered
from intaglio.checkpoints.tensor_folder import DAMAGED, FLOAT_TYPES, QUANTIZE_FLOAT, TensorFolder
from intaglio.errors import ArtifactError, UnsupportedError
from intaglio.quant.imported_weights.quantized_weight import QuantizedWeight

AWQ_METHOD = "awq"
AWQ_BITS = 4
AWQ_PARTS = ("qweight", "qzeros", "scales")
GEMM_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Field of a word in which each of its eight outputs is stored, in the layout of matrix products."""


def awq_layers(folder: TensorFolder, settings: Mapping[str, Any]) -> Layers:
    """Return the quantized layers of a checkpoint.

    Args:
        folder: its tensors.
        settings: the quantization configuration in config.json.

    Raises:
        UnsupportedError: the format is not read.
        ArtifactError: the configuration is malformed.
    """
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    bits, group, problem = settings.get("bits", AWQ_BITS), settings.get("group_size", 128), None
    if version not in LAYOUTS:
        problem = f"the format {version!r:.60} is not read; {' and '.join(LAYOUTS)} are"
    elif bits != AWQ_BITS:
        problem = f"its integers have {bits!r:.20} bits; AWQ integers of 4 bits are read"
    if problem is not None:
        raise UnsupportedError("AWQ checkpoint", None, problem, remedy=QUANTIZE_FLOAT)
    if type(group) is not int:
        problem = f"its group_size is {group!r:.20}, which is not a number"
        raise ArtifactError("quantization_config", None, problem, remedy=DAMAGED)
    paths = [name.removesuffix(".qweight") for name in folder.files if name.endswith(".qweight")]
    used = {f"{path}.{part}" for path in paths for part in AWQ_PARTS if f"{path}.{part}" in folder}
    scaled = [name for name in folder.files if name.endswith(".scales") and name not in used]
    if scaled:
        problem = "it divides the results of an activation function, which is not read"
        raise UnsupportedError(scaled[0], None, problem, remedy=QUANTIZE_FLOAT)
    return Layers({path: partial(LAYOUTS[version], folder, path, group) for path in paths}, frozenset(used))


def _gemm_weight(folder: TensorFolder, path: str, group: int) -> QuantizedWeight:
    """Return a weight whose words hold eight outputs of one input."""
    words = _words(folder, path)
    inputs, outputs = words.shape[0], words.shape[1] * 8
    groups = _groups(path, inputs, group)
    zeros, scales = folder.tensor(f"{path}.qzeros"), folder.tensor(f"{path}.scales")
    check_tensor(f"{path}.qzeros", zeros, (groups, words.shape[1]), (torch.int32,))
    check_tensor(f"{path}.scales", scales, (groups, outputs), FLOAT_TYPES)
    quantized, points = (_in_order(unpack_words(part, AWQ_BITS)).T for part in (words, zeros))
    return zero_centered(np.ascontiguousarray(quantized), points, scales.T, inputs // groups)


def _in_order(fields: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the values of words u8[..., 8 W] in the order of the outputs."""
    words = fields.reshape(*fields.shape[:-1], -1, 8)
    return words[..., GEMM_FIELDS].reshape(fields.shape)


def _gemv_weight(folder: TensorFolder, path: str, group: int) -> QuantizedWeight:
    """Return a weight whose words hold eight inputs of one output. Scales and zero points are padded."""
    words = _words(folder, path)
    outputs, inputs = words.shape[0], words.shape[1] * 8
    groups = _groups(path, inputs, group)
    zeros, scales = folder.tensor(f"{path}.qzeros"), folder.tensor(f"{path}.scales")
    width = zeros.shape[1] if zeros.dim() == 2 else 0
    check_tensor(f"{path}.qzeros", zeros, (outputs, max(width, -(-groups // 8))), (torch.int32,))
    check_tensor(f"{path}.scales", scales, (outputs, width * 8), FLOAT_TYPES)
    points = unpack_words(zeros, AWQ_BITS)[:, :groups]
    return zero_centered(unpack_words(words, AWQ_BITS), points, scales[:, :groups], inputs // groups)


LAYOUTS = {"gemm": _gemm_weight, "gemv": _gemv_weight}
"""Functions that read a weight, by the version in the configuration."""


def _words(folder: TensorFolder, path: str) -> torch.Tensor:
    words, name = folder.tensor(f"{path}.qweight"), f"{path}.qweight"
    if words.dim() != 2 or not words.numel():
        problem = f"it has the shape {list(words.shape)}; weights with two axes are read"
        raise UnsupportedError(name, None, problem, remedy=QUANTIZE_FLOAT)
    check_tensor(name, words, tuple(words.shape), (torch.int32,))
    return words


def _groups(path: str, inputs: int, group: int) -> int:
    size = group if group > 0 else inputs
    if inputs % size:
        problem = f"its {inputs} inputs are no multiple of the group size {size}"
        raise ArtifactError(f"{path}.qweight", None, problem, remedy=DAMAGED)
    return inputs // size
