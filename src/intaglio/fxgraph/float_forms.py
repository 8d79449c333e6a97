"""Float operators that a program computes itself: as a loop of primitives, or by moving data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from intaglio.fxgraph.node_info import known_type, tensor_type
from intaglio.fxgraph.nodes import (
    arguments,
    call_of,
    is_constant,
    operands,
    operator,
    record_of,
    resolve_dims,
    tensor_nodes,
)
from intaglio.ir import Attrs, DType
from intaglio.ops import BY_NAME, BY_TARGET, OpDef
from intaglio.ops.loop_ops.float_loop import FloatLoop
from intaglio.ops.loop_ops.loop_builder import Body, FloatCall
from intaglio.ops.loop_ops.primitives import primitive
from intaglio.ops.movement.data_movement import MOVED_TYPES

LOOP_CONSTANT_DTYPES = (torch.float32, torch.bool, torch.int64)
"""Data types of constants that loops can read."""


def loop_of(target: str) -> FloatLoop | None:
    """Return how the program computes an ATen overload between floats."""
    record = BY_TARGET.get(target)
    return None if record is None else record.loop


def float_call(
    node: fx.Node, module: fx.GraphModule, tables: Mapping[str, torch.Tensor] | None = None
) -> FloatCall | None:
    """Return the call of an operator that the program computes in float, or None if it needs an island.

    Args:
        node: The operator.
        module: Its graph.
        tables: Quantized embedding tables among its arguments, by the name of the argument.
    """
    loop, result = loop_of(operator(node)), tensor_type(node)
    if loop is None or result is None:
        return None
    given = {name: argument_type(value) for name, value in arguments(node).items()}
    held = {
        name: getattr(module, str(value.target))
        for name, value in arguments(node).items()
        if isinstance(value, fx.Node) and is_constant(value)
    }
    read = [leaf for leaf in tensor_nodes((node.args, node.kwargs)) if leaf.op == "get_attr"]
    if any(getattr(module, str(leaf.target)).dtype not in LOOP_CONSTANT_DTYPES for leaf in read):
        return None
    constants = {name: value.detach().numpy() for name, value in {**held, **(tables or {})}.items()}
    call = FloatCall(operator(node), given, result, constants)
    return call if loop.refusal(call) is None and _body_of(loop, call) is not None else None


def data_movement_of(node: fx.Node) -> tuple[OpDef, Attrs] | None:
    """Return record and attributes of data movement of any data type, or None for any other operator."""
    record, result = record_of(node), tensor_type(node)
    if record is None or not record.moves_data or result is None or result.dtype not in MOVED_TYPES:
        return None
    values = operands(node)
    if None in values or any(known_type(value).dtype is not result.dtype for value in values if value is not None):
        return None
    call = call_of(node, record)
    call = replace(call, floating=(True,) * len(call.floating))
    return (record, record.bind(call)) if record.check(call) is None else None


def has_float_form(node: fx.Node, module: fx.GraphModule) -> bool:
    """Return whether a program computes an operator on float32 element by element, or moves float32 data for it."""
    kind = tensor_type(node)
    if kind is None or kind.dtype is not DType.F32:
        return False
    if data_movement_of(node) is not None:
        return True
    call, loop = float_call(node, module), loop_of(operator(node))
    body = None if call is None or loop is None else _body_of(loop, call)
    return body is not None and all(primitive(op).elementwise for op in body.ops)


def has_program_form(node: fx.Node, module: fx.GraphModule) -> bool:
    """Return whether a program computes an operator between floats, with sums over axes and in pools too."""
    return (
        data_movement_of(node) is not None or float_call(node, module) is not None or float_kernel_of(node) is not None
    )


def _body_of(loop: FloatLoop, call: FloatCall) -> Body | None:
    """Return the primitives of a call, or None if the sizes of its operands are not provably equal.

    torch.export may know that a size such as n // 2 + 1 is always 2, from conditions that dimensions do not express.
    """
    body = Body("result", call.tensors())
    try:
        loop.write_call(call, body, {**call.arguments, **{name: name for name in call.tensors()}})
    except ValueError:
        return None
    return body


def argument_type(value: Any) -> Any:
    """Return the type of a node, the dimension of a symbolic number, or the text of a torch dtype or layout."""
    if isinstance(value, fx.Node):
        return tensor_type(value) or resolve_dims(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format, torch.device)):
        return str(value)
    return resolve_dims(value)


def float_kernel_of(node: fx.Node) -> tuple[OpDef, Attrs] | None:
    """Return record and attributes of the kernel that computes an operator between floats, or None without a kernel."""
    record, kind = BY_TARGET.get(operator(node)), tensor_type(node)
    if record is None or record.in_float is None or kind is None or kind.dtype is not DType.F32:
        return None
    values = operands(node, record)
    if any(value is None or known_type(value).dtype is not DType.F32 or known_type(value).q for value in values):
        return None
    call = call_of(node, record)
    if record.check(call) is not None:
        return None
    name, attrs = record.in_float(record.bind(call))
    return BY_NAME[name], attrs
