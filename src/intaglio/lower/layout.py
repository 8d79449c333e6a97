"""Physical layout of every internal tensor: NHWC with a halo as wide as its widest zero-padding reader."""

from __future__ import annotations

from collections.abc import Mapping

from intaglio.ir import Buffer, DType, Graph, Op

IMAGE_READERS = ("conv2d",)
"""Operators that read zero-point padding around an image."""


def lay_out(graph: Graph) -> dict[str, Buffer]:
    """A buffer for every u8 value. A halo exists only where a convolution pads; reshapes that move no byte alias."""
    halos: dict[str, int] = {}
    for op in graph.ops:
        if op.kind in IMAGE_READERS:
            halos[op.inputs[0]] = max(halos.get(op.inputs[0], 0), *op.attrs["padding"])
    buffers: dict[str, Buffer] = {}
    for name in [*graph.inputs, *(output for op in graph.ops for output in op.outputs)]:
        kind = graph.types[name]
        if kind.dtype is DType.U8 and kind.q is not None:
            buffers[name] = Buffer(name, kind.shape, kind.dtype, halos.get(name, 0), kind.levels.zero)
    for op in graph.ops:
        if op.kind == "reshape" and moves_nothing(op, buffers):
            source, result = buffers[op.inputs[0]], buffers[op.output]
            root = source.alias or source.value
            buffers[op.output] = Buffer(result.value, result.shape, result.dtype, 0, result.zero_point, root)
    return buffers


def moves_nothing(op: Op, buffers: Mapping[str, Buffer]) -> bool:
    """Whether the bytes of a reshape's result lie as its input's: no halos, and images of one pixel."""
    ends = buffers[op.inputs[0]], buffers[op.output]
    if any(buffer.halo for buffer in ends):
        return False
    return all(not buffer.spatial or buffer.shape[2:] == (1, 1) for buffer in ends)
