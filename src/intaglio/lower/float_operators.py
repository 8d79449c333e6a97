"""Lower float operators to loops, data movement and direct operators of the integer graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from intaglio.fxgraph.float_forms import float_call, loop_of
from intaglio.fxgraph.node_info import info, known_type, origin, tensor_type
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
from intaglio.ir import Attrs, Constants, DType, Graph, Op, Origin, TensorType
from intaglio.ir.verify import TypeRule
from intaglio.lower.graph_builder import GraphBuilder
from intaglio.ops import BY_TARGET, Call, OpDef
from intaglio.ops.direct.direct_operands import ELEMENTS
from intaglio.ops.loop_ops.loop_builder import Body, FloatCall
from intaglio.ops.loop_ops.primitives import primitive
from intaglio.quant.annotate.embedding_tables import table_operands

U8_S8 = (torch.uint8, torch.int8)


def loop_call(node: fx.Node, module: fx.GraphModule) -> FloatCall | None:
    """Return the call of an operator of a reference that the program computes in float, or None otherwise."""
    if loop_of(operator(node)) is None:
        return None
    tables = {
        name: getattr(module, str(table[0].target))
        for name, value in arguments(node).items()
        if (table := table_operands(value)) is not None
    }
    return None if _is_rounded_by_torch(node, bool(tables)) else float_call(node, module, tables)


def _is_rounded_by_torch(node: fx.Node, reads_table: bool) -> bool:
    """Return whether a result is rounded to a data type without kernels, next to which sums have PyTorch's order."""
    if reads_table:  # no sum, and PyTorch cannot read the quantized table of the program
        return False
    return any(operator(u).split(".")[1:2] == ["quantize_per_tensor"] and u.args[-1] not in U8_S8 for u in node.users)


def build_float_loops(
    node: fx.Node, call: FloatCall, names: Mapping[fx.Node, str], types: Mapping[str, TensorType], result: str
) -> tuple[list[Op], dict[str, np.ndarray]]:
    """Return a float operator as a loop, or as one loop for each axis that it reduces.

    Args:
        node: The operator.
        call: Its call, from `loop_call`.
        names: Names of the values of its operands.
        types: Types of these values.
        result: Name of the result.

    Returns:
        The loop operators, and the arrays of constants that they add to the graph.
    """
    body = Body(result, types)
    given = arguments(node)
    values = {name: _value(value, names) for name, value in given.items()}
    for table in filter(None, map(table_operands, given.values())):
        values |= {name: names[part] for name, part in zip(("scales", "zero_points"), table[1:], strict=True)}
    loop = loop_of(call.target)
    if loop is None:
        raise ValueError(f"there is no generated loop for {call.target}")
    found = loop.write_call(call, body, values)
    ops = tuple(Op(op.kind, op.inputs, (result,) if op.output == found else op.outputs, op.attrs) for op in body.ops)
    return [_loop(part, body, origin(node)) for part in _parts_by_axis(ops)], body.arrays


def _parts_by_axis(ops: Sequence[Op]) -> list[list[Op]]:
    """Split a chain of primitives into parts that reduce along one axis each."""
    parts: list[list[Op]] = [[]]
    axis = None
    for op in ops:
        if primitive(op).reduces:
            if axis not in (None, op.attrs["axis"]):
                parts.append([])
            axis = op.attrs["axis"]
        parts[-1].append(op)
    return parts


def _loop(ops: Sequence[Op], body: Body, where: Origin) -> Op:
    """Return the loop that runs primitives of a body; its result is that of the last one."""
    result = ops[-1].output
    constants = {name: value for name, value in body.constants.items() if any(name in op.inputs for op in ops)}
    made = dict.fromkeys([result, *constants, *(op.output for op in ops)])  # types are saved in this order
    inputs = tuple(dict.fromkeys(name for op in ops for name in op.inputs if name not in made))
    inner = Graph(
        inputs, (result,), {name: body.types[name] for name in (*inputs, *made)}, tuple(ops), Constants(constants)
    )
    return Op("loop", inputs, (result,), {}, inner, where)


def _value(value: Any, names: Mapping[fx.Node, str]) -> Any:
    if isinstance(value, fx.Node) and value in names:
        return names[value]
    return resolve_dims(value)


def lower_float_loop(builder: GraphBuilder, node: fx.Node, call: FloatCall) -> None:
    """Add the loops of a float operator. `merge_loops` fuses it with neighboring loops later."""
    names: dict[fx.Node, str] = {}
    for leaf in dict.fromkeys(tensor_nodes((node.args, node.kwargs))):
        if info(leaf).dim is not None:
            continue  # a size, which the loop takes from its operands
        names[leaf] = builder.add_parameter(leaf) if leaf.op == "get_attr" else builder.float_value(leaf)
        names |= {part: builder.add_parameter(part) for part in table_operands(leaf) or ()}
    result = builder.add_value(node.name, known_type(node), node)
    ops, arrays = build_float_loops(node, call, names, builder.types, result)
    for op in ops:
        assert op.body is not None  # loops always have a body
        builder.types |= {name: op.body.types[name] for name in (*op.inputs, op.output) if name not in builder.types}
    builder.constants |= arrays
    builder.ops += ops


def lower_kernel(builder: GraphBuilder, node: fx.Node, record: OpDef, attrs: Attrs) -> None:
    """Add a kernel of floats, or data movement of floats, integers, booleans or the quantized values of a buffer."""
    is_quantized = known_type(node).q is not None
    names = [
        builder.add_parameter(value)
        if is_constant(value)
        else builder.quantized_value(value)
        if is_quantized
        else builder.float_value(value)
        for value in operands(node, record_of(node) or BY_TARGET[operator(node)])
        if value is not None
    ]
    builder.values[node] = builder.add_op(record.name, names, node.name, known_type(node), origin(node), **attrs)


# ---- operators whose kernels take tensors as the model has them ---------------------------------------------------


OTHER_NAMES = {"indices": "index", "src": "source"}
"""Names of operands in index_select and index_add, by those of index and scatter."""


@dataclass(frozen=True)
class DirectCall:
    """A call of a direct operator: record, attributes and operands."""

    record: OpDef
    attrs: Attrs
    operands: tuple[fx.Node, ...]


def direct_call(node: fx.Node) -> DirectCall | None:
    """Return record, attributes and operands of a direct operator, or ``None`` for any other node."""
    record, kind = BY_TARGET.get(operator(node)), tensor_type(node)
    if record is None or not record.direct or kind is None:
        return None
    given = arguments(node)
    first, *others = (given.get(name, given.get(OTHER_NAMES.get(name, ""))) for name in record.operands)
    named = {name: value for name, value in given.items() if name not in record.operands}
    values, axes = [first], []
    for other in others:
        for axis, value in enumerate(other if isinstance(other, Sequence) else (other,)):
            if value is not None:
                values.append(value)
                axes.append(axis)
    if isinstance(given.get("dim"), int):
        axes = [given["dim"] % max(len(known_type(first).shape), 1)]
    if named.get("dtype") is not None or not all(isinstance(v, fx.Node) and tensor_type(v) for v in values):
        return None
    call = replace(_call(node, record, values), arguments={**named, "axes": axes})
    if _refused(call, record, values, kind.dtype):
        return None
    return DirectCall(record, record.bind(call), tuple(values))


def _call(node: fx.Node, record: OpDef, values: Sequence[fx.Node]) -> Call:
    return replace(
        call_of(node, replace(record, operands=())), shapes=tuple(known_type(value).shape for value in values)
    )


def _refused(call: Call, record: OpDef, values: Sequence[fx.Node], result: DType) -> bool:
    """Return whether the kernel cannot run a call: for its element types, or as its record says."""
    kinds = [known_type(value) for value in values]
    if any(kind.dtype not in ELEMENTS or kind.q is not None for kind in kinds) or result not in ELEMENTS:
        return True
    if any(kind.dtype not in (DType.I64, result) for kind in kinds[1:]):
        return True
    rule = record.types
    if isinstance(rule, TypeRule) and (kinds[0].dtype not in rule.operands[0] or result not in rule.results):
        return True
    return record.check(call) is not None


def lower_direct(builder: GraphBuilder, node: fx.Node, call: DirectCall) -> None:
    """Add a direct operator."""
    names = [
        builder.add_parameter(value) if is_constant(value) else builder.float_value(value) for value in call.operands
    ]
    name, kind = call.record.name, known_type(node)
    builder.values[node] = builder.add_op(name, names, node.name, kind, origin(node), **call.attrs)
