"""Loops between levels: a table knows what 256 levels become, and a function that becomes levels need be no nearer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from intaglio.ir import DType, Graph, Op, TensorType, fresh
from intaglio.ops.loop_ops.loop import loop_meaning
from intaglio.ops.loop_ops.loop_space import body_of
from intaglio.ops.loop_ops.primitives import Primitive, primitive


def loops_as_tables(graph: Graph) -> tuple[Graph, int]:
    """Loops from levels to levels, each of one level and of nothing else, become tables of what they give.

    Behind `merge_loops`, where loops are as long as they get: a loop that stores floats as well, or reads anything else
    that has elements, stays.
    """
    types, constants, ops = dict(graph.types), dict(graph.constants), list[Op]()
    count = 0
    for op in graph.ops:
        source = _only_levels(op, graph)
        if source is not None:
            levels = fresh(types, f"{op.output}_levels")
            constants[levels], types[levels] = _table(op, source, graph), TensorType((256,), DType.U8)
            op = Op("table", (source, levels), op.outputs, {}, origin=op.origin)
            count += 1
        ops.append(op)
    return graph.replace(ops=tuple(ops), types=types, constants=constants), count


def _only_levels(op: Op, graph: Graph) -> str | None:
    """The levels that all of a loop's only result, levels too, are made of element by element."""
    if not op.is_loop or len(op.outputs) != 1 or graph.types[op.output].dtype is not DType.U8:
        return None
    body, read = body_of(op), [name for name in op.inputs if not _is_number(name, graph)]
    if not all(primitive(step).elementwise for step in body.ops) or len(read) != 1:
        return None
    kind = graph.types[read[0]]
    same = kind.dtype is DType.U8 and kind.shape == graph.types[op.output].shape
    return read[0] if same and read[0] not in graph.constants else None


def _is_number(name: str, graph: Graph) -> bool:
    return name in graph.constants and graph.constants[name].size == 1


def _table(op: Op, source: str, graph: Graph) -> np.ndarray:
    """What the loop's own meaning gives for every level."""
    levels = np.arange(256, dtype=np.uint8)
    given = [levels if name == source else graph.constants[name].reshape(()) for name in op.inputs]
    types = [graph.types[name] for name in op.inputs]
    (found,) = loop_meaning(op, given, types, graph.types[op.output])
    return found


def _are_quantizes(readers: Sequence[Primitive]) -> bool:
    return bool(readers) and all(reader.quantizes for reader in readers)


def near_functions(graph: Graph) -> tuple[Graph, int]:
    """Functions that only levels are made of take the spelling of `activate`: another float32, the same level but for
    ties that rounding decides."""
    count = 0

    def near(op: Op) -> Op:
        nonlocal count
        if not op.is_loop:
            return op
        body, steps = body_of(op), list[Op]()
        for step in body.ops:
            readers = [primitive(other) for other in body.ops if step.output in other.inputs]
            approximation = primitive(step).approximation
            if approximation and _are_quantizes(readers) and step.output not in body.outputs:
                step, count = Op(approximation, step.inputs, step.outputs, step.attrs), count + 1
            steps.append(step)
        inner = Graph(body.inputs, body.outputs, body.types, tuple(steps), body.constants)
        return Op(op.kind, op.inputs, op.outputs, op.attrs, inner, op.origin)

    ops = tuple(near(op) for op in graph.ops)
    return graph.replace(ops=ops), count
