"""Passes over the integer graph. Each keeps every bit of the result."""

from __future__ import annotations

from intaglio.ir import Graph, Op
from intaglio.lower.layout import separate_layouts


def drop_identity(graph: Graph) -> tuple[Graph, int]:
    """Reshapes, pads and clamps that change nothing -> their input."""
    same: dict[str, str] = {}
    ops: list[Op] = []
    for op in graph.ops:
        inputs = tuple(same.get(name, name) for name in op.inputs)
        if _changes_nothing(op, graph):
            same[op.output] = inputs[0]
        else:
            ops.append(Op(op.kind, inputs, op.outputs, op.attrs, op.body, op.origin))
    outputs = tuple(same.get(name, name) for name in graph.outputs)
    return graph.replace(ops=tuple(ops), outputs=outputs), len(same)


def _changes_nothing(op: Op, graph: Graph) -> bool:
    if op.kind == "clamp":
        q = graph.types[op.output].q
        return op.attrs["low"] <= q.qmin and op.attrs["high"] >= q.qmax
    if op.attrs.get("relayout"):
        return False
    return op.kind in ("reshape", "pad", "slice") and graph.types[op.output] == graph.types[op.inputs[0]]


LOWER_PASSES = (drop_identity, separate_layouts)
