"""Side conditions of loop fusions: when two loops can be merged, and when a loop is a lookup table."""

from __future__ import annotations

from collections.abc import Mapping

from intaglio.fusion.integer_graph_view import IntegerGraphView
from intaglio.fusion.matcher import Match
from intaglio.ir import DType, Graph, Op, TensorType
from intaglio.ops import op_def
from intaglio.ops.loop_ops.loop_space import body_of, row_axis, space
from intaglio.ops.loop_ops.primitives import primitive


def dequantizes_uniformly(found: Match[str], view: IntegerGraphView) -> str | None:
    """Refuse a dequantize of values that are not u8 or have several scales."""
    return (
        None
        if has_uniform_parameters(view.op(found.anchor), view.graph.types)
        else "the quantization parameters are per channel"
    )


def computes_same_rows(found: Match[str], view: IntegerGraphView) -> str | None:
    """Refuse two loops with different rows, with a path through a third operator, or with values whose axes differ."""
    types = view.graph.types
    producer, reader = view.op(found.anchor), view.op(found.root)
    if not has_uniform_parameters(reader, types):
        return "the quantization parameters are per channel"
    reader = as_loop(reader, types)
    if not _same_rows(body_of(producer), body_of(reader)):
        return "the rows of the two loops have other shapes or axes"
    if not _element_by_element(producer, reader):
        return "the axes of a value differ inside and outside of a loop"
    return "a third operator depends on the first loop, and the second on it" if _third_between(found, view) else None


def maps_quantized_to_quantized(found: Match[str], view: IntegerGraphView) -> str | None:
    """Refuse a loop that is not an elementwise function from one quantized value to another."""
    op, source = view.op(found.root), found["quantized"]
    types, constants = view.graph.types, view.graph.constants
    if len(op.outputs) != 1 or types[op.output].dtype is not DType.U8:
        return "its results are not one quantized value"
    if not all(primitive(step).elementwise for step in body_of(op).ops):
        return "it does not compute element by element"
    numbers = {name for name in op.inputs if name in constants and constants[name].size == 1}
    if [name for name in op.inputs if name not in numbers] != [source] or source in constants:
        return "it reads more than one value"
    same = types[source].dtype is DType.U8 and types[source].shape == types[op.output].shape
    return None if same else "it does not read a quantized value of its own shape"


def result_is_only_quantized(found: Match[str], view: IntegerGraphView) -> str | None:
    """Refuse a function in a loop body if its float result is used except by a quantize."""
    readers = [primitive(op) for op in view.users(found.root)]
    if not readers or not all(reader.quantizes for reader in readers):
        return "its float result is read by another operator"
    return "its float result leaves the loop" if found.root in view.outputs else None


def has_uniform_parameters(op: Op, types: Mapping[str, TensorType]) -> bool:
    """Return whether an operator is a loop, or a quantize or dequantize of u8 values with one scale."""
    if op.is_loop:
        return True
    kind = types[op.output if op_def(op).quantizes else op.inputs[0]]
    return kind.dtype is DType.U8 and kind.q is not None and kind.q.axis is None


def as_loop(op: Op, types: Mapping[str, TensorType]) -> Op:
    """Return a quantize or dequantize as a loop with one operator; return a loop unchanged."""
    if op.is_loop:
        return op
    values = {name: types[name] for name in (*op.inputs, *op.outputs)}
    body = Graph(op.inputs, op.outputs, values, (Op(op.kind, op.inputs, op.outputs, op.attrs),))
    return Op("loop", op.inputs, op.outputs, {}, body, op.origin)


def _same_rows(first: Graph, second: Graph) -> bool:
    """Return whether both loops have the same shape and axis, or one computes one number per row of the other."""
    shapes, axes = (space(first), space(second)), (row_axis(first), row_axis(second))
    if shapes[0] == shapes[1]:
        return None in axes or axes[0] == axes[1]
    axis = axes[0] if axes[1] is None else axes[1] if axes[0] is None else None
    if axis is None or len(shapes[0]) != len(shapes[1]):
        return False
    short = shapes[1] if axes[1] is None else shapes[0]
    full = shapes[0] if axes[1] is None else shapes[1]
    return short == (*full[:axis], 1, *full[axis + 1 :])


def _element_by_element(first: Op, second: Op) -> bool:
    """Return whether the second loop reads the results of the first element by element, with the same axes."""
    one, two = body_of(first), body_of(second)
    shape, axis = space(one), row_axis(one)
    shared = set(first.outputs) & set(second.inputs)
    lost = {name for op in one.ops if primitive(op).drops_axis for name in op.outputs}
    lost |= {name for op in two.ops if primitive(op).adds_axis or primitive(op).gathers for name in op.inputs}
    shapes = [shape] if axis is None else [shape, (*shape[:axis], 1, *shape[axis + 1 :])]
    return not shared & lost and all(one.types[name].shape in shapes for name in shared)


def _third_between(found: Match[str], view: IntegerGraphView) -> bool:
    """Return whether a third operator depends on the producer and is read by the consumer."""
    producer, reader = view.op(found.anchor), view.op(found.root)
    reached = set(producer.outputs)
    for op in view.ops_between(found.anchor, found.root):
        if reached.intersection(op.inputs):
            reached.update(op.outputs)
    return any(name in reached and name not in producer.outputs for name in reader.inputs)
