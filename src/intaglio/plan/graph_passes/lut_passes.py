"""Loops between levels: a table knows what 256 levels become, and a function that becomes levels need be no nearer."""

from __future__ import annotations

import numpy as np

from intaglio.fusion.integer_graph_view import IntegerGraphView
from intaglio.fusion.table import LOOP_TABLE, QUANTIZED_FUNCTION
from intaglio.ir import DType, Graph, Op, TensorType, fresh
from intaglio.ops.loop_ops.loop import loop_meaning
from intaglio.ops.loop_ops.loop_space import body_of
from intaglio.ops.loop_ops.primitives import primitive


def loops_as_tables(graph: Graph) -> tuple[Graph, int]:
    """Loops from levels to levels, each of one level and of nothing else, become tables of what they give.

    Behind `merge_loops`, where loops are as long as they get: a loop that stores floats as well, or reads anything else
    that has elements, stays.
    """
    types, constants, ops = dict(graph.types), dict(graph.constants), list[Op]()
    view, count = IntegerGraphView(graph), 0
    for op in graph.ops:
        found = next(LOOP_TABLE.find(op.outputs[0], view), None)
        if found is not None:
            source, levels = found["levels"], fresh(types, f"{op.output}_levels")
            constants[levels], types[levels] = _table(op, source, graph), TensorType((256,), DType.U8)
            op = Op("table", (source, levels), op.outputs, {}, origin=op.origin)
            count += 1
        ops.append(op)
    return graph.replace(ops=tuple(ops), types=types, constants=constants), count


def _table(op: Op, source: str, graph: Graph) -> np.ndarray:
    """What the loop's own meaning gives for every level."""
    levels = np.arange(256, dtype=np.uint8)
    given = [levels if name == source else graph.constants[name].reshape(()) for name in op.inputs]
    types = [graph.types[name] for name in op.inputs]
    (found,) = loop_meaning(op, given, types, graph.types[op.output])
    return found


def near_functions(graph: Graph) -> tuple[Graph, int]:
    """Functions that only levels are made of take the spelling of `activate`: another float32, the same level but for
    ties that rounding decides."""
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
