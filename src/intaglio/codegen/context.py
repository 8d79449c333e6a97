"""What every emitter of a step needs: images, constants, kernels that must be in the text."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from intaglio.codegen.tile import Isa, TileSpec
from intaglio.codegen.writer import Code
from intaglio.ir import Dim, Graph, Op, Partition, Plan, Schedule, Shape, c_expression

ALIGNMENT = 64


class Blob:
    """Constants of a program in one aligned array; equal bytes are stored once."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._known: dict[bytes, int] = {}
        self._size = 0

    def add(self, array: np.ndarray) -> int:
        """Offset of these bytes."""
        data = np.ascontiguousarray(array).tobytes()
        if data not in self._known:
            self._known[data] = self._size
            padded = data + bytes(-len(data) % ALIGNMENT)
            self._parts.append(padded)
            self._size += len(padded)
        return self._known[data]

    def array(self) -> np.ndarray:
        return np.frombuffer(b"".join(self._parts), np.uint8)


class Context:
    """One program being printed."""

    def __init__(self, plan: Plan, isa: Isa, schedules: dict[str, Schedule]) -> None:
        self.plan, self.isa, self.schedules = plan, isa, schedules
        self.blob = Blob()
        self.tiles: dict[str, TileSpec] = {}
        self.index = {placement.value: placement.order for placement in plan.placements}
        self.symbols = plan.graph.symbols()

    @property
    def graph(self) -> Graph:
        return self.plan.graph

    def constant(self, array: np.ndarray, kind: str) -> str:
        """Pointer to a constant: ``(const float*)(r->constants + 128)``."""
        return f"(const {kind}*)(r->constants + {self.blob.add(array)})"

    def dim(self, dim: Dim) -> str:
        return c_expression(dim)

    def image(self, value: str) -> str:
        """C expression that makes the `Image` of a buffer, or of a dense float tensor of the caller."""
        buffer = self.plan.buffers.get(value)
        if buffer is None:
            kind = self.graph.types[value]
            n, h, w, c = nhwc(kind.shape, value in self.plan.rows)
            sizes = f"{self.dim(n)}, {self.dim(h)}, {self.dim(w)}, {c} * {kind.dtype.bytes}"
            return f"image({self.external(value)}, {sizes}, 0)"
        sizes = ", ".join(map(self.dim, nhwc(buffer.shape, buffer.rows)))
        start = f"r->arena + r->offsets[{self.index[buffer.alias or value]}]"
        return f"image({start}, {sizes}, {buffer.halo})"

    def external(self, value: str) -> str:
        return f"r->external[{self.plan.external.index(value)}]"

    def strides(self, value: str) -> str:
        return f"r->strides + {4 * self.plan.external.index(value)}"

    def halo(self, value: str) -> int:
        return self.plan.buffers[value].halo if value in self.plan.buffers else 0

    def limits(self, op: Op) -> str:
        """``struct Limits`` of the levels an operator gives."""
        q = self.graph.types[op.output].levels
        low, high = op.attrs.get("low", q.qmin), op.attrs.get("high", q.qmax)
        other = self.graph.types[op.inputs[1]].levels.zero if op.kind in ("add", "mul") else 0
        return self.constant(limits(q.zero, low, high, other), "struct Limits")

    def use(self, specs: Iterable[TileSpec]) -> None:
        """Microkernels this program calls."""
        self.tiles.update({spec.name: spec for spec in specs})

    def dims_used(self, text: str) -> list[str]:
        """Declarations of the free dimensions that a body mentions."""
        words = set(re.findall(r"\b[a-z]\w*\b", text))
        return [f"const int64_t {name} = r->dims[{i}];" for i, name in enumerate(self.symbols) if name in words]


def nhwc(shape: Shape, row_major: bool = False) -> tuple[Dim, Dim, Dim, Dim]:
    """Images, rows, columns, channels as they lie; ``row_major``: four axes in their own order.

    A tensor of another rank is rows of one pixel.
    """
    if len(shape) == 4 and row_major:
        return shape[0], shape[1], shape[2], shape[3]
    if len(shape) == 4:
        n, c, h, w = shape
        return n, h, w, c
    rows: Dim = 1
    for dim in shape[:-1]:
        rows = rows * dim
    return rows, 1, 1, shape[-1] if shape else 1


def limits(zero_point: int, low: int, high: int, other_zero_point: int) -> np.ndarray:
    """Bytes of ``struct Limits`` (native/program.h)."""
    parts = (
        np.full(32, zero_point, np.int16),
        np.full(64, low, np.uint8),
        np.full(64, high, np.uint8),
        np.array([zero_point, low, high, other_zero_point], np.int32),
        np.array([-(2.0**30), 2.0**30], np.float32),
        np.zeros(10, np.int32),
    )
    return np.frombuffer(b"".join(part.tobytes() for part in parts), np.uint8)


def describe(partition: Partition, graph: Graph) -> str:
    """``u8[n, 64, 56, 56] -> u8[n, 64, 56, 56]`` of a partition's activations."""
    read = [graph.types[name] for name in partition.reads() if name not in graph.constants]
    kinds = " , ".join(f"{kind.dtype}[{', '.join(map(str, kind.shape))}]" for kind in read)
    result = graph.types[partition.output]
    return f"{kinds} -> {result.dtype}[{', '.join(map(str, result.shape))}]"


def finish(code: Code, context: Context, value: str, limits: str) -> None:
    """The halo of a result, written anew on every run."""
    if context.halo(value):
        code(f"const struct Image frame = {context.image(value)};")
        code(f"fill_halo(&frame, (uint8_t)({limits})->zero_point, thread, threads);")
