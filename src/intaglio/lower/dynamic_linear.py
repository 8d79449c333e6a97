"""Lower linear layers with dynamically quantized activations (one scale per token)."""

from __future__ import annotations

import numpy as np
from torch import fx

from intaglio.fxgraph.node_info import known_type, origin
from intaglio.fxgraph.nodes import layer_operands, operator
from intaglio.ir import DType, Op, TensorType
from intaglio.lower.accumulators import add_anchor_weight, ends_of_groups
from intaglio.lower.graph_builder import GraphBuilder
from intaglio.ops.dynamic_quant import per_token_accumulator_qparams, per_token_qparams, scales_shape
from intaglio.quant.annotate.per_token import DEQUANTIZE_ROWS_TARGET, QUANTIZE_ROWS_TARGET, dynamic_operands
from intaglio.quant.annotate.regions import Chain


def is_dynamic_quantization(node: fx.Node) -> bool:
    """Return whether a node is a dynamic quantize or dequantize, or takes one result of a dynamic quantize."""
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    return operator(node) in (QUANTIZE_ROWS_TARGET, DEQUANTIZE_ROWS_TARGET) or (
        source is not None and operator(source) == QUANTIZE_ROWS_TARGET
    )


def lower_dynamic_quantize(builder: GraphBuilder, node: fx.Node) -> None:
    """Lower a dynamic quantize to an operator with two results: quantized values and per-token scales.

    Its getitem nodes refer to these values, and its dequantize nodes to the quantized values.
    """
    if operator(node) == DEQUANTIZE_ROWS_TARGET:
        builder.values[node] = builder.values[node.args[0]]
        return
    if operator(node) != QUANTIZE_ROWS_TARGET:
        source, index = node.args
        builder.values[node] = builder.items[source][index]
        return
    source, mode = builder.float_value(node.args[0]), node.args[1]
    shape = builder.types[source].shape
    scales = builder.add_value(f"{source}_scales", TensorType(scales_shape(shape), DType.F32))
    quantized = builder.add_value(f"{source}_rows", TensorType(shape, DType.U8, per_token_qparams(scales)))
    builder.ops.append(Op("quantize_rows", (source,), (quantized, scales), {"mode": mode}, origin=origin(node)))
    builder.items[node] = quantized, scales
    builder.values[node] = quantized


def lower_dynamic_linear(builder: GraphBuilder, region: Chain) -> None:
    """Lower a linear layer on dynamically quantized activations.

    The result is an int32 accumulator with per-token scales, then a dequantize that adds the float bias.
    """
    node, record = region.anchor, region.record
    read = layer_operands(node)
    rows = dynamic_operands(read.x)
    assert rows is not None, f"{node} reads no rows"
    x, scales = (builder.values[part] for part in rows)
    weight, columns = add_anchor_weight(builder, region)
    where, shape, outputs = origin(node), known_type(node).shape, builder.constants[weight].shape[0]
    stem = where.path.replace("@", "_call") or record.name
    zeros = builder.add_constant(f"{stem}_start", np.zeros(outputs, np.int32), DType.I32)
    ends = ends_of_groups(builder, node)
    acc = builder.add_op(
        record.name,
        [x, weight, zeros, *ends],
        f"{stem}_acc",
        TensorType(shape, DType.I32, per_token_accumulator_qparams(scales)),
        where,
    )
    bias = np.zeros(outputs, np.float32)
    if read.bias is not None:
        bias = getattr(builder.module, read.bias.target).detach().numpy()
    names = [
        builder.add_constant(f"{stem}_{label}", array, DType.F32)
        for label, array in (("columns", np.array(columns, np.float32)), ("bias", bias.astype(np.float32)))
    ]
    result = TensorType(shape, DType.F32)
    builder.values[node] = builder.add_op("dequantize_rows", [acc, scales, *names, *ends], stem, result, where)
