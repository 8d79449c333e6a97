"""Rewrites of image inputs with one zero point per channel into a form that other engines compute in int8.

The convolutions of other engines accept only one zero point per tensor. These passes rewrite a convolution accordingly,
with identical results.
"""

from __future__ import annotations

import torch
from torch import fx

from intaglio.fxgraph.node_info import constant_path, info, known_type, origin, tensor_type, update_info
from intaglio.fxgraph.nodes import arguments, call_before, constant_node, operator, replace_node
from intaglio.fxgraph.overloads import CONV2D_TARGET
from intaglio.ir import DType, TensorType
from intaglio.quant.qdq.integer_regions import dequantized_constant, dequantized_qparams, image_operands
from intaglio.quant.qdq.qdq_normalize import DEQUANTIZE_CHANNEL
from intaglio.torch_private import quantized_decomposed


def byte_inputs(module: fx.GraphModule) -> frozenset[int]:
    """Return the positions of inputs that may be uint8 or float: declared images that no operator reads in float."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    images = [node for node in module.graph.nodes if image_of(node) is not None]
    return frozenset(placeholders.index(image_of(node)) for node in images)


def image_of(node: fx.Node) -> fx.Node | None:
    """Return the image input whose bytes are the result of this quantize, or ``None`` for other nodes. Other inputs
    with parameters per channel are not images: their quantized values are not bytes of the input."""
    if (found := image_operands(node)) is None or found[0].op != "placeholder" or not info(node.args[0]).takes_bytes:
        return None
    readers = [reader for reader in found[0].users if tensor_type(reader) is not None]
    return found[0] if all(reader is node.args[0] for reader in readers) else None


def accept_bytes(module: fx.GraphModule, node: fx.Node) -> None:
    """Make an image input uint8 and remove its quantize, because the bytes of the image are the quantized values."""
    if (x := image_of(node)) is not None:
        update_info(x, type=TensorType(known_type(x).shape, DType.U8))
        replace_node(node, x)


def fold_zero_points(module: fx.GraphModule, node: fx.Node) -> None:
    """Rewrite a convolution of u8 values with zero points z[c] as one of the same values with zero point 0.

    Exactly, ``sum(w * (x - z)) + b = sum(w * x) + (b - sum(w * z))`` in units of the bias. Padding with z[c] becomes an
    explicit operator. The scale must be the same for all channels, which is true if the scales were folded into the
    weights of the consumers.
    """
    if operator(node) != CONV2D_TARGET or operator(node.args[0]) != DEQUANTIZE_CHANNEL:
        return
    given, x = arguments(node), node.args[0]
    q, weight, bias = dequantized_qparams(x), given["weight"], given["bias"]
    counts = dequantized_constant(weight, DType.S8), dequantized_constant(bias, DType.I32)
    if q is None or q.axis != 1 or None in counts or not _is_symmetric(module, weight):
        return
    scales, zeros = (getattr(module, str(constant.target)).tolist() for constant in x.args[1:3])
    if len(set(scales)) > 1:
        return
    quantized, padding = x.args[0], _pair(given["padding"])
    zero = zeros[0]
    if len(set(zeros)) > 1:
        if any(padding):
            quantized = call_before(x, _padded(known_type(x), padding), pad_with_zero_points, quantized, zeros, padding)
            update_info(quantized, origin=origin(x.args[0]))
        zero, padding = 0, [0, 0]
        moved = _adjusted_bias(module, *counts, zeros, given["groups"])
        held = call_before(node, known_type(bias), bias.target, moved, *bias.args[1:])
        node.replace_input_with(bias, held)
    how = scales[0], zero, q.qmin, q.qmax, torch.uint8
    one = call_before(
        node,
        TensorType(known_type(quantized).shape, DType.F32),
        quantized_decomposed().dequantize_per_tensor.default,
        quantized,
        *how,
    )
    node.args = (one, *node.args[1:3], given["stride"], padding, given["dilation"], given["groups"])
    node.kwargs = {}


def pad_with_zero_points(quantized: torch.Tensor, zeros: list[int], padding: list[int]) -> torch.Tensor:
    """Pad u8[n, c, h, w] at each end by ``padding`` rows and columns with the zero point of each channel."""
    rows, columns = padding
    channels = quantized.split(1, 1)
    border = (columns, columns, rows, rows)
    padded = [torch.nn.functional.pad(c, border, value=z) for c, z in zip(channels, zeros, strict=True)]
    return torch.cat(padded, 1)


def _adjusted_bias(module: fx.GraphModule, weight: fx.Node, bias: fx.Node, zeros: list[int], groups: int) -> fx.Node:
    """Return the constant ``b - sum(w * z)`` in int32, which is wide enough for every accumulator of the
    convolution."""
    w, b = (getattr(module, str(constant.target)) for constant in (weight, bias))
    own = torch.tensor(zeros).reshape(groups, 1, -1, 1, 1).double()
    sums = (w.double().reshape(groups, -1, *w.shape[1:]) * own).sum((2, 3, 4)).reshape(-1)
    name = f"{bias.target}_moved"
    module.register_buffer(name, (b.double() - sums).to(torch.int32))
    return constant_node(module, name, constant_path(bias, name))


def _is_symmetric(module: fx.GraphModule, weight: fx.Node) -> bool:
    zeros = weight.args[2]
    return not (getattr(module, str(zeros.target)).any() if isinstance(zeros, fx.Node) else zeros)


def _pair(padding: list[int]) -> list[int]:
    return [*padding] * (2 // len(padding))


def _padded(kind: TensorType, padding: list[int]) -> TensorType:
    *outer, rows, columns = kind.shape
    return TensorType((*outer, rows + 2 * padding[0], columns + 2 * padding[1]), DType.U8)
