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
from intaglio.quant.annotate.embedding_tables import EMBEDDING_BAG_TARGETS
from intaglio.quant.qdq.qdq_normalize import (
    DEQUANTIZE_CHANNEL,
    DEQUANTIZE_TENSOR,
    U8_OFFSET,
    add_constant_like,
    constant_tensor,
    dequantized_u8_qparams,
    dequantizes,
    qdq_overload,
    quantizes,
)
from intaglio.quant.recipes.datatypes import INT32_RANGE


def legalize_constants(module: fx.GraphModule) -> int:
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
            quantized = _evaluate(module, source)
            source = add_constant_like(module, f"{source.args[0].target}_levels", quantized, source.args[0])
            node.update_arg(0, source)
            hits += 1
        if not is_constant(source) or (
            operator(reader) in (EMBEDDING_TARGET, *EMBEDDING_BAG_TARGETS) and _is_u8_table(node)
        ):
            continue
        record = record_of(reader)
        places = () if record is None or record.variadic else [i for i, v in enumerate(operands(reader)) if v is node]
        if record is not None and record.roles.weight in places:
            hits += _convert_weight(module, node, reader)
        elif record is None or record.roles.bias is None or record.roles.bias not in places:
            _convert_to_float(module, node)
            hits += 1
    return hits


def _is_u8_table(node: fx.Node) -> bool:
    """Return whether a node dequantizes a u8 table per row, as `embedding_tables.table_operands` expects."""
    return operator(node) == DEQUANTIZE_CHANNEL and node.args[3] == 0 and node.args[-1] is torch.uint8


def _evaluate(module: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    """Evaluate a node whose inputs are constants."""
    args = fx.map_arg(node.args, lambda leaf: getattr(module, str(leaf.target)))
    with torch.no_grad():
        found: torch.Tensor = node.target(*args)
    return found


def _convert_to_float(module: fx.GraphModule, node: fx.Node, reason: str | None = None) -> bool:
    made = add_constant_like(module, f"{node.args[0].target}_f32", _evaluate(module, node), node.args[0])
    update_info(made, unsupported_reason=reason)
    replace_node(node, made)
    return True


def _convert_weight(module: fx.GraphModule, node: fx.Node, layer: fx.Node) -> bool:
    """Convert a weight to s8 without zero points, or to float if no kernel supports it; return whether it changed."""
    quantized, zeros = constant_tensor(module, node, node.args[0]), _zeros(module, node)
    shift, axis = U8_OFFSET.get(node.args[-1]), known_record(layer).roles.outputs
    reason = None
    if shift is None:
        reason = f"is stored as {node.args[-1]}; kernels read int8 and uint8"
    elif (zeros != 128 - shift).any() if node.args[-1] is torch.uint8 else zeros.any():
        reason = "has zero points, which kernels do not support"
    elif operator(node) == DEQUANTIZE_CHANNEL and node.args[3] != axis:
        reason = f"has scales along axis {node.args[3]}; its output channels are axis {axis}"
    elif not all(numerics.MIN_SCALE <= scale < math.inf for scale in _scales(module, node)):
        reason = "has a scale that is not positive"
    if reason is not None:
        _convert_to_float(module, node, f"its weight {reason}")
        return True
    if node.args[-1] is torch.int8:
        return False
    signed = add_constant_like(
        module, f"{node.args[0].target}_s8", (quantized.to(torch.int16) - 128).to(torch.int8), node.args[0]
    )
    *parameters, low, high, _ = node.args[1:]
    if operator(node) == DEQUANTIZE_CHANNEL:
        parameters[1] = add_constant_like(module, f"{signed.target}_zero_point", torch.from_numpy(zeros - 128), signed)
    else:
        parameters[1] = 0
    node.args = (signed, *parameters, low - 128, high - 128, torch.int8)
    return True


def _zeros(module: fx.GraphModule, node: fx.Node) -> np.ndarray:
    if operator(node) == DEQUANTIZE_TENSOR:
        return np.array([node.args[2]], np.int64)
    return constant_tensor(module, node, node.args[2]).to(torch.int64).numpy()


def _scales(module: fx.GraphModule, node: fx.Node) -> np.ndarray:
    if operator(node) == DEQUANTIZE_TENSOR:
        return np.array([node.args[1]], np.float32)
    return constant_tensor(module, node, node.args[1]).numpy()


# -- biases -----------------------------------------------------------------------------------------------------------


def convert_biases_to_i32(module: fx.GraphModule) -> int:
    """Convert biases of quantized layers to int32 with the scale of the accumulator, and return the number of changes.

    If the bias or the accumulator would overflow, the weight becomes float and is marked with the reason. Biases of
    layers that are not quantized become float.
    """
    roles = {node: record.roles for node in module.graph.nodes if (record := record_of(node)) is not None}
    layers = [node for node, own in roles.items() if own.weight is not None and own.bias is not None]
    return sum(_convert_bias(module, node) for node in layers)


def _convert_bias(module: fx.GraphModule, node: fx.Node) -> bool:
    """Convert the bias of one layer to int32; return whether anything changed."""
    x, weight, bias = layer_operands(node)
    q = dequantized_u8_qparams(x)
    if q is None or not _is_s8_weight(weight):
        return bias is not None and _is_quantized_constant(bias) and _convert_to_float(module, bias)
    groups = int(arguments(node).get("groups", 1))
    rows = _weight_by_output(module, weight, node)
    scales = np.tile(_scales(module, weight), len(rows) // len(_scales(module, weight)))
    given = np.zeros(len(rows), np.float32) if bias is None else _float_bias(module, bias, len(rows))
    if given is None or (bias is not None and _is_i32_bias(module, bias, q, scales)):
        return False
    fitted = _scales_that_fit_bias(module, weight, rows, given, q.step)
    reason, steps = _quantized_bias(rows, given, q, fitted, groups)
    if reason is not None:
        _convert_to_float(module, weight, reason)
        return True
    if bias is None:
        return False
    if not np.array_equal(fitted, scales):
        held = add_constant_like(module, f"{weight.args[1].target}_fitted", torch.from_numpy(fitted), weight.args[1])
        weight.update_arg(1, held)
    _replace_bias(module, node, bias, steps, numerics.accumulator_scale(q.step, fitted))
    return True


def _is_quantized_constant(node: fx.Node) -> bool:
    return dequantizes(node) and is_constant(node.args[0])


def _is_s8_weight(weight: fx.Node) -> bool:
    return _is_quantized_constant(weight) and weight.args[-1] is torch.int8


def _weight_by_output(module: fx.GraphModule, weight: fx.Node, layer: fx.Node) -> np.ndarray:
    """Return the quantized weight with its output channels first."""
    quantized = constant_tensor(module, weight, weight.args[0]).numpy()
    return outputs_first(quantized, int(arguments(layer)["groups"])) if known_record(layer).roles.outputs else quantized


def _is_i32_bias(module: fx.GraphModule, bias: fx.Node, q: QParams, scales: np.ndarray) -> bool:
    """Return whether the bias is int32 already and has the accumulator's scale."""
    units = numerics.accumulator_scale(q.step, scales).astype(np.float32)
    return (
        _is_quantized_constant(bias) and bias.args[-1] is torch.int32 and bool((_scales(module, bias) == units).all())
    )


def _quantized_bias(
    rows: np.ndarray, bias: np.ndarray, q: QParams, scales: np.ndarray, groups: int
) -> tuple[str | None, np.ndarray]:
    """Quantize a bias to i32 and return the reason why it does not fit, or ``None``, and the result."""
    try:
        steps = numerics.quantize_bias(bias, q.step, scales)
    except OverflowError:
        return "its bias is larger than 2^30 * scale_x * scale_w", bias
    bound = numerics.accumulator_bound(rows, steps, q.qmin, q.qmax, q.zeros, groups).max(initial=0)
    return f"its int32 accumulator could overflow, as it can reach {bound}" if bound >= 2**31 else None, steps


def _float_bias(module: fx.GraphModule, bias: fx.Node, outputs: int) -> np.ndarray | None:
    """Return the bias as f32[outputs]; ``None`` if it is not a finite constant of that shape."""
    if is_constant(bias):
        values = getattr(module, str(bias.target)).detach()
    elif operator(bias) in (DEQUANTIZE_TENSOR, DEQUANTIZE_CHANNEL) and is_constant(bias.args[0]):
        values = _evaluate(module, bias)
    else:
        return None
    plain = values.dtype is torch.float32 and tuple(values.shape) == (outputs,)
    return values.numpy() if plain and bool(values.isfinite().all()) else None


def _scales_that_fit_bias(
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


def _replace_bias(module: fx.GraphModule, node: fx.Node, bias: fx.Node, steps: np.ndarray, units: np.ndarray) -> None:
    constant = bias if is_constant(bias) else bias.args[0]
    stem, kind = f"{constant.target}_steps", TensorType(steps.shape, DType.F32)
    source = add_constant_like(module, stem, torch.from_numpy(steps), constant)
    scales = add_constant_like(module, f"{stem}_scale", torch.from_numpy(units.astype(np.float32)), constant)
    zeros = add_constant_like(module, f"{stem}_zero_point", torch.zeros(len(steps), dtype=torch.int64), constant)
    dequantize = qdq_overload("dequantize_per_channel")
    real = call_before(node, kind, dequantize, source, scales, zeros, 0, *INT32_RANGE, torch.int32)
    node.replace_input_with(bias, real)
