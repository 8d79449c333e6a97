"""int8 activations as uint8 values that are 128 more: the convolutions that Inductor calls read uint8 only."""

from __future__ import annotations

import torch
from torch import fx

from intaglio.fxgraph.node_info import info, known_type, update_info
from intaglio.fxgraph.nodes import call_before, is_constant, operator
from intaglio.ir import SIGN_OFFSET, DType, TensorType
from intaglio.quant.qdq.qdq_normalize import DEQUANTIZE_TENSOR, QUANTIZE_TENSOR, u8_arguments, u8_qparams
from intaglio.signature import DTYPES

aten = torch.ops.aten


def use_unsigned_activations(module: fx.GraphModule) -> None:
    """Quantize int8 activations to uint8, and dequantize them from uint8; other readers still get int8."""
    for node in list(module.graph.nodes):
        if operator(node) not in (QUANTIZE_TENSOR, DEQUANTIZE_TENSOR) or not _is_signed_activation(node):
            continue
        q = u8_qparams(node)
        if q is None:
            continue
        source = node.args[0]
        if operator(node) == QUANTIZE_TENSOR:
            others = [user for user in node.users if operator(user) != DEQUANTIZE_TENSOR]
            update_info(node, type=TensorType(known_type(node).shape, DType.U8, q))
            for user in others:
                user.replace_input_with(node, _shifted(user, node, -SIGN_OFFSET, torch.int8))
        elif operator(source) != QUANTIZE_TENSOR:
            source = _shifted(node, source, SIGN_OFFSET, torch.uint8)
        node.args = (source, *u8_arguments(q))


def _is_signed_activation(node: fx.Node) -> bool:
    return node.args[5] is torch.int8 and not is_constant(node.args[0]) and info(node).observer is None


def _shifted(before: fx.Node, value: fx.Node, offset: int, dtype: torch.dtype) -> fx.Node:
    """Insert ``value + offset`` with another 8-bit type in front of a node."""
    shape = known_type(value).shape
    wide = call_before(before, TensorType(shape, DType.I16), aten._to_copy.default, value, dtype=torch.int16)
    moved = call_before(before, TensorType(shape, DType.I16), aten.add.Tensor, wide, offset)
    return call_before(before, TensorType(shape, DTYPES[dtype]), aten._to_copy.default, moved, dtype=dtype)
