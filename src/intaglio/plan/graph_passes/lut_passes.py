"""Passes that replace loops between uint8 tensors by lookup tables, and exact functions by approximations."""

from __future__ import annotations

import numpy as np

from intaglio.fusion.integer_graph_view import IntegerGraphView
from intaglio.fusion.table import LOOP_TABLE, QUANTIZED_FUNCTION
from intaglio.ir import DType, Graph, Op, TensorType, fresh
from intaglio.ops.loop_ops.loop import loop_reference
from intaglio.ops.loop_ops.loop_space import body_of
from intaglio.ops.loop_ops.primitives import primitive


def replace_loops_by_luts(graph: Graph) -> tuple[Graph, int]:
    """Replace elementwise loops from one quantized tensor to another by 256-entry lookup tables.

    The pass runs after `merge_loops`. It leaves loops that also store floats or read other tensors.
    """
    types, tables, ops = dict(graph.types), dict[str, np.ndarray](), list[Op]()
    view, count = IntegerGraphView(graph), 0
    for op in graph.ops:
        found = next(LOOP_TABLE.find(op.outputs[0], view), None)
        if found is not None:
            source, lut = found["quantized"], fresh(types, f"{op.output}_levels")
            tables[lut], types[lut] = _table(op, source, graph), TensorType((256,), DType.U8)
            op = Op("table", (source, lut), op.outputs, {}, origin=op.origin)
            count += 1
        ops.append(op)
    return graph.replace(ops=tuple(ops), types=types, constants=graph.constants | tables), count


def _table(op: Op, source: str, graph: Graph) -> np.ndarray:
    """Run the loop's reference implementation for all 256 quantized values."""
    quantized = np.arange(256, dtype=np.uint8)
    given = [quantized if name == source else graph.constants[name].reshape(()) for name in op.inputs]
    types = [graph.types[name] for name in op.inputs]
    (found,) = loop_reference(op, given, types, graph.types[op.output])
    return found


def approximate_functions(graph: Graph) -> tuple[Graph, int]:
    """Replace functions in loops whose results are only quantized by their cheaper approximations, as in `activate`.

    The float32 result differs; the quantized value is the same except for near ties in rounding.
    """
    count = 0

    def near(op: Op) -> Op:
        nonlocal count
        if not op.is_loop:
            return op
        body = body_of(op)
        view, steps = IntegerGraphView(body), list[Op]()
        for step in body.ops:
            if any(QUANTIZED_FUNCTION.find(step.output, view)):
                step, count = Op(primitive(step).approximation, step.inputs, step.outputs, step.attrs), count + 1
            steps.append(step)
        inner = Graph(body.inputs, body.outputs, body.types, tuple(steps), body.constants)
        return Op(op.kind, op.inputs, op.outputs, op.attrs, inner, op.origin)

    ops = tuple(near(op) for op in graph.ops)
    return graph.replace(ops=ops), count
