"""Lower weight-only quantized linear layers (float activations, float16 or int8 weights)."""

from __future__ import annotations

from torch import fx

from intaglio.fxgraph.node_info import known_type, origin
from intaglio.fxgraph.nodes import is_constant, layer_operands, operator, record_of
from intaglio.ir import DType, QParams, TensorType
from intaglio.lower.accumulators import ends_of_groups
from intaglio.lower.graph_builder import GraphBuilder
from intaglio.quant.qdq.integer_regions import dequantized_constant, dequantized_qparams
from intaglio.quant.qdq.qdq_normalize import DEQUANTIZE_CHANNEL

CAST_TARGET = "aten._to_copy.default"


def stored_weight(node: fx.Node) -> fx.Node | None:
    """Return the constant of a weight-only quantized linear layer: float16, or int8 with a scale per output channel.

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
    assert stored is not None, f"{node} has no stored weight"
    if known_type(stored).dtype is DType.F16:
        weight = builder.add_parameter(stored)
    else:
        low, high = real.args[4:6]
        scales = tuple(getattr(builder.module, real.args[1].target).tolist())
        quantized = getattr(builder.module, stored.target).numpy()
        weight = builder.add_weight(stored, quantized, QParams(scales, (0,) * len(scales), low, high, 0))
    ends = ends_of_groups(builder, node)
    names = [builder.add_parameter(x) if is_constant(x) else builder.float_value(x), weight, *ends]
    names += [] if bias is None else [builder.add_parameter(bias)]
    stem = where.path.replace("@", "_call") or node.name
    result = TensorType(known_type(node).shape, DType.F32)
    builder.values[node] = builder.add_op("grouped_linear_f32" if ends else "linear_f32", names, stem, result, where)
