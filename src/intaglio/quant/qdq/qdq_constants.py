"""Canonical integer constants of an imported Q/DQ model: s8 weights, u8 embedding tables and int32 biases."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import fx

from intaglio import numerics
from intaglio.fxgraph.node_info import update_info
from intaglio.fxgraph.nodes import (
    arguments,
    call_before,
    is_constant,
    known_record,
    layer_operands,
    operands,
    operator,
    record_of,
    replace_node,
)
from intaglio.fxgraph.overloads import EMBEDDING_TARGET
from intaglio.ir import DType, QParams, TensorType
from intaglio.ops.products.conv import outputs_first
from intaglio.quant.annotate.embedding_tables import BAGS
from intaglio.quant.qdq.qdq_normalize import (
    DEQUANTIZE_CHANNEL,
    DEQUANTIZE_TENSOR,
    SHIFT,
    dequantizes,
    levels_behind,
    quantizes,
    stored,
    target,
    tensor_of,
)
from intaglio.quant.recipes.datatypes import INT32_RANGE


def store_levels(module: fx.GraphModule) -> int:
    """Convert each dequantized constant to a form that kernels read, and return the number of changes.

    A weight becomes s8 without zero points, and a u8 embedding table stays. Every other constant except a bias becomes
    float again. So does a weight that kernels do not support: it is marked with the reason, and is not quantized again.
    """
    hits = 0
    for node in list(module.graph.nodes):
        if not dequantizes(node) or not node.users:
            continue
        source, reader = node.args[0], next(iter(node.users))
        if quantizes(source) and is_constant(source.args[0]):
            levels = _computed(module, source)
            source = stored(module, f"{source.args[0].target}_levels", levels, source.args[0])
            node.update_arg(0, source)
            hits += 1
        if not is_constant(source) or (operator(reader) in (EMBEDDING_TARGET, *BAGS) and _is_table(node)):
            continue
        record = record_of(reader)
        places = () if record is None or record.variadic else [i for i, v in enumerate(operands(reader)) if v is node]
        if record is not None and record.roles.weight in places:
            hits += _weight(module, node, reader)
        elif record is None or record.roles.bias is None or record.roles.bias not in places:
            _float_again(module, node)
            hits += 1
    return hits


def _is_table(node: fx.Node) -> bool:
    """Return whether a node dequantizes a u8 table per row, the form that `embedding_tables.table_behind` reads."""
    return operator(node) == DEQUANTIZE_CHANNEL and node.args[3] == 0 and node.args[-1] is torch.uint8


def _computed(module: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    """Evaluate a node whose inputs are constants."""
    args = fx.map_arg(node.args, lambda leaf: getattr(module, str(leaf.target)))
    with torch.no_grad():
        found: torch.Tensor = node.target(*args)
    return found


def _float_again(module: fx.GraphModule, node: fx.Node, reason: str | None = None) -> bool:
    made = stored(module, f"{node.args[0].target}_f32", _computed(module, node), node.args[0])
    update_info(made, unfit=reason)
    replace_node(node, made)
    return True


def _weight(module: fx.GraphModule, node: fx.Node, layer: fx.Node) -> bool:
    """Convert a weight to s8 without zero points, or to float if no kernel supports it; return whether it changed."""
    levels, zeros = tensor_of(module, node, node.args[0]), _zeros(module, node)
    shift, axis = SHIFT.get(node.args[-1]), known_record(layer).roles.outputs
    reason = None
    if shift is None:
        reason = f"levels of {node.args[-1]}; kernels have bytes"
    elif (zeros != 128 - shift).any() if node.args[-1] is torch.uint8 else zeros.any():
        reason = "zero points, which weights of kernels have not"
    elif operator(node) == DEQUANTIZE_CHANNEL and node.args[3] != axis:
        reason = f"scales along axis {node.args[3]}; its outputs lie along axis {axis}"
    elif not all(numerics.SMALLEST_SCALE <= scale < math.inf for scale in _scales(module, node)):
        reason = "a scale that is not positive"
    if reason is not None:
        _float_again(module, node, f"its weight has {reason}")
        return True
    if node.args[-1] is torch.int8:
        return False
    signed = stored(module, f"{node.args[0].target}_s8", (levels.to(torch.int16) - 128).to(torch.int8), node.args[0])
    *parameters, low, high, _ = node.args[1:]
    if operator(node) == DEQUANTIZE_CHANNEL:
        parameters[1] = stored(module, f"{signed.target}_zero_point", torch.from_numpy(zeros - 128), signed)
    else:
        parameters[1] = 0
    node.args = (signed, *parameters, low - 128, high - 128, torch.int8)
    return True


def _zeros(module: fx.GraphModule, node: fx.Node) -> np.ndarray:
    if operator(node) == DEQUANTIZE_TENSOR:
        return np.array([node.args[2]], np.int64)
    return tensor_of(module, node, node.args[2]).to(torch.int64).numpy()


def _scales(module: fx.GraphModule, node: fx.Node) -> np.ndarray:
    if operator(node) == DEQUANTIZE_TENSOR:
        return np.array([node.args[1]], np.float32)
    return tensor_of(module, node, node.args[1]).numpy()


# -- biases -----------------------------------------------------------------------------------------------------------


def count_biases(module: fx.GraphModule) -> int:
    """Convert biases of quantized layers to int32 with the scale of the accumulator, and return the number of changes.

    If the bias or the accumulator would overflow, the weight becomes float and is marked with the reason. Biases of
    layers that are not quantized become float.
    """
    roles = {node: record.roles for node in module.graph.nodes if (record := record_of(node)) is not None}
    layers = [node for node, own in roles.items() if own.weight is not None and own.bias is not None]
    return sum(_count(module, node) for node in layers)


def _count(module: fx.GraphModule, node: fx.Node) -> bool:
    """Convert the bias of one layer to int32; return whether anything changed."""
    x, weight, bias = layer_operands(node)
    q = levels_behind(x)
    if q is None or not _is_stored(weight):
        return bias is not None and _is_constant_levels(bias) and _float_again(module, bias)
    groups = int(arguments(node).get("groups", 1))
    rows = _rows(module, weight, node)
    scales = np.tile(_scales(module, weight), len(rows) // len(_scales(module, weight)))
    given = np.zeros(len(rows), np.float32) if bias is None else _values(module, bias, len(rows))
    if given is None or (bias is not None and _is_counted(module, bias, q, scales)):
        return False
    fitted = _for_empty_channels(module, weight, rows, given, q.step)
    reason, steps = _steps(rows, given, q, fitted, groups)
    if reason is not None:
        _float_again(module, weight, reason)
        return True
    if bias is None:
        return False
    if not np.array_equal(fitted, scales):
        held = stored(module, f"{weight.args[1].target}_fitted", torch.from_numpy(fitted), weight.args[1])
        weight.update_arg(1, held)
    _put_bias(module, node, bias, steps, numerics.accumulator_scale(q.step, fitted))
    return True


def _is_constant_levels(node: fx.Node) -> bool:
    return dequantizes(node) and is_constant(node.args[0])


def _is_stored(weight: fx.Node) -> bool:
    return _is_constant_levels(weight) and weight.args[-1] is torch.int8


def _rows(module: fx.GraphModule, weight: fx.Node, layer: fx.Node) -> np.ndarray:
    """Return the quantized weight with its output channels first."""
    levels = tensor_of(module, weight, weight.args[0]).numpy()
    return outputs_first(levels, int(arguments(layer)["groups"])) if known_record(layer).roles.outputs else levels


def _is_counted(module: fx.GraphModule, bias: fx.Node, q: QParams, scales: np.ndarray) -> bool:
    """Return whether the bias is int32 already and has the accumulator's scale."""
    units = numerics.accumulator_scale(q.step, scales).astype(np.float32)
    return _is_constant_levels(bias) and bias.args[-1] is torch.int32 and bool((_scales(module, bias) == units).all())


def _steps(
    rows: np.ndarray, bias: np.ndarray, q: QParams, scales: np.ndarray, groups: int
) -> tuple[str | None, np.ndarray]:
    """Quantize a bias to i32 and return the reason why it does not fit, or ``None``, and the result."""
    try:
        steps = numerics.bias_steps(bias, q.step, scales)
    except OverflowError:
        return "its bias is more than 2^30 steps of its accumulator", bias
    bound = numerics.accumulator_bound(rows, steps, q.qmin, q.qmax, q.zeros, groups).max(initial=0)
    return f"an int32 accumulator could reach {bound}" if bound >= 2**31 else None, steps


def _values(module: fx.GraphModule, bias: fx.Node, outputs: int) -> np.ndarray | None:
    """Return the bias as f32[outputs]; ``None`` if it is not a finite constant of that shape."""
    if is_constant(bias):
        values = getattr(module, str(bias.target)).detach()
    elif operator(bias) in (DEQUANTIZE_TENSOR, DEQUANTIZE_CHANNEL) and is_constant(bias.args[0]):
        values = _computed(module, bias)
    else:
        return None
    plain = values.dtype is torch.float32 and tuple(values.shape) == (outputs,)
    return values.numpy() if plain and bool(values.isfinite().all()) else None


def _for_empty_channels(
    module: fx.GraphModule, weight: fx.Node, rows: np.ndarray, bias: np.ndarray, step: float
) -> np.ndarray:
    """Return the weight's scales as f32[outputs], enlarged for all-zero channels so that their bias fits.

    The scale of an all-zero channel is arbitrary. Scales that the groups of a transposed convolution share are not
    changed.
    """
    scales = _scales(module, weight)
    if len(scales) != len(rows):
        return np.tile(scales, len(rows) // len(scales))
    absmax = np.abs(rows.reshape(len(rows), -1).astype(np.int32)).max(1, initial=0)
    if operator(weight) == DEQUANTIZE_TENSOR or absmax.all():
        return scales
    return np.where(absmax == 0, numerics.fit_weight_scale(scales, absmax, bias, step), scales).astype(np.float32)


def _put_bias(module: fx.GraphModule, node: fx.Node, bias: fx.Node, steps: np.ndarray, units: np.ndarray) -> None:
    held = bias if is_constant(bias) else bias.args[0]
    stem, kind = f"{held.target}_steps", TensorType(steps.shape, DType.F32)
    source = stored(module, stem, torch.from_numpy(steps), held)
    scales = stored(module, f"{stem}_scale", torch.from_numpy(units.astype(np.float32)), held)
    zeros = stored(module, f"{stem}_zero_point", torch.zeros(len(steps), dtype=torch.int64), held)
    dequantize = target("dequantize_per_channel")
    real = call_before(node, kind, dequantize, source, scales, zeros, 0, *INT32_RANGE, torch.int32)
    node.replace_input_with(bias, real)
