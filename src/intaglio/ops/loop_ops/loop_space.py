"""Iteration space of a loop: rows along one axis, and the axes around them."""

from __future__ import annotations

from intaglio.ir import Graph, Op, Shape
from intaglio.ops.loop_ops.primitives import broadcast, primitive


def body_of(op: Op) -> Graph:
    """Return the body of an operator; raise `ValueError` if it has no body."""
    if op.body is None:
        raise ValueError(f"%{op.output}: the {op.kind} has no body")
    return op.body


def row_axis(body: Graph) -> int | None:
    """Return the axis of reductions, or the last axis for rows of a table; ``None`` for a purely elementwise loop."""
    axes = {op.attrs["axis"] for op in body.ops if primitive(op).reduces}
    axes |= {len(body.types[op.output].shape) - 1 for op in body.ops if primitive(op).gathers}
    if len(axes) > 1:
        raise ValueError(f"a loop can reduce along one axis, but its body reduces along axes {sorted(axes)}")
    return axes.pop() if axes else None


def space(body: Graph) -> Shape:
    """Return the shape of the iteration space, to which all values computed in the body broadcast."""
    outside = {name for op in body.ops if primitive(op).gathers for name in (op.inputs[0], *op.inputs[2:])}
    outside |= {name for op in body.ops if primitive(op).drops_axis for name in op.outputs}
    outside |= {name for op in body.ops if primitive(op).adds_axis for name in op.inputs}
    return broadcast(*[kind.shape for name, kind in body.types.items() if name not in outside])
