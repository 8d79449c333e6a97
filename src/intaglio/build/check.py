"""What kernels rely on and a graph read from a file could break."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from intaglio.ir import Graph, Op
from intaglio.ops import OPS
from intaglio.ops.pool import counts

AT_LEAST_ONE = ("stride", "kernel", "dilation", "groups", "step")
WINDOWS = ("conv2d", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "pad", "slice")
"""Kinds whose attributes are sizes and places, none of them negative."""


def check_graph(graph: Graph) -> None:
    """ValueError for an operator whose result does not have the shape its record gives, whose window is none, or whose
    table is too short."""
    for op in graph.ops:
        if op.kind == "island":
            continue
        if op.kind not in OPS:
            raise ValueError(f"there is no operator {op.kind}")
        if op.kind in WINDOWS:
            _check_window(op)
        shapes = [graph.types[name].shape for name in op.inputs]
        shape = tuple(OPS[op.kind].infer(op.attrs, shapes))
        if shape != graph.types[op.output].shape:
            raise ValueError(f"%{op.output} is {graph.types[op.output]}; {op.kind} gives {shape}")
        if op.kind == "table" and shapes[1] != (256,):
            raise ValueError(f"%{op.inputs[1]} is {graph.types[op.inputs[1]]}; a table has 256 entries")
        if op.kind in ("avg_pool2d", "adaptive_avg_pool2d") and shapes[1] != (
            len(counts(op.kind, op.attrs, shapes[0])),
        ):
            raise ValueError(f"%{op.inputs[1]} is {graph.types[op.inputs[1]]}; {op.kind} reads others")


def _check_window(op: Op) -> None:
    for key, value in op.attrs.items():
        least = 1 if key in AT_LEAST_ONE else 0
        if any(number < least for number in _integers(value)):
            raise ValueError(f"{op.kind} with {key} {value}")


def _integers(value: Any) -> Iterable[int]:
    if isinstance(value, tuple):
        return [number for item in value for number in _integers(item)]
    return [value] if isinstance(value, int) else []
