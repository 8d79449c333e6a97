"""Records of a plan: partitions, steps, views, buffer lifetimes, batch tiling, reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from intaglio.ir import Dim, Graph, Op, evaluate
from intaglio.kernels import Isa
from intaglio.kernels.instruction_set import LARGEST_SIZE
from intaglio.ops import op_def
from intaglio.plan.buffers import Buffer


@dataclass(frozen=True)
class Partition:
    """An anchor with the operators that are fused into its kernel. int32 accumulators never leave a partition.

    The tail of a product starts with the operator that reads its accumulators. A lookup table and an epilogue may
    follow: the epilogue is an elementwise loop that is the only reader of the result and runs on each tile as soon as
    it is computed.

    Attributes:
        name: Module path, or name of the result.
        ops: Operators in execution order.
        has_head: The first operator is a head, which computes the anchor's input tile by tile right before it is read.
        fusions: The fusions of `intaglio.fusion.table` that joined the operators.
    """

    name: str
    ops: tuple[Op, ...]
    has_head: bool = False
    fusions: tuple[str, ...] = ()

    @property
    def head(self) -> Op | None:
        """Return the head, or ``None``."""
        return self.ops[0] if self.has_head else None

    @property
    def anchor(self) -> Op:
        """Return the anchor, which determines the kernel."""
        return self.ops[self.has_head]

    @property
    def tail(self) -> tuple[Op, ...]:
        """Return the operators after the anchor."""
        return self.ops[self.has_head + 1 :]

    @property
    def lut(self) -> Op | None:
        """Return the lookup table of the tail, or ``None``."""
        return next((op for op in self.tail[1:] if not op.is_loop), None)

    @property
    def epilogue(self) -> Op | None:
        """Return the loop of the tail, or ``None``."""
        return next((op for op in self.tail[1:] if op.is_loop), None)

    @property
    def output(self) -> str:
        """Return the first result of the last operator."""
        return self.ops[-1].output

    def reads(self) -> tuple[str, ...]:
        """Return the values from outside, including constants, in order of first use."""
        made = {name for op in self.ops for name in op.outputs}
        return tuple(dict.fromkeys(name for op in self.ops for name in op.inputs if name not in made))


@dataclass(frozen=True)
class TensorView:
    """Strided view of the memory of another value.

    Element ``start`` of ``root`` is the first, and ``strides`` are in elements along the logical axes. ``strides`` is
    empty if the view is never read and needs several strides along one axis.
    """

    root: str
    start: Dim
    strides: tuple[Dim, ...]


def is_flat(partition: Partition, graph: Graph, buffers: Mapping[str, Buffer]) -> bool:
    """Return whether all output pixels of all images are contiguous: a linear layer, or a 1x1 convolution of stride 1.

    A convolution with padding, and a value with a halo, are not contiguous.
    """
    anchor, first = partition.anchor, partition.tail[0]
    if not op_def(anchor).convolves:
        return True
    if op_def(anchor).transposed:
        return False
    residual = op_def(first).residual
    images = [anchor.inputs[0], partition.output, *([] if residual is None else [first.inputs[residual]])]
    found = [buffers[name] for name in images if name in buffers]
    plain = not any(any(buffers[buffer.alias or buffer.value].halo) for buffer in found)
    taps = graph.types[anchor.inputs[1]].shape[2:]
    return plain and {*taps, *anchor.attrs["stride"]} == {1} and not any(anchor.attrs["padding"])


@dataclass(frozen=True)
class Step:
    """One entry of a program: a partition, or an island or host operator that the runtime calls.

    Steps of a barrier group are independent of each other; threads synchronize at the end of a group. A segment is a
    sequence of steps without a call of the runtime in between.
    """

    partition: Partition
    barrier_group: int = 0
    segment: int = 0

    @property
    def called(self) -> bool:
        """Return whether the runtime calls Python for the step: an island or a host operator."""
        return self.partition.anchor.is_called_back


@dataclass(frozen=True)
class BufferLifetime:
    """Barrier groups from the first that writes a buffer to the last that reads it, inclusive.

    Buffers are placed in the order of ``order``.
    """

    value: str
    first: int
    last: int
    order: int

    def overlaps(self, other: BufferLifetime) -> bool:
        """Return whether both buffers are alive in the same barrier group."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class BatchTiling:
    """Run the steps of the first ``groups`` barrier groups on ``images`` images per thread at a time.

    ``batch`` is the free dimension that counts images. Results do not depend on the tiling.
    """

    batch: str
    groups: int
    images: int


SMALL_WORK = 1 << 14
"""Bytes and multiply-accumulates up to which one thread computes a barrier group while the others wait. Sharing them
would save at most half of the time, 0.3 to 0.5 microseconds, which is about that of a barrier."""


@dataclass(frozen=True)
class SharedWork:
    """Work of a barrier group that threads can divide.

    Attributes:
        parts: bytes and multiply-accumulates of steps, after the number of units that threads can divide them into.
    """

    parts: tuple[tuple[Dim, Dim], ...]

    def total(self, symbols: Mapping[str, int]) -> int:
        """Return bytes and multiply-accumulates for these free sizes, without those of steps of a single unit."""
        return sum(evaluate(work, symbols) for units, work in self.parts if evaluate(units, symbols) > 1)


@dataclass(frozen=True)
class CacheSizes:
    """Sizes in bytes of one core's first- and second-level caches."""

    l1: int = 32 << 10
    l2: int = 1 << 20


@dataclass(frozen=True)
class Target:
    """The machine that a plan is scheduled for.

    Attributes:
        isa: Instruction set.
        max_tile_rows: Maximum number of tile rows for each number of 16-channel blocks.
        caches: Cache sizes.
        split_channels_below: Number of output pixels from which threads divide pixels, not channels, unless the
            weights are large (``LARGE_WEIGHTS`` of plan/scheduling/schedules.py).
        fast_tile_rows: Numbers of tile rows that take the least time for each row, where these are not the maximum.
    """

    isa: str
    max_tile_rows: Mapping[int, int]
    caches: CacheSizes
    split_channels_below: int = LARGEST_SIZE
    fast_tile_rows: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, isa: Isa, caches: CacheSizes) -> Target:
        """Return a machine with this instruction set and these caches."""
        return cls(isa.name, isa.max_tile_rows, caches, isa.split_channels_below, isa.fast_tile_rows)


class Choice(StrEnum):
    """Kinds of decisions that a plan gives reasons for."""

    LAYOUT = "layout"
    HALO = "halo"
    ALIAS = "alias"
    VIEW = "view"
    FUSION = "fusion"
    BARRIER = "barrier"
    MEMORY = "memory"
    SCHEDULE = "schedule"
    GUARD = "guard"
    KERNEL = "kernel"
    LOOP = "loop"
    BATCH_TILING = "batch tiling"


Reasons = Mapping[tuple[Choice, str], str]
"""Reason of each decision, by kind and by value or partition."""
