"""Inputs with a zero point for every channel, as images have, in a form that other engines compute in int8.

Their convolutions take one zero point for a whole tensor. The passes here write such a convolution with one, with the
meaning it has.
"""

from __future__ import annotations

import torch
from torch import fx

from intaglio.fxgraph.node_info import constant_path, info, known_type, origin, tensor_type, update_info
from intaglio.fxgraph.nodes import arguments, call_before, constant_node, operator, replace_node
from intaglio.fxgraph.overloads import CONV2D_TARGET
from intaglio.ir import DType, TensorType
from intaglio.quant.qdq.integer_regions import constant_of, levels_of, pixels_of
from intaglio.quant.qdq.qdq_normalize import DEQUANTIZE_CHANNEL
from intaglio.torch_private import quantized_decomposed


def byte_inputs(module: fx.GraphModule) -> frozenset[int]:
    """Inputs, by position, that may be uint8 as well as floats: declared images that nothing reads in float."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    images = [node for node in module.graph.nodes if image_of(node) is not None]
    return frozenset(placeholders.index(image_of(node)) for node in images)


def image_of(node: fx.Node) -> fx.Node | None:
    """The input of whose bytes this quantize gives the levels; ``None`` for any other node. Other inputs with
    parameters per channel have no bytes: their levels are steps of their own ranges."""
    if (found := pixels_of(node)) is None or found[0].op != "placeholder" or not info(node.args[0]).takes_bytes:
        return None
    readers = [reader for reader in found[0].users if tensor_type(reader) is not None]
    return found[0] if all(reader is node.args[0] for reader in readers) else None


def take_bytes(module: fx.GraphModule, node: fx.Node) -> None:
    """An input whose bytes stand for pixels is those bytes, and they are the levels."""
    if (x := image_of(node)) is not None:
        update_info(x, type=TensorType(known_type(x).shape, DType.U8))
        replace_node(node, x)


def one_zero_point(module: fx.GraphModule, node: fx.Node) -> None:
    """A convolution of u8 levels with zero points z[c] -> one of the same levels with zero point 0.

    ``sum(w * (x - z)) + b = sum(w * x) + (b - sum(w * z))`` in counts of the bias, exactly. What it pads with, z[c],
    is written around the levels first. The scale must be the same for every channel, which is so where the readers'
    weights took the scales in.
    """
    if operator(node) != CONV2D_TARGET or operator(node.args[0]) != DEQUANTIZE_CHANNEL:
        return
    given, x = arguments(node), node.args[0]
    q, weight, bias = levels_of(x), given["weight"], given["bias"]
    counts = constant_of(weight, DType.S8), constant_of(bias, DType.I32)
    if q is None or q.axis != 1 or None in counts or not _is_symmetric(module, weight):
        return
    scales, zeros = (getattr(module, str(constant.target)).tolist() for constant in x.args[1:3])
    if len(set(scales)) > 1:
        return
    levels, padding = x.args[0], _pair(given["padding"])
    zero = zeros[0]
    if len(set(zeros)) > 1:
        if any(padding):
            levels = call_before(x, _padded(known_type(x), padding), pad_levels, levels, zeros, padding)
            update_info(levels, origin=origin(x.args[0]))
        zero, padding = 0, [0, 0]
        moved = _moved(module, *counts, zeros, given["groups"])
        held = call_before(node, known_type(bias), bias.target, moved, *bias.args[1:])
        node.replace_input_with(bias, held)
    how = scales[0], zero, q.qmin, q.qmax, torch.uint8
    one = call_before(
        node,
        TensorType(known_type(levels).shape, DType.F32),
        quantized_decomposed().dequantize_per_tensor.default,
        levels,
        *how,
    )
    node.args = (one, *node.args[1:3], given["stride"], padding, given["dilation"], given["groups"])
    node.kwargs = {}


def pad_levels(levels: torch.Tensor, zeros: list[int], padding: list[int]) -> torch.Tensor:
    """u8[n, c, h, w] with a border, ``padding`` rows and columns wide at each end, of every channel's zero point."""
    rows, columns = padding
    channels = levels.split(1, 1)
    border = (columns, columns, rows, rows)
    padded = [torch.nn.functional.pad(c, border, value=z) for c, z in zip(channels, zeros, strict=True)]
    return torch.cat(padded, 1)


def _moved(module: fx.GraphModule, weight: fx.Node, bias: fx.Node, zeros: list[int], groups: int) -> fx.Node:
    """``b - sum(w * z)`` in int32, which holds every accumulator of the convolution."""
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
