"""Conversion of imported quantized activations to u8, the form of kernels, and of those that kernels do not support to
float arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from intaglio import numerics
from intaglio.fxgraph.node_info import known_type, update_info
from intaglio.fxgraph.nodes import call_before, is_constant, operands, operator, record_of, replace_node
from intaglio.ir import DType, QParams, TensorType
from intaglio.quant.qdq.qdq_normalize import (
    DEQUANTIZE_CHANNEL,
    DEQUANTIZE_TENSOR,
    QUANTIZE_CHANNEL,
    QUANTIZE_TENSOR,
    U8_OFFSET,
    add_constant_like,
    constant_tensor,
    dequantized_u8_qparams,
    dequantizes,
    matches,
    qdq_overload,
    quantizes,
    round_trip,
    u8_arguments,
    u8_qparams,
)
from intaglio.signature import DTYPES


def convert_qdq_to_u8(module: fx.GraphModule) -> int:
    """Convert each quantize and its dequantizes to u8, and return the number of changes.

    Pairs that kernels do not support are decomposed into arithmetic. A dequantize without a matching quantize is
    decomposed too; a u8 quantize and dequantize follow it, which reproduce the same values.
    """
    hits = 0
    for node in list(module.graph.nodes):
        if quantizes(node) and not _is_intaglio_format(node):
            hits += _convert_to_u8(node)
    hits += _take_quantized_inputs(module)
    for node in list(module.graph.nodes):
        if dequantizes(node) and _is_unpaired(node):
            real, q = _decompose_dequantize(node, _input_as_floats(node)), u8_qparams(node)
            if q is not None:
                real = round_trip(node, real, q)
            replace_node(node, real)
            hits += 1
    return hits + _take_quantized_inputs(module)


def _take_quantized_inputs(module: fx.GraphModule) -> int:
    return sum(node.op == "placeholder" and _take_quantized_input(node) for node in module.graph.nodes)


def decompose_unsupported_rhs(module: fx.GraphModule) -> int:
    """Decompose the Q/DQ of second factors that kernels do not support, and return the number of changes.

    Kernels read the second factor of a product of activations as 1..255 with zero point 128. Quantized operands of
    attention after the first are always decomposed, because the kernel also quantizes the probabilities, which the
    imported model does not.
    """
    hits = 0
    for node in list(module.graph.nodes):
        record = record_of(node)
        if record is None or not record.anchor or record.roles.weight is not None or record.variadic:
            continue
        values = operands(node)
        for value in [value for i in record.roles.x[1:] if (value := values[i]) is not None]:
            q = dequantized_u8_qparams(value)
            if q is None or (not record.is_attention and (q.zero, q.qmin + q.qmax) == (128, 256)):
                continue
            found = f"{q.qmin}..{q.qmax} with zero point {q.zero}"
            update_info(
                node,
                unsupported_reason=f"its second operand has the range {found}; kernels read 1..255 with zero point 128",
            )
            real = _decompose_dequantize(value, _quantized_as_floats(value.args[0]))
            replace_node(value, real)
            hits += 1
    return hits


def _is_intaglio_format(node: fx.Node) -> bool:
    """Return whether only intaglio's own references quantize like this: per-channel image bytes and 16-bit values."""
    if operator(node) == QUANTIZE_CHANNEL:
        return operator(node.args[0]) == "aten.addcmul.default" and node.args[-1] is torch.uint8
    _, _, zero, low, high, dtype = node.args
    steps = numerics.QUANT_STEPS
    return dtype is torch.uint16 and zero % steps == steps // 2 and low % steps == 0 and high % steps == steps - 1


def _take_quantized_input(node: fx.Node) -> bool:
    """Give a uint8 or int8 input its quantization parameters if all its readers dequantize it alike."""
    kind = known_type(node)
    if kind.q is not None or not node.users or not all(map(dequantizes, node.users)):
        return False
    parameters = {user.args[1:] if u8_qparams(user) is not None else None for user in node.users}
    if None in parameters or len(parameters) > 1:
        return False
    update_info(node, type=TensorType(kind.shape, kind.dtype, _as_given(next(iter(node.users)))))
    return True


def _as_given(node: fx.Node) -> QParams:
    """Return the parameters of a per-tensor quantize or dequantize in its own data type."""
    scale, zero, low, high = node.args[1:5]
    return QParams((scale,), (zero,), low, high)


def _is_unpaired(node: fx.Node) -> bool:
    """Return whether a dequantize reads neither a constant, a quantized input nor a quantize with its parameters."""
    source = node.args[0]
    if source.op == "placeholder" and known_type(source).q is not None:
        return False
    return not is_constant(source) and not matches(source, node)


def _convert_to_u8(node: fx.Node) -> bool:
    """Convert one quantize and its dequantizes to u8, or decompose them; return whether anything changed."""
    q = u8_qparams(node) if known_type(node.args[0]).dtype is DType.F32 else None
    mates = [user for user in node.users if matches(node, user)]
    kept = [user for user in node.users if operator(user).startswith("intaglio.") or user.op == "output"]
    others = [user for user in node.users if user not in mates and user not in kept]
    if q is None:
        steps = _quantized_as_floats(node)
        for mate in mates:
            replace_node(mate, _decompose_dequantize(mate, steps))
        only_returned = all(user.op == "output" for user in node.users)
        node.replace_all_uses_with(_in_steps_of_one(node, steps) if only_returned else _as_integers(node, steps))
        node.graph.erase_node(node)
        return True
    if others:
        real = _as_integers(node, _quantized_as_floats(node))
        for user in others:
            user.replace_input_with(node, real)
    before = [qdq.args for qdq in (node, *mates)]
    if node.args[5] is torch.int8 and any(user.op == "output" for user in kept):
        kind = TensorType(known_type(node).shape, DType.S8, _as_given(node))
        if not mates:
            update_info(node, type=kind)
            return bool(others)
        returned = call_before(node, kind, node.target, *node.args)  # the caller gets int8, and operators read uint8
        next(iter(user for user in kept if user.op == "output")).replace_input_with(node, returned)
    for qdq in (node, *mates):
        qdq.args = (qdq.args[0], *u8_arguments(q))
    update_info(node, type=TensorType(known_type(node).shape, DType.U8, q))
    return bool(others) or before != [qdq.args for qdq in (node, *mates)]


def _quantized_as_floats(node: fx.Node) -> fx.Node:
    """Insert the arithmetic of a quantize in front of it, and return the quantized values as floats."""
    aten, (low, high, _), x = torch.ops.aten, node.args[-3:], node.args[0]
    kind = TensorType(known_type(node).shape, DType.F32)
    if known_type(x).dtype is not DType.F32:
        x = _insert_unsupported(node, kind, aten._to_copy.default, x, dtype=torch.float32)
    module = node.graph.owning_module
    if operator(node) == QUANTIZE_CHANNEL:
        inverse = 1.0 / constant_tensor(module, node, node.args[1])
        steps = _insert_unsupported(node, kind, aten.mul.Tensor, x, _per_channel_constant(node, "inverse", inverse))
    else:
        steps = _insert_unsupported(node, kind, aten.mul.Tensor, x, 1.0 / node.args[1])
    rounded = _insert_unsupported(node, kind, aten.round.default, steps)
    moved = _insert_unsupported(node, kind, aten.add.Tensor, rounded, _zero_point(node))
    return _insert_unsupported(node, kind, aten.clamp.default, moved, low, high)


def _as_integers(node: fx.Node, steps: fx.Node) -> fx.Node:
    """Return quantized values as integers of the data type of a quantize, from floats."""
    dtype = node.args[-1]
    kind = TensorType(known_type(node).shape, DTYPES[dtype])
    return _insert_unsupported(node, kind, torch.ops.aten._to_copy.default, steps, dtype=dtype)


def _in_steps_of_one(node: fx.Node, steps: fx.Node) -> fx.Node:
    """Return quantized values that the model returns: a quantize with scale 1 of the floats, which the program can
    compute, or a cast to another data type. The floats are within their bounds."""
    dtype = node.args[-1]
    if dtype not in U8_OFFSET:
        return _as_integers(node, steps)
    kind, bounds = TensorType(known_type(node).shape, DTYPES[dtype]), torch.iinfo(dtype)
    made = call_before(node, kind, qdq_overload("quantize_per_tensor"), steps, 1.0, 0, bounds.min, bounds.max, dtype)
    node.replace_all_uses_with(made)
    _convert_to_u8(made)
    return made


def _input_as_floats(node: fx.Node) -> fx.Node | None:
    """Return the integers of an input as floats: a dequantize with scale 1, which the program computes. ``None`` if the
    dequantize ``node`` reads anything else, or if other operators read the input."""
    source = node.args[0]
    if source.op != "placeholder" or node.args[-1] not in U8_OFFSET or not all(map(dequantizes, source.users)):
        return None
    bounds = torch.iinfo(node.args[-1])
    kind = TensorType(known_type(node).shape, DType.F32)
    overload = qdq_overload("dequantize_per_tensor")
    return call_before(node, kind, overload, source, 1.0, 0, bounds.min, bounds.max, node.args[-1])


def _decompose_dequantize(node: fx.Node, steps: fx.Node | None) -> fx.Node:
    """Insert the arithmetic of a dequantize in front of it, and return the float result.

    Args:
        node: the dequantize.
        steps: the quantized values as floats; ``None`` to cast the integers.
    """
    aten, kind = torch.ops.aten, TensorType(known_type(node).shape, DType.F32)
    if steps is None:
        steps = _insert_unsupported(node, kind, aten._to_copy.default, node.args[0], dtype=torch.float32)
    moved = _insert_unsupported(node, kind, aten.sub.Tensor, steps, _zero_point(node))
    scale = node.args[1]
    if operator(node) == DEQUANTIZE_CHANNEL:
        scale = _per_channel_constant(node, "scale", constant_tensor(node.graph.owning_module, node, scale))
    return _insert_unsupported(node, kind, aten.mul.Tensor, moved, scale)


def _insert_unsupported(node: fx.Node, kind: TensorType, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    made = call_before(node, kind, target, *args, **kwargs)
    update_info(
        made,
        unsupported_reason="it belongs to a quantize or dequantize operator with parameters that no kernel supports",
    )
    return made


def _zero_point(node: fx.Node) -> Any:
    if operator(node) in (QUANTIZE_TENSOR, DEQUANTIZE_TENSOR):
        return node.args[2]
    return _per_channel_constant(
        node, "zero_point", constant_tensor(node.graph.owning_module, node, node.args[2]).to(torch.float32)
    )


def _per_channel_constant(node: fx.Node, stem: str, values: torch.Tensor) -> fx.Node:
    """Return a constant with one entry per channel, broadcastable along the operator's axis."""
    shape = [-1 if axis == node.args[3] else 1 for axis in range(len(known_type(node).shape))]
    return add_constant_like(node.graph.owning_module, f"{node.name}_{stem}", values.reshape(shape), node.args[1])
