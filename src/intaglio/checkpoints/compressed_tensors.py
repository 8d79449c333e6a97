"""Checkpoints of compressed-tensors: integers in their own type, or packed in int32 words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import re2
import torch

from intaglio.checkpoints.checkpoint import Layers
from intaglio.checkpoints.integer_words import WORD_BITS, check_tensor, unpack_words, zero_centered
from intaglio.checkpoints.tensor_folder import FLOAT_TYPES, QUANTIZE_FLOAT, TensorFolder
from intaglio.errors import MALFORMED, ArtifactError, UnsupportedError
from intaglio.quant.imported_weights.quantized_weight import QuantizedWeight

COMPRESSED_METHOD = "compressed-tensors"
INTEGER_FORMATS = ("int-quantized", "naive-quantized")
READ_FORMATS = (*INTEGER_FORMATS, "pack-quantized", "mixed-precision")
WEIGHT_PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
ACTIVATION_PARTS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale")
"""Parameters of activations and caches. Static scales are calibrated again."""


@dataclass(frozen=True)
class _Scheme:
    """One of the groups of a configuration.

    Attributes:
        targets: names, regular expressions and classes of modules.
        bits: bits of weights.
        group: inputs in a group, or 0 for one scale per output channel or for the whole weight.
        symmetric: whether zero points are 0.
        activations: see `QuantizedWeight`.
    """

    targets: tuple[str, ...]
    bits: int
    group: int
    symmetric: bool
    activations: str


def compressed_layers(folder: TensorFolder, settings: Mapping[str, Any]) -> Layers:
    """Return the quantized layers of a checkpoint.

    Args:
        folder: its tensors.
        settings: the quantization configuration in config.json.

    Raises:
        UnsupportedError: the format is not read.
        ArtifactError: the configuration is malformed.
    """
    _check_format(settings)
    try:
        schemes = tuple(_scheme(name, entry) for name, entry in settings["config_groups"].items())
    except MALFORMED as error:
        problem = f"its groups of quantized layers are malformed: {type(error).__name__}: {error}"
        raise ArtifactError("quantization_config", None, problem) from error
    weights: dict[str, Callable[[], QuantizedWeight]] = {}
    used: set[str] = set()
    for name in folder.files:
        path, _, part = name.rpartition(".")
        packed = part == "weight_packed"
        if packed or (part == "weight" and f"{path}.weight_scale" in folder):
            scheme = _scheme_of(path, schemes)
            if packed and scheme.bits not in WORD_BITS:
                problem = f"its integers of {scheme.bits} bits are packed; packed integers of 2, 4 and 8 bits are read"
                raise UnsupportedError(path, None, problem, remedy=QUANTIZE_FLOAT)
            weights[path] = partial(_packed_weight if packed else _integer_weight, folder, path, scheme)
            used.update(f"{path}.{own}" for own in (*WEIGHT_PARTS, "weight_g_idx") if f"{path}.{own}" in folder)
            used.add(name)
        elif part in ACTIVATION_PARTS:
            used.add(name)
    notes = (
        ["the scales of static activations are calibrated again"]
        if any(n.endswith(".input_scale") for n in used)
        else []
    )
    notes += ["the key-value cache stays in float32"] if settings.get("kv_cache_scheme") else []
    return Layers(weights, frozenset(used), tuple(notes))


def _check_format(settings: Mapping[str, Any]) -> None:
    """Raise `UnsupportedError` for formats that are not read: sparse weights, floats, transforms."""
    found, sparsity = settings.get("format"), settings.get("sparsity_config") or {}
    problem = None
    if found not in READ_FORMATS:
        problem = f"the format {found!r:.60} is not read; {', '.join(READ_FORMATS)} are"
    elif isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        problem = f"its weights are stored sparse, as {sparsity.get('format')!r:.60}"
    elif settings.get("transform_config"):
        problem = "its transform_config rotates activations while the model runs, which is not supported"
    if problem is not None:
        raise UnsupportedError("compressed-tensors checkpoint", None, problem, remedy=QUANTIZE_FLOAT)


def _scheme(name: str, entry: Mapping[str, Any]) -> _Scheme:
    """Return a group of the configuration. Raise `UnsupportedError` for weights that are not integers."""
    weights, inputs = entry["weights"], entry.get("input_activations")
    problem = None
    bits, kind, strategy = weights["num_bits"], weights.get("type", "int"), weights.get("strategy")
    own_format = entry.get("format")
    group = weights.get("group_size") or 0
    strategy = strategy or ("group" if group > 0 else "channel" if group else "tensor")
    if kind != "int":
        problem = f"its weights are {kind!r:.20} numbers of {bits} bits"
    elif type(bits) is not int or not 1 <= bits <= 8:
        problem = f"its weights have {bits!r:.20} bits; integers of up to 8 bits are read"
    elif strategy not in ("tensor", "channel", "group"):
        problem = f"its scales belong to a {strategy!r:.20}; scales of a tensor, a channel or a group are read"
    elif own_format not in (None, *READ_FORMATS):
        problem = f"its format is {own_format!r:.60}; {', '.join(READ_FORMATS)} are read"
    elif strategy == "group" and (type(group) is not int or group < 1):
        raise ValueError(f"group_size is {group!r}")
    if problem is not None:
        where = f"quantization_config, {name!r:.60} of {entry.get('targets')!r:.100}"
        raise UnsupportedError(where, None, problem, remedy=QUANTIZE_FLOAT)
    targets = tuple(entry["targets"])
    if not all(isinstance(target, str) for target in targets):
        raise TypeError(f"targets are {targets!r:.100}")
    return _Scheme(
        targets, bits, group if strategy == "group" else 0, bool(weights.get("symmetric", True)), _activations(inputs)
    )


def _activations(inputs: Mapping[str, Any] | None) -> str:
    """Return how activations are computed: 8 bits with scales that are calibrated or computed at run time, or
    float."""
    if not inputs or inputs["num_bits"] != 8 or inputs.get("type", "int") != "int":
        return "float"
    return "token" if inputs.get("dynamic") else "static"


def _scheme_of(path: str, schemes: tuple[_Scheme, ...]) -> _Scheme:
    """Return the group that a module belongs to: by its name, by a regular expression, or else by its class.

    Raises:
        ArtifactError: there is none, or there are several.
    """
    exact = [scheme for scheme in schemes if path in scheme.targets]
    matched = exact or [scheme for scheme in schemes if any(_matches(path, target) for target in scheme.targets)]
    found = matched or [scheme for scheme in schemes if any(target.isidentifier() for target in scheme.targets)]
    if not found or len(set(found)) > 1:
        problem = f"{len(found)} groups of the configuration describe this module"
        raise ArtifactError(path, None, problem, remedy=QUANTIZE_FLOAT)
    return found[0]


def _matches(path: str, target: str) -> bool:
    if not target.startswith("re:"):
        return False
    options = re2.Options()
    options.log_errors = False  # the error says it
    try:
        return re2.compile(target[3:], options=options).match(path) is not None
    except (re2.error, UnicodeEncodeError) as error:
        problem = f"its target {target!r:.100} is not a regular expression of RE2, which has no lookaround"
        raise UnsupportedError("quantization_config", None, problem, remedy=QUANTIZE_FLOAT) from error


def _packed_weight(folder: TensorFolder, path: str, scheme: _Scheme) -> QuantizedWeight:
    """Return a weight whose unsigned integers are packed along its inputs, 2^(bits - 1) more than the signed ones."""
    words, name = folder.tensor(f"{path}.weight_packed"), f"{path}.weight_packed"
    outputs, inputs = _stored_shape(folder, path)
    check_tensor(name, words, (outputs, -(-inputs * scheme.bits // 32)), (torch.int32,))
    quantized = unpack_words(words, scheme.bits)[:, :inputs]
    return _weight(folder, path, scheme, quantized, 2 ** (scheme.bits - 1))


def _stored_shape(folder: TensorFolder, path: str) -> tuple[int, int]:
    shape = folder.tensor(f"{path}.weight_shape")
    sizes = shape.tolist() if shape.dim() == 1 and not shape.is_floating_point() else []
    if len(sizes) != 2 or min(sizes) < 1 or max(sizes) >= 2**31:
        problem = f"the shape of its weight is {sizes}; weights with two axes are read"
        raise UnsupportedError(f"{path}.weight_shape", None, problem, remedy=QUANTIZE_FLOAT)
    return sizes[0], sizes[1]


def _integer_weight(folder: TensorFolder, path: str, scheme: _Scheme) -> QuantizedWeight:
    """Return a weight of int8 values."""
    weight = folder.tensor(f"{path}.weight")
    if weight.dtype is not torch.int8 or weight.dim() != 2:
        kind = f"{folder.dtype(f'{path}.weight')}{list(weight.shape)}"
        raise UnsupportedError(
            f"{path}.weight", None, f"it is {kind}; int8 with two axes is read", remedy=QUANTIZE_FLOAT
        )
    return _weight(folder, path, scheme, weight.numpy().view(np.uint8) ^ np.uint8(128), 128)


def _weight(folder: TensorFolder, path: str, scheme: _Scheme, quantized: np.ndarray, middle: int) -> QuantizedWeight:
    """Return a weight of unsigned integers u8[N, K], which are signed ones plus ``middle``, with the scales and zero
    points of a module."""
    outputs, inputs = quantized.shape
    if f"{path}.weight_g_idx" in folder and bool((folder.tensor(f"{path}.weight_g_idx") >= 0).any()):
        problem = "its inputs are reordered (actorder = group), which is not read"
        raise UnsupportedError(f"{path}.weight_g_idx", None, problem, remedy=QUANTIZE_FLOAT)
    group = scheme.group or inputs
    groups = -(-inputs // group)
    scales = folder.tensor(f"{path}.weight_scale")
    single = scales.numel() == 1 and not scheme.group
    check_tensor(f"{path}.weight_scale", scales, tuple(scales.shape) if single else (outputs, groups), FLOAT_TYPES)
    scales = scales.reshape(1, 1).expand(outputs, 1) if single else scales
    zeros = np.full((outputs, groups), middle, np.uint8)
    if f"{path}.weight_zero_point" in folder and not scheme.symmetric:
        zeros = _zero_points(folder, path, scheme.bits, (outputs, groups), middle)
    return zero_centered(quantized, zeros, scales, group, scheme.activations)


def _zero_points(folder: TensorFolder, path: str, bits: int, shape: tuple[int, int], middle: int) -> np.ndarray:
    """Return unsigned zero points u8[N, G], which are stored as int8, or packed along the outputs."""
    name = f"{path}.weight_zero_point"
    stored = folder.tensor(name)
    if stored.dtype is torch.int32 and tuple(stored.shape) == (-(-shape[0] * bits // 32), shape[1]):
        return unpack_words(stored.T, bits)[:, : shape[0]].T
    single = stored.numel() == 1 and stored.dtype is torch.int8
    check_tensor(name, stored, tuple(stored.shape) if single else shape, (torch.int8,))
    signed = np.broadcast_to(stored.numpy().astype(np.int16).reshape((1, 1) if single else shape), shape)
    found: np.ndarray = np.clip(signed + middle, 0, 255).astype(np.uint8)
    return found
