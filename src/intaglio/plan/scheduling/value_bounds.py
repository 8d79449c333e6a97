"""Bounds of the quantized values of an operator, and whether saturation alone enforces them."""

from __future__ import annotations

from intaglio import numerics
from intaglio.ir import Graph, Op
from intaglio.ops import op_def


def result_bounds(op: Op, graph: Graph) -> tuple[int, int]:
    """Return the smallest and largest quantized value of an operator's result."""
    q = graph.types[op.output].qparams
    return op.attrs.get("low", q.qmin), op.attrs.get("high", q.qmax)


def saturates_to_bounds(op: Op, graph: Graph) -> bool:
    """Return whether saturation alone enforces the bounds of an operator's result.

    It does if the bounds are 0..255 or, for 16-bit results, if the lower bound is the zero point. The 8-bit zero points
    of the result and of a residual operand without remainders must be 0.
    """
    zeros, (low, high) = graph.types[op.output].qparams.zeros, result_bounds(op, graph)
    other = graph.types[op.inputs[1]].qparams.zeros if op_def(op).residual is not None and not op.inputs[4:] else (0,)
    plain = low == numerics.widen_to_16bit(1, 0).zero_point if len(op.outputs) > 1 else (low, high) == (0, 255)
    return plain and zeros == other == (0,)
