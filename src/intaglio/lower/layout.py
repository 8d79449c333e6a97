"""Physical layout of every internal tensor.

Four axes lie NHWC, with a halo as wide as the widest zero-padding reader; what a linear layer reads or makes lies
row-major, and so does all that is connected to it by pointwise operators.
"""

from __future__ import annotations

from collections.abc import Mapping

from intaglio.ir import Buffer, DType, Graph, Op, TensorType, fresh
from intaglio.quant.sites import Sharing

IMAGE_READERS = ("conv2d",)
"""Operators that read zero-point padding around an image."""
IMAGES = ("conv2d", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "pad", "slice", "cat", "shuffle", "affine")
"""Operators that want images NHWC."""
POINTWISE = ("clamp", "table", "add", "mul", "requantize", "quantize", "dequantize")
"""Operators whose operands and result lie alike. A quantize reads any strides, so its float operand is free."""


def lay_out(graph: Graph) -> tuple[dict[str, Buffer], frozenset[str]]:
    """A buffer for every u8 value, and the values of four axes that are row-major. A halo exists only where a
    convolution pads; reshapes that move no byte alias."""
    halos: dict[str, int] = {}
    for op in graph.ops:
        if op.kind in IMAGE_READERS:
            halos[op.inputs[0]] = max(halos.get(op.inputs[0], 0), *op.attrs["padding"])
    rows = row_major(graph)
    buffers: dict[str, Buffer] = {}
    for name in [*graph.inputs, *(output for op in graph.ops for output in op.outputs)]:
        kind = graph.types[name]
        if kind.dtype is DType.U8 and kind.q is not None:
            buffers[name] = Buffer(name, kind.shape, kind.dtype, halos.get(name, 0), kind.q.zero, None, name in rows)
    for op in graph.ops:
        if op.kind == "reshape" and moves_nothing(op, buffers):
            source, result = buffers[op.inputs[0]], buffers[op.output]
            root = source.alias or source.value
            buffers[op.output] = Buffer(
                result.value, result.shape, result.dtype, 0, result.zero_point, root, result.rows
            )
    return buffers, rows


def moves_nothing(op: Op, buffers: Mapping[str, Buffer]) -> bool:
    """Whether the bytes of a reshape's result lie as its input's: no halos, and images of one pixel."""
    ends = buffers[op.inputs[0]], buffers[op.output]
    if any(buffer.halo for buffer in ends):
        return False
    return all(not buffer.spatial or buffer.shape[2:] == (1, 1) for buffer in ends)


def row_major(graph: Graph) -> frozenset[str]:
    """Values of four axes that lie row-major."""
    alike, _, linear = _components(graph)
    return frozenset(name for name, kind in graph.types.items() if _axes(kind) == 4 and alike.find(name) in linear)


def separate_layouts(graph: Graph) -> tuple[Graph, int]:
    """Where a linear layer of four axes and an image operator meet, a reshape that copies between their layouts."""
    alike, image, linear = _components(graph)
    both = image & linear
    users, types, renamed = graph.users(), dict(graph.types), dict[str, str]()
    chains = [_chain(op, users) for op in graph.ops if op.kind == "linear"]
    cut = {
        link.outputs: link
        for chain in chains
        if any(alike.find(name) in both for link in chain for name in (*link.inputs, *link.outputs))
        for link in chain
    }
    ops: list[Op] = []
    moved: dict[str, str] = {}

    def copy(name: str, stem: str, source: Op) -> str:
        result = fresh(types, stem)
        types[result] = types[name]
        attrs = {"shape": types[name].shape, "relayout": True}
        ops.append(Op("reshape", (name,), (result,), attrs, origin=source.origin))
        return result

    for op in graph.ops:
        inputs = tuple(renamed.get(name, name) for name in op.inputs)
        if op.outputs in cut:
            for name in inputs:
                if types[name].dtype is DType.U8 and _axes(types[name]) == 4 and name not in {*moved, *graph.constants}:
                    moved[name] = copy(name, f"{name}_rows", op)
            inputs = tuple(moved.get(name, name) for name in inputs)
        ops.append(Op(op.kind, inputs, op.outputs, op.attrs, op.body, op.origin))
        if op.outputs in cut and types[op.outputs[0]].dtype is DType.U8:
            renamed[op.output] = copy(op.output, f"{op.output}_image", op)
    outputs = tuple(renamed.get(name, name) for name in graph.outputs)
    return graph.replace(ops=tuple(ops), types=types, outputs=outputs), len(moved) + len(renamed)


def _components(graph: Graph) -> tuple[Sharing, set[str], set[str]]:
    """Values that must lie alike; the groups that image operators touch, and those that linear layers touch."""
    alike = Sharing()
    touched: dict[str, list[str]] = {"image": [], "linear": []}
    for op in graph.ops:
        read = [name for name in op.inputs if name not in graph.constants and _axes(graph.types[name]) == 4]
        made = [name for name in op.outputs if _axes(graph.types[name]) == 4]
        if op.kind in POINTWISE:
            ends = made if op.kind == "quantize" else [*read, *made]
            for name in ends[1:]:
                alike.join(name, ends[0])
        elif op.kind in IMAGES:
            touched["image"] += [*read, *made]
        elif op.kind == "linear":
            touched["linear"] += [*read, *made]
    return alike, {alike.find(n) for n in touched["image"]}, {alike.find(n) for n in touched["linear"]}


def _chain(op: Op, users: Mapping[str, tuple[Op, ...]]) -> list[Op]:
    """A linear layer and the operator that takes its accumulator."""
    return [op, *users[op.output]]


def _axes(kind: TensorType) -> int:
    return len(kind.shape)
