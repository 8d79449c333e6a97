"""The records of a plan: partitions in steps, the lifetime of every buffer, views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from intaglio.ir import Dim, Graph, Op
from intaglio.plan.buffers import Buffer


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
