"""Normalization of imported Q/DQ operators to the form of a `Reference`.

The passes do not change any value, except that biases are rounded to the accumulator's scale. Quantization that no
kernel supports is decomposed into float arithmetic. The operators are defined in torch.ao.quantization.fx._decomposed.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch
from torch import fx

from intaglio import numerics
from intaglio.errors import UnsupportedError
from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.node_info import constant_path, info, known_type, origin
from intaglio.fxgraph.nodes import (
    arguments,
    call_before,
    constant_node,
    is_constant,
    operator,
    replace_node,
)
from intaglio.ir import SIGN_OFFSET, DType, QParams, TensorType
from intaglio.ir.names import sanitized

LIBRARY = "quantized_decomposed."
QUANTIZE_TENSOR, QUANTIZE_CHANNEL = f"{LIBRARY}quantize_per_tensor.default", f"{LIBRARY}quantize_per_channel.default"
DEQUANTIZE_TENSOR, DEQUANTIZE_CHANNEL = (
    f"{LIBRARY}dequantize_per_tensor.default",
    f"{LIBRARY}dequantize_per_channel.default",
)
QDQ_NAMES = ("quantize_per_tensor", "dequantize_per_tensor", "quantize_per_channel", "dequantize_per_channel")
U8_OFFSET = {torch.uint8: 0, torch.int8: SIGN_OFFSET}
"""Supported dtypes of quantized activations, and the offset that converts them to u8."""


def qdq_overload(kind: str) -> Any:
    """Return the operator `kind` of `quantized_decomposed`. A graph that contains its operators has registered it."""
    return getattr(torch.ops.quantized_decomposed, kind).default


def dequantizes(node: fx.Node) -> bool:
    """Return whether a node dequantizes and was not written by a custom observer."""
    return operator(node) in (DEQUANTIZE_TENSOR, DEQUANTIZE_CHANNEL) and info(node).observer is None


def quantizes(node: fx.Node) -> bool:
    """Return whether a node quantizes and was not written by a custom observer."""
    return operator(node) in (QUANTIZE_TENSOR, QUANTIZE_CHANNEL) and info(node).observer is None


# -- canonical form ---------------------------------------------------------------------------------------------------


def canonicalize_qdq(module: fx.GraphModule) -> int:
    """Canonicalize Q/DQ calls and return the number of calls changed.

    The canonical form is the overload with numbers, positional arguments and float32 scales.

    Raises:
        UnsupportedError: parameters are computed at run time, or the operator is none of the four supported ones.
    """
    hits = [node for node in module.graph.nodes if operator(node).startswith(LIBRARY) and info(node).observer is None]
    return sum(_canonicalize(module, node) for node in hits)


def _canonicalize(module: fx.GraphModule, node: fx.Node) -> bool:
    kind, given = operator(node).removeprefix(LIBRARY).partition(".")[0], arguments(node)
    if kind not in QDQ_NAMES or given["dtype"].is_floating_point:
        raise _refused(node, "only integer quantization per tensor or per channel can be imported")
    if given.pop("out_dtype", None) not in (None, torch.float32):
        raise _refused(node, "it dequantizes to another type than float32")
    x, *parameters = given.values()
    before = node.target, node.args, dict(node.kwargs)
    take = _per_channel_arguments if "channel" in kind else _per_tensor_arguments
    node.target, node.args, node.kwargs = qdq_overload(kind), (x, *take(module, node, parameters)), {}
    return before != (node.target, node.args, {})


def _refused(node: fx.Node, problem: str) -> UnsupportedError:
    return UnsupportedError(
        origin(node).path or node.name,
        operator(node),
        problem,
        remedy="quantize the float model with intaglio; recipe='int8_dynamic' computes scales while it runs",
        source=origin(node).source or None,
    )


def _per_tensor_arguments(module: fx.GraphModule, node: fx.Node, parameters: list[Any]) -> tuple[Any, ...]:
    scale, zero, low, high = (_parameter_value(module, node, value) for value in parameters[:4])
    return float(np.float32(scale)), int(zero), int(low), int(high), parameters[4]


def _parameter_value(module: fx.GraphModule, node: fx.Node, value: Any) -> float:
    return cast(float, constant_tensor(module, node, value).item() if isinstance(value, fx.Node) else value)


def _per_channel_arguments(module: fx.GraphModule, node: fx.Node, parameters: list[Any]) -> tuple[Any, ...]:
    """Return the per-channel arguments: scales as float32, zero points (default 0), and a non-negative axis. Zero
    points of an embedding table may be float."""
    scales, zeros, axis, *rest = parameters
    values = constant_tensor(module, node, scales)
    if values.dtype is not torch.float32:
        scales = add_constant_like(module, f"{scales.target}_f32", values.to(torch.float32), scales)
    if zeros is None:
        zeros = add_constant_like(module, f"{scales.target}_zeros", torch.zeros(len(values), dtype=torch.int64), scales)
    constant_tensor(module, node, zeros)
    return scales, zeros, axis % len(known_type(node).shape), *rest


def constant_tensor(module: fx.GraphModule, node: fx.Node, constant: fx.Node) -> torch.Tensor:
    """Return the tensor of a constant that holds parameters of `node`.

    Raises:
        UnsupportedError: the parameters are computed at run time.
    """
    if not is_constant(constant):
        raise _refused(node, "its scale and zero point are computed while the model runs")
    found: torch.Tensor = getattr(module, str(constant.target)).detach()
    return found


def add_constant_like(module: fx.GraphModule, stem: str, values: torch.Tensor, of: fx.Node) -> fx.Node:
    """Add a constant and return its node; it takes the module path of the constant `of`."""
    name = add_constant(module, sanitized(stem), values.contiguous())
    return constant_node(module, name, constant_path(of, str(of.target)))


def split_shared_qdq(module: fx.GraphModule) -> int:
    """Merge equal quantizes of a value and give every reader its own dequantize; return the number of changes."""
    first: dict[tuple[Any, ...], fx.Node] = {}
    hits = 0
    for node in list(module.graph.nodes):
        if operator(node) == QUANTIZE_TENSOR and info(node).observer is None:
            if (same := first.setdefault(node.args, node)) is not node:
                replace_node(node, same)
                hits += 1
        elif dequantizes(node):
            for user in list(node.users)[1:]:
                with module.graph.inserting_before(user):
                    copied = module.graph.call_function(node.target, node.args)
                copied.meta = dict(node.meta)
                user.replace_input_with(node, copied)
                hits += 1
    return hits


# -- activations ------------------------------------------------------------------------------------------------------


def matches(quantize: fx.Node, dequantize: fx.Node) -> bool:
    """Return whether a dequantize has the scale, zero point and dtype of a quantize. The per-tensor bounds of the
    dequantize have no effect."""
    if operator(quantize) == QUANTIZE_CHANNEL:
        return operator(dequantize) == DEQUANTIZE_CHANNEL and quantize.args[1:] == dequantize.args[1:]
    if (operator(quantize), operator(dequantize)) != (QUANTIZE_TENSOR, DEQUANTIZE_TENSOR):
        return False
    return (*quantize.args[1:3], quantize.args[5]) == (*dequantize.args[1:3], dequantize.args[5])


def is_u8_quantize(node: fx.Node) -> bool:
    """Return whether a node quantizes to u8 per tensor, the form of activations in kernels."""
    return operator(node) == QUANTIZE_TENSOR and node.args[5] is torch.uint8 and info(node).observer is None


def dequantized_u8_qparams(node: fx.Node) -> QParams | None:
    """Return the parameters of the u8 activation that a node dequantizes; ``None`` for any other node."""
    bytes_ = operator(node) == DEQUANTIZE_TENSOR and node.args[5] is torch.uint8 and info(node).observer is None
    return u8_qparams(node) if bytes_ and not is_constant(node.args[0]) else None


def u8_qparams(node: fx.Node) -> QParams | None:
    """Return the u8 parameters of a per-tensor quantize or dequantize; ``None`` if kernels do not support them."""
    if operator(node) not in (QUANTIZE_TENSOR, DEQUANTIZE_TENSOR) or (shift := U8_OFFSET.get(node.args[5])) is None:
        return None
    scale, zero, low, high = node.args[1:5]
    if not low <= zero <= high or low >= high or not numerics.MIN_SCALE <= scale < math.inf:
        return None
    return QParams((scale,), (zero,), low, high).with_offset(shift)


def u8_arguments(q: QParams) -> tuple[Any, ...]:
    """Return the arguments of a u8 quantize or dequantize after the tensor."""
    return q.step, q.zero, q.qmin, q.qmax, torch.uint8


def round_trip(node: fx.Node, real: fx.Node, q: QParams) -> fx.Node:
    """Insert a quantize and a dequantize of `real` in front of `node`, and return the dequantize. `real` is on the grid
    of `q` already, so its value does not change."""
    kind = known_type(real)
    quantized = call_before(
        node, TensorType(kind.shape, DType.U8, q), qdq_overload("quantize_per_tensor"), real, *u8_arguments(q)
    )
    return call_before(node, kind, qdq_overload("dequantize_per_tensor"), quantized, *u8_arguments(q))
