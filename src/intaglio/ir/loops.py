"""The shape of a loop: rows along one axis, and all else around them."""

from __future__ import annotations

from intaglio.ir.dims import Shape
from intaglio.ir.graph import Graph, Op

REDUCTIONS = ("sum", "mean", "max", "min")
"""Operators of a body that take all elements of a row, along attribute ``axis``, whose size becomes 1."""
GATHERS = ("gather", "gather_levels")
"""Operators of a body that read rows of a table, their first operand, by ids, their second; what follows are parameters
of the rows."""
VIEWS = ("squeeze", "unsqueeze")
"""Operators of a body that compute nothing: an end of it has an axis more, or less, than what is inside."""


def body_of(op: Op) -> Graph:
    """The body of an operator that must have one."""
    if op.body is None:
        raise ValueError(f"%{op.output}: a {op.kind} without a body")
    return op.body


def broadcast(*shapes: Shape) -> Shape:
    """The shape of what these make together. ValueError for shapes that do not go together."""
    found = []
    for axis in range(-max(map(len, shapes), default=0), 0):
        sizes = {shape[axis] for shape in shapes if len(shape) >= -axis} - {1}
        if len(sizes) > 1:
            raise ValueError(f"sizes {', '.join(map(str, sizes))} along one axis")
        found.append(sizes.pop() if sizes else 1)
    return tuple(found)


def row_axis(body: Graph) -> int | None:
    """The axis that reductions go along; rows of a table lie along the last one. ``None``: of single elements."""
    axes = {op.attrs["axis"] for op in body.ops if op.kind in REDUCTIONS}
    axes |= {len(body.types[op.output].shape) - 1 for op in body.ops if op.kind in GATHERS}
    if len(axes) > 1:
        raise ValueError(f"reductions along axes {sorted(axes)}; a loop has one")
    return axes.pop() if axes else None


def space(body: Graph) -> Shape:
    """The shape that all that is computed inside broadcasts to: its rows and their elements."""
    outside = {name for op in body.ops if op.kind in GATHERS for name in (op.inputs[0], *op.inputs[2:])}
    outside |= {name for op in body.ops if op.kind == "squeeze" for name in op.outputs}
    outside |= {name for op in body.ops if op.kind == "unsqueeze" for name in op.inputs}
    return broadcast(*[kind.shape for name, kind in body.types.items() if name not in outside])
