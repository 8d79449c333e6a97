"""Quantize and dequantize of residual operands, so that ONNX Runtime computes their convolutions in int8.

In a reference, a convolution whose result is added to another value is rounded only after the addition. ONNX Runtime
runs a convolution in int8 only if a quantize follows it directly, and would compute this one in float32. The range of
the inserted quantize follows from the ranges of the addition.
"""

from __future__ import annotations

import torch
from torch import fx

from intaglio import numerics
from intaglio.fxgraph.node_info import known_type, origin, update_info
from intaglio.fxgraph.nodes import arguments, call_before, operator
from intaglio.fxgraph.overloads import ADD_TARGET, RELU_TARGET
from intaglio.ir import QParams, Ref
from intaglio.quant.qdq.integer_regions import dequantized_qparams, quantize_qparams
from intaglio.torch_private import quantized_decomposed

CONVOLUTION_TARGETS = ("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default")
QUANT_MIN, QUANT_MAX = 0, 255

Range = tuple[float, float]


def quantize_residual_operands(module: fx.GraphModule) -> list[fx.Node]:
    """Insert a quantize to u8 and its dequantize between a convolution, or its ReLU, and the addition that reads it.

    This is done if only additions and ReLUs are between the convolution and a quantize to u8.

    Returns:
        The convolutions whose results are now quantized.
    """
    found = []
    for node in [node for node in module.graph.nodes if operator(node) in CONVOLUTION_TARGETS and len(node.users) == 1]:
        reader = next(iter(node.users))
        term, reader = (reader, next(iter(reader.users))) if operator(reader) == RELU_TARGET else (node, reader)
        if (
            dequantized_qparams(node.args[0]) is None
            or operator(reader) != ADD_TARGET
            or (bounds := unsaturated_range(term)) is None
        ):
            continue
        low, high = bounds
        how = (
            *numerics.affine_qparams(0.0 if operator(term) == RELU_TARGET else low, high, QUANT_MIN, QUANT_MAX),
            QUANT_MIN,
            QUANT_MAX,
            torch.uint8,
        )
        quantized = call_before(
            reader, known_type(node), quantized_decomposed().quantize_per_tensor.default, term, *how
        )
        values = call_before(
            reader, known_type(node), quantized_decomposed().dequantize_per_tensor.default, quantized, *how
        )
        for inserted in (quantized, values):
            update_info(inserted, origin=origin(node))
        reader.replace_input_with(term, values)
        found.append(node)
    return found


def unsaturated_range(node: fx.Node) -> Range | None:
    """Return the range of a value outside of which its consumers saturate anyway, or ``None`` if it is not known.

    If ``x + r`` is quantized to low..high and r is dequantized from r_low..r_high, then x below ``low - r_high`` always
    gives low, and x above ``high - r_low`` always gives high.
    """
    if len(node.users) != 1:
        return None
    reader = next(iter(node.users))
    if (q := quantize_qparams(reader)) is not None:
        return real_range(q)
    if operator(reader) == RELU_TARGET:
        reader_range = unsaturated_range(reader)
        return None if reader_range is None else (max(reader_range[0], 0.0), reader_range[1])
    if operator(reader) != ADD_TARGET or arguments(reader)["alpha"] != 1:
        return None
    others = [value for value in reader.args[:2] if value is not node and isinstance(value, fx.Node)]
    other, reader_range = dequantized_qparams(others[0]) if others else None, unsaturated_range(reader)
    if other is None or reader_range is None or (added := real_range(other)) is None:
        return None
    return reader_range[0] - added[1], reader_range[1] - added[0]


def real_range(q: QParams) -> Range | None:
    """Return the real values of the lowest and highest quantized value, or ``None`` for parameters per channel."""
    if q.axis is not None or isinstance(q.zero_point, Ref):
        return None
    return (q.qmin - q.zero_point[0]) * q.step, (q.qmax - q.zero_point[0]) * q.step
