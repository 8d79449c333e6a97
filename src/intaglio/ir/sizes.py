"""What a program needs of the free sizes of a call, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from intaglio.ir.dims import Dim, numel
from intaglio.ir.graph import Graph, Op

MOST_PIXELS = (2**31 - 1) // 255
"""Levels that an int32 sum holds."""


@dataclass(frozen=True)
class Need:
    """An expression that must not be negative, of which operator, and what it means."""

    value: Dim
    where: str
    operator: str
    problem: str


def needs(graph: Graph) -> tuple[Need, ...]:
    """Of free sizes: none negative, bounds of slices inside their axes, padding by reflection narrower than what it
    reflects, and no empty result of a window. Where a number decides nothing is left to check."""
    found: dict[Dim, Need] = {}
    for op in graph.ops:
        where = op.origin.path or op.outputs[0]
        for value, problem in (*_sizes(op, graph), *_bounds(op, graph)):
            if not isinstance(value, int):
                found.setdefault(value, Need(value, where, op.origin.operator or op.kind, problem))
    return tuple(found.values())


def _sizes(op: Op, graph: Graph) -> Iterable[tuple[Dim, str]]:
    """No axis is negative; what a window makes has a pixel."""
    least = int("conv" in op.kind or "pool" in op.kind or op.kind.startswith("upsample"))
    for shape in (graph.types[name].shape for name in op.outputs):
        for axis, size in enumerate(shape):
            smallest = least if axis > 1 else 0
            text = ", ".join(map(str, shape))
            yield size - smallest, f"its result [{text}] would have fewer than {smallest} along axis {axis}"
    if op.kind.startswith(("upsample", "adaptive")):
        pixels = graph.types[op.inputs[0]].shape[2:]
        for size in pixels:
            yield size - 1, "it has no pixel to read"
        yield numel(pixels) * -1 + MOST_PIXELS, f"{numel(pixels)} pixels; sums of more than {MOST_PIXELS} leave int32"


def _bounds(op: Op, graph: Graph) -> Iterable[tuple[Dim, str]]:
    if op.kind == "slice":
        size = graph.types[op.inputs[0]].shape[op.attrs["axis"]]
        yield op.attrs["start"], f"a slice would begin at {op.attrs['start']}"
        yield size - op.attrs["stop"], f"a slice up to {op.attrs['stop']} of an axis of {size}"
    if op.kind == "pad" and op.attrs.get("mode") in ("reflect", "circular"):
        widths = zip(graph.types[op.inputs[0]].shape, op.attrs["before"], op.attrs["after"], strict=True)
        for size, before, after in widths:
            widest = max(before, after)
            if widest:
                own = int(op.attrs["mode"] == "reflect")
                yield size - widest - own, f"{op.attrs['mode']} padding by {widest} of an axis of {size}"
