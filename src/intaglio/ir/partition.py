"""What lowering hands to code generation: partitions, placement, schedules, the finished program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from intaglio.ir.dims import Dim, Shape
from intaglio.ir.graph import Graph, Op
from intaglio.ir.types import DType


@dataclass(frozen=True)
class Partition:
    """An anchor and the tail that runs in its kernel: every int32 accumulator lives and dies in here.

    The tail of a product is what takes its accumulators, then perhaps a table of the levels, then perhaps an epilogue:
    a loop over single elements that alone reads them, some pixels at a time, just behind. With ``headed`` the first
    operator is a head: it makes what the anchor reads, some pixels at a time, just before.
    """

    name: str
    ops: tuple[Op, ...]
    headed: bool = False

    @property
    def head(self) -> Op | None:
        return self.ops[0] if self.headed else None

    @property
    def anchor(self) -> Op:
        return self.ops[self.headed]

    @property
    def tail(self) -> tuple[Op, ...]:
        return self.ops[self.headed + 1 :]

    @property
    def table(self) -> Op | None:
        return next((op for op in self.tail[1:] if op.kind == "table"), None)

    @property
    def epilogue(self) -> Op | None:
        return next((op for op in self.tail[1:] if op.kind == "loop"), None)

    @property
    def output(self) -> str:
        return self.ops[-1].output

    def reads(self) -> tuple[str, ...]:
        """Values from outside, constants among them, in order of first use."""
        made = {name for op in self.ops for name in op.outputs}
        return tuple(dict.fromkeys(name for op in self.ops for name in op.inputs if name not in made))


def lies(shape: Shape, rows: bool) -> tuple[Dim, Dim, Dim, Dim]:
    """Images, rows, columns and bytes (or elements) of a pixel, as a tensor lies in memory.

    With channels last: [n, c, w] is one row an image, [n, c, d, h, w] is d images each. Row-major, or of another rank:
    the last axis is the pixel, the axes before it columns, rows and images, as far as they go.
    """
    if not rows and len(shape) in (3, 4, 5):
        n, c, *image = shape
        return (n if len(image) < 3 else n * image[0]), (1 if len(image) < 2 else image[-2]), image[-1], c
    *outer, pixel = shape or (1,)
    sizes = [*outer[-3:], *[1] * (3 - len(outer))]
    for dim in outer[:-3]:
        sizes[0] = sizes[0] * dim
    return sizes[0], sizes[1], sizes[2], pixel


@dataclass(frozen=True)
class Buffer:
    """Memory of one internal tensor, channels last or, with ``rows`` and for other than three to five axes, row-major.

    ``halo``: rows and columns around each image, filled with the zero point. ``alias`` names the buffer whose bytes it
    shares (a reshape that moves nothing); with ``part`` it is some channels of it, from that one on (an operand of a
    concatenation, written where it belongs).
    """

    value: str
    shape: Shape
    dtype: DType
    halo: tuple[int, int] = (0, 0)
    alias: str | None = None
    rows: bool = False
    part: int | None = None

    @property
    def spatial(self) -> bool:
        return len(self.shape) in (3, 4, 5) and not self.rows

    def lies(self) -> tuple[Dim, Dim, Dim, Dim]:
        """Images, rows, columns, channels, without halo."""
        return lies(self.shape, self.rows)

    def pixels(self) -> Dim:
        """Pixels with their halo."""
        n, h, w, _ = self.lies()
        return n * ((h + 2 * self.halo[0]) * (w + 2 * self.halo[1]))

    def channels(self) -> Dim:
        """Of a pixel; a number wherever a kernel has constants for each."""
        return self.lies()[3]

    def size(self) -> Dim:
        """Bytes, without slack."""
        return self.pixels() * (self.lies()[3] * self.dtype.bytes)


@dataclass(frozen=True)
class View:
    """Elements that lie in the memory of another value: from element ``start`` of ``root`` on, ``strides`` elements
    apart along the logical axes; no strides where nothing reads them and no single ones would do."""

    root: str
    start: Dim
    strides: tuple[Dim, ...]


def is_flat(partition: Partition, graph: Graph, buffers: Mapping[str, Buffer]) -> bool:
    """Whether all output pixels of all images are one line: single taps, stride 1, no halo anywhere."""
    anchor, first = partition.anchor, partition.tail[0]
    if anchor.kind == "linear":
        return True
    if anchor.kind.startswith("conv_transpose"):
        return False
    images = [anchor.inputs[0], partition.output, *first.inputs[1:2] * (first.kind == "add")]
    found = [buffers[name] for name in images if name in buffers]
    plain = not any(any(buffers[buffer.alias or buffer.value].halo) for buffer in found)
    taps = graph.constants[anchor.inputs[1]].shape[2:]
    return plain and {*taps, *anchor.attrs["stride"]} == {1} and not any(anchor.attrs["padding"])


@dataclass(frozen=True)
class Step:
    """One entry of a program: a partition, or an island. Steps of one phase do not depend on each other."""

    partition: Partition
    phase: int
    segment: int


@dataclass(frozen=True)
class Placement:
    """Life of a buffer in phases, both ends included; ``order`` is the turn in which it gets its place."""

    value: str
    first: int
    last: int
    order: int


@dataclass(frozen=True)
class Plan:
    """Everything code generation needs besides the graph: steps in order, buffers, their lives.

    ``external`` values live in tensors of the caller (graph inputs and outputs, what islands read and write). ``rows``:
    values of three to five axes that lie row-major. ``views``: what moves give that nothing is copied for.
    """

    graph: Graph
    steps: tuple[Step, ...]
    buffers: Mapping[str, Buffer]
    placements: tuple[Placement, ...]
    external: tuple[str, ...]
    rows: frozenset[str] = frozenset()
    views: Mapping[str, View] = field(default_factory=dict)

    def segments(self) -> int:
        return self.steps[-1].segment + 1 if self.steps else 0


@dataclass(frozen=True)
class Schedule:
    """How a partition is computed; bits never depend on it.

    ``tile_rows`` output pixels by ``tile_columns`` blocks of 16 channels a microkernel. Threads share pixels; below
    ``split_channels_below`` output pixels they share panels of channels. ``chunk_bytes`` of input activations stay in
    cache while all panels pass over them.
    """

    tile_rows: int = 1
    tile_columns: int = 1
    split_channels_below: int = 0
    chunk_bytes: int = 0


@dataclass(frozen=True)
class External:
    """One entry of the table of caller's tensors: value, logical shape, element type, whether the program writes it,
    whether three to five axes lie row-major instead of channels last. ``dense``: it is read as it lies then, by other
    steps than those that take any strides."""

    value: str
    shape: Shape
    dtype: DType
    written: bool
    rows: bool = False
    dense: bool = False


@dataclass(frozen=True)
class IslandCall:
    """An island between two segments: which externals it reads and writes."""

    key: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    after_segment: int


@dataclass(frozen=True)
class Place:
    """Where the levels of a value lie in the arena: from the offset ``at`` in the program's table plus ``start`` bytes
    on, ``strides`` bytes apart along the logical axes. ``frame``: bytes of all of it where it has a halo, else 0."""

    at: int
    start: Dim
    shape: Shape
    strides: Shape
    frame: Dim = 0


@dataclass(frozen=True)
class HostCall:
    """A host operator between two segments: what it reads (places in the arena; ``None`` for a constant of the graph)
    and writes."""

    key: str
    op: Op
    inputs: tuple[Place | None, ...]
    output: Place
    after_segment: int


@dataclass(frozen=True)
class Work:
    """What a step has to do: multiply-accumulates, units that threads divide, about, bytes of activations read and
    written; the phase and the segment it runs in."""

    macs: Dim = 0
    units: Dim = 1
    bytes: Dim = 0
    phase: int = 0
    segment: int = 0


@dataclass(frozen=True)
class StepNote:
    """A step for readers and for the runtime: partition, kinds of its operators, types, its work; the key of an island;
    the module its anchor is in.

    ``kernel``: the largest microkernel of the step and ``tile`` its output pixels and channels, else the function that
    is the step.
    """

    name: str
    kinds: str
    types: str
    work: Work = Work()
    island: str = ""
    path: str = ""
    kernel: str = ""
    tile: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Program:
    """Generated C++ text, the constants it reads, and what the runtime must know to call it. Equal to itself only."""

    name: str
    source: str
    isa: str
    constants: np.ndarray
    symbols: tuple[str, ...]
    externals: tuple[External, ...]
    calls: tuple[IslandCall | HostCall, ...]
    segments: int
    buffers: int
    notes: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[StepNote, ...] = ()
