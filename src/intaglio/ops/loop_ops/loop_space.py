"""The iteration space of a loop: rows along one axis, and all else around them."""

from __future__ import annotations

from intaglio.ir import Graph, Op, Shape
from intaglio.ops.loop_ops.primitives import broadcast, primitive


def body_of(op: Op) -> Graph:
    """The body of an operator that must have one."""
    if op.body is None:
        raise ValueError(f"%{op.output}: a {op.kind} without a body")
    return op.body


def row_axis(body: Graph) -> int | None:
    """The axis that reductions go along; rows of a table lie along the last one. ``None``: of single elements."""
    axes = {op.attrs["axis"] for op in body.ops if primitive(op).reduces}
    axes |= {len(body.types[op.output].shape) - 1 for op in body.ops if primitive(op).gathers}
    if len(axes) > 1:
        raise ValueError(f"reductions along axes {sorted(axes)}; a loop has one")
    return axes.pop() if axes else None


def space(body: Graph) -> Shape:
    """The shape that all that is computed inside broadcasts to: its rows and their elements."""
    outside = {name for op in body.ops if primitive(op).gathers for name in (op.inputs[0], *op.inputs[2:])}
    outside |= {name for op in body.ops if primitive(op).drops_axis for name in op.outputs}
    outside |= {name for op in body.ops if primitive(op).adds_axis for name in op.inputs}
    return broadcast(*[kind.shape for name, kind in body.types.items() if name not in outside])
