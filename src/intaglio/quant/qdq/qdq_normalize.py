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
from intaglio.fxgraph.node_info import constant_path, info, known_type, origin, update_info
from intaglio.fxgraph.nodes import (
    arguments,
    call_before,
    constant_node,
    is_constant,
    operands,
    operator,
    record_of,
    replace_node,
)
from intaglio.fxgraph.unique_names import add_constant
from intaglio.ir import SIGN_OFFSET, DType, QParams, TensorType
from intaglio.ir.names import sanitized
from intaglio.signature import DTYPES

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


def convert_qdq_to_u8(module: fx.GraphModule) -> int:
    """Convert each quantize and its dequantizes to u8, and return the number of changes.

    Pairs that kernels do not support are decomposed into arithmetic. A dequantize without a matching quantize is
    decomposed too; a u8 quantize and dequantize follow it, which reproduce the same values.
    """
    hits = 0
    for node in list(module.graph.nodes):
        if quantizes(node) and not _is_intaglio_format(node):
            hits += _convert_to_u8(node)
    for node in list(module.graph.nodes):
        hits += node.op == "placeholder" and _take_quantized_input(node)
    for node in list(module.graph.nodes):
        if dequantizes(node) and _is_unpaired(node):
            real, q = _decompose_dequantize(node), u8_qparams(node)
            if q is not None:
                real = round_trip(node, real, q)
            replace_node(node, real)
            hits += 1
    return hits


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
            real = _decompose_dequantize(value, _decompose_quantize(value.args[0]))
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
    return not is_constant(source) and not _matches(source, node)


def _matches(quantize: fx.Node, dequantize: fx.Node) -> bool:
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


def _convert_to_u8(node: fx.Node) -> bool:
    """Convert one quantize and its dequantizes to u8, or decompose them; return whether anything changed."""
    q = u8_qparams(node) if known_type(node.args[0]).dtype is DType.F32 else None
    mates = [user for user in node.users if _matches(node, user)]
    kept = [user for user in node.users if operator(user).startswith("intaglio.") or user.op == "output"]
    others = [user for user in node.users if user not in mates and user not in kept]
    if q is None:
        real = _decompose_quantize(node)
        node.replace_all_uses_with(real)
        for mate in mates:
            replace_node(mate, _decompose_dequantize(mate))
        node.graph.erase_node(node)
        return True
    if others:
        real = _decompose_quantize(node)
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


def _decompose_quantize(node: fx.Node) -> fx.Node:
    """Insert the arithmetic of a quantize in front of it, and return the result as integers."""
    aten, (low, high, dtype), x = torch.ops.aten, node.args[-3:], node.args[0]
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
    bounded = _insert_unsupported(node, kind, aten.clamp.default, moved, low, high)
    return _insert_unsupported(node, TensorType(kind.shape, DTYPES[dtype]), aten._to_copy.default, bounded, dtype=dtype)


def _decompose_dequantize(node: fx.Node, quantized: fx.Node | None = None) -> fx.Node:
    """Insert the arithmetic of a dequantize in front of it, and return the float result."""
    aten, kind = torch.ops.aten, TensorType(known_type(node).shape, DType.F32)
    real = _insert_unsupported(node, kind, aten._to_copy.default, quantized or node.args[0], dtype=torch.float32)
    moved = _insert_unsupported(node, kind, aten.sub.Tensor, real, _zero_point(node))
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
