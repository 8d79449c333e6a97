"""The records a plan is made of: partitions, steps, views, lifetimes of buffers, batch tiling, reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from intaglio.ir import Dim, Graph, Op
from intaglio.ops import op_def
from intaglio.plan.buffers import Buffer


@dataclass(frozen=True)
class Partition:
    """An anchor and the tail that runs in its kernel: every int32 accumulator lives and dies in here.

    The tail of a product is what takes its accumulators, then perhaps a table of the levels, then perhaps an epilogue:
    a loop over single elements that alone reads them, some pixels at a time, just behind. With ``headed`` the first
    operator is a head: it makes what the anchor reads, some pixels at a time, just before. ``fusions``: the rows of
    `intaglio.fusion.table` that joined the operators.
    """

    name: str
    ops: tuple[Op, ...]
    headed: bool = False
    fusions: tuple[str, ...] = ()

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
        return next((op for op in self.tail[1:] if not op.is_loop), None)

    @property
    def epilogue(self) -> Op | None:
        return next((op for op in self.tail[1:] if op.is_loop), None)

    @property
    def output(self) -> str:
        return self.ops[-1].output

    def reads(self) -> tuple[str, ...]:
        """Values from outside, constants among them, in order of first use."""
        made = {name for op in self.ops for name in op.outputs}
        return tuple(dict.fromkeys(name for op in self.ops for name in op.inputs if name not in made))


@dataclass(frozen=True)
class TensorView:
    """Elements that lie in the memory of another value: from element ``start`` of ``root`` on, ``strides`` elements
    apart along the logical axes; no strides where nothing reads them and no single ones would do."""

    root: str
    start: Dim
    strides: tuple[Dim, ...]


def is_flat(partition: Partition, graph: Graph, buffers: Mapping[str, Buffer]) -> bool:
    """Whether all output pixels of all images are one line: single taps, stride 1, no halo anywhere."""
    anchor, first = partition.anchor, partition.tail[0]
    if not op_def(anchor).convolves:
        return True
    if op_def(anchor).transposed:
        return False
    residual = op_def(first).residual
    images = [anchor.inputs[0], partition.output, *([] if residual is None else [first.inputs[residual]])]
    found = [buffers[name] for name in images if name in buffers]
    plain = not any(any(buffers[buffer.alias or buffer.value].halo) for buffer in found)
    taps = graph.constants[anchor.inputs[1]].shape[2:]
    return plain and {*taps, *anchor.attrs["stride"]} == {1} and not any(anchor.attrs["padding"])


@dataclass(frozen=True)
class Step:
    """One entry of a program: a partition, or an island or host operator that the runtime calls.

    Steps of one barrier group do not depend on each other: threads wait for each other where a group ends. A segment is
    a stretch of steps without a call of the runtime in between.
    """

    partition: Partition
    barrier_group: int = 0
    segment: int = 0

    @property
    def called(self) -> bool:
        """Whether the runtime calls back for it: a float part, or a host operator."""
        return self.partition.anchor.is_called_back


@dataclass(frozen=True)
class BufferLifetime:
    """Barrier groups from the first that writes a buffer to the last that reads it, both included.

    Buffers get their offsets in the order of ``order``.
    """

    value: str
    first: int
    last: int
    order: int

    def overlaps(self, other: BufferLifetime) -> bool:
        """Return whether both buffers must be in memory during one barrier group."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class BatchTiling:
    """Run the steps of the first ``groups`` barrier groups on ``images`` images a thread, then on as many others.

    ``batch`` is the free dimension that counts images. Bits never depend on it.
    """

    batch: str
    groups: int
    images: int


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of one core's first and second level cache."""

    l1: int = 32 << 10
    l2: int = 1 << 20


@dataclass(frozen=True)
class Target:
    """The machine a plan was scheduled for: instruction set, tallest tile by blocks of 16 channels, caches."""

    isa: str
    tallest: Mapping[int, int]
    caches: CacheSizes


class Choice(StrEnum):
    """What a reason of a plan explains."""

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
"""What was chosen for which value or partition -> why, in words."""
