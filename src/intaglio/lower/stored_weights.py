"""Lower weight-only quantized linear layers (float activations, float16 or int8 weights)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import fx

from intaglio.fxgraph.node_info import known_type, origin
from intaglio.fxgraph.nodes import is_constant, layer_operands, operator, record_of
from intaglio.ir import DType, Packing, QParams, TensorType
from intaglio.lower.accumulators import ends_of_groups
from intaglio.lower.graph_builder import GraphBuilder
from intaglio.quant.imported_weights.group_operator import grouped_weight
from intaglio.quant.qdq.integer_regions import dequantized_constant, dequantized_qparams
from intaglio.quant.qdq.qdq_normalize import DEQUANTIZE_CHANNEL

CAST_TARGET = "aten._to_copy.default"


def stored_weight(node: fx.Node) -> fx.Node | None:
    """Return the constant of a weight-only quantized linear layer: float16, or int8 with scales per output channel or
    per group of inputs.

    Return None for any other node, and if activations are rounded to a type without kernels.
    """
    record = record_of(node)
    if record is None or not record.is_linear_layer:
        return None
    x, weight, bias = layer_operands(node)
    plain = all(value is None or known_type(value).dtype is DType.F32 for value in (x, bias))
    simulated = ".dequantize_" in operator(x) and dequantized_qparams(x) is None
    if not plain or simulated or not (bias is None or is_constant(bias)):
        return None
    if operator(weight) == CAST_TARGET and is_constant(weight.args[0]):
        return weight.args[0] if known_type(weight.args[0]).dtype is DType.F16 else None
    if grouped := grouped_weight(weight):
        return grouped[0]
    return (
        dequantized_constant(weight, DType.S8)
        if operator(weight) == DEQUANTIZE_CHANNEL and weight.args[3] == 0
        else None
    )


def only_widens_stored_weight(node: fx.Node) -> bool:
    """Return whether a node only converts the stored weight of such layers to float."""
    return bool(node.users) and all(stored_weight(user) in node.all_input_nodes for user in node.users)


def lower_linear_f32(builder: GraphBuilder, node: fx.Node) -> None:
    """Lower a weight-only quantized linear layer."""
    x, real, bias = layer_operands(node)
    stored, where = stored_weight(node), origin(node)
    attrs: dict[str, Any] = {}
    steps: list[str] = []
    assert stored is not None, f"{node} has no stored weight"
    if grouped := grouped_weight(real):
        weight, steps, attrs = (
            _add_grouped(builder, stored, grouped[2]),
            [builder.add_parameter(grouped[1])],
            {"group": grouped[2]},
        )
    elif known_type(stored).dtype is DType.F16:
        weight = builder.add_parameter(stored)
    else:
        low, high = real.args[4:6]
        scales = tuple(getattr(builder.module, real.args[1].target).tolist())
        quantized = getattr(builder.module, stored.target).numpy()
        weight = builder.add_weight(stored, quantized, QParams(scales, (0,) * len(scales), low, high, 0))
    ends = ends_of_groups(builder, node)
    names = [builder.add_parameter(x) if is_constant(x) else builder.float_value(x), weight, *steps, *ends]
    names += [] if bias is None else [builder.add_parameter(bias)]
    stem = where.path.replace("@", "_call") or node.name
    result = TensorType(known_type(node).shape, DType.F32)
    kind = "linear_groups_f32" if steps else "grouped_linear_f32" if ends else "linear_f32"
    builder.values[node] = builder.add_op(kind, names, stem, result, where, **attrs)


def _add_grouped(builder: GraphBuilder, node: fx.Node, group: int) -> str:
    """Return the name of integers with steps for groups, which a file stores in as few bits as they need."""
    name = builder.add_parameter(node)
    builder.types[name] = replace(builder.types[name], packing=fewest_bits(builder.constants[name], group))
    return name


def fewest_bits(quantized: np.ndarray, group: int) -> Packing | None:
    """Return the packing of s8[N, K] in the fewest bits, ``None`` if that is all 8.

    Groups have smallest values of their own if that saves more bits than these values take.
    """
    if not quantized.size:
        return None
    starts = np.arange(0, quantized.shape[1], group)
    lows, highs = (np.asarray(end.reduceat(quantized, starts, axis=1), int) for end in (np.minimum, np.maximum))
    low = min(int(lows.min()), 0)
    bits, own_bits = _bits(highs.max() - low), _bits((highs - lows).max())
    if (bits - own_bits) * quantized.size > 8 * lows.size and own_bits < 8:
        return Packing(own_bits, 0, lows=group)
    return Packing(bits, low) if bits < 8 else None


def _bits(largest: int) -> int:
    """Return the number of bits of integers from 0 to ``largest``."""
    return max(int(largest).bit_length(), 1)
