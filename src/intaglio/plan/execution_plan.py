"""The execution plan of an integer graph: all decisions and their reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from intaglio.ir import Graph, Schedule
from intaglio.plan.arena import Arena, arena_of
from intaglio.plan.buffers import Buffer, caller_strides, strides
from intaglio.plan.kernel_records import Kernel
from intaglio.plan.loops.loop_records import LoopSchedule
from intaglio.plan.plan_records import (
    BatchTiling,
    BufferLifetime,
    Choice,
    Partition,
    Reasons,
    SharedWork,
    Step,
    Target,
    TensorView,
)
from intaglio.plan.plan_text import (
    batch_tiling_lines,
    buffer_lines,
    decided_texts,
    growing_lines,
    placed_texts,
    small_group_lines,
    step_lines,
    target_line,
    view_lines,
)


@dataclass(frozen=True)
class Plan:
    """Everything that code generation needs.

    `plan_graph` fills in all machine-independent fields, `schedule_plan` the others.

    Attributes:
        graph: The integer graph.
        steps: Steps in execution order.
        buffers: Buffers of internal values.
        lifetimes: Lifetimes of buffers in placement order.
        external: Values in tensors of the caller: graph inputs and outputs, operands and results of islands.
        row_major: Values of three to five axes that are row-major.
        strided: Quantized tensors of the caller that are read with the strides of each call.
        views: Results of data movement that are not copied.
        growing: Tensors of the caller behind which new values are written in some calls, by the concatenation of both.
        reasons: Reasons of decisions.
        target: The machine that the plan is scheduled for.
        schedules: Schedules of products, by the value that the partition computes.
        batch_tiling: Batch tiling, if any.
        guarded: Partitions, by the same value, whose accumulators may exceed the range that converts to int32.
        kernels: Kernels, by the same value.
        loops: Schedules of loops, by their first result.
        small_groups: Work of barrier groups that one thread computes where it is below a limit.
    """

    graph: Graph
    steps: tuple[Step, ...] = ()
    buffers: Mapping[str, Buffer] = field(default_factory=dict)
    lifetimes: tuple[BufferLifetime, ...] = ()
    external: tuple[str, ...] = ()
    row_major: frozenset[str] = frozenset()
    strided: frozenset[str] = frozenset()
    views: Mapping[str, TensorView] = field(default_factory=dict)
    growing: Mapping[str, str] = field(default_factory=dict)
    reasons: Reasons = field(default_factory=dict)
    target: Target | None = None
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    batch_tiling: BatchTiling | None = None
    guarded: frozenset[str] = frozenset()
    kernels: Mapping[str, tuple[Kernel, ...]] = field(default_factory=dict)
    loops: Mapping[str, LoopSchedule] = field(default_factory=dict)
    small_groups: Mapping[int, SharedWork] = field(default_factory=dict)

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """Return the partitions in execution order."""
        return tuple(step.partition for step in self.steps)

    def segments(self) -> int:
        """Return the number of segments: sequences of steps between calls of the runtime."""
        return self.steps[-1].segment + 1 if self.steps else 0

    def root(self, name: str) -> str:
        """Return the value whose memory ``name`` uses: itself, unless it is a view or an alias."""
        name = self.views[name].root if name in self.views else name
        buffer = self.buffers.get(name)
        return buffer.alias if buffer is not None and buffer.alias else name

    def location(self, name: str) -> TensorView:
        """Return the location of a value: in a buffer, a constant, or a tensor of the caller."""
        view = self.views.get(name)
        if view is not None:
            return view
        buffer = self.buffers.get(name)
        if buffer is None:
            kind, row_major = self.graph.types[name], name in self.graph.constants or name in self.row_major
            if name in self.strided:
                return TensorView(name, 0, caller_strides(name, kind.shape))
            return TensorView(name, 0, strides(Buffer(name, kind.shape, kind.dtype, row_major=row_major)))
        (above, beside), (_, _, width, pixel) = buffer.halo, buffer.nhwc_sizes()
        return TensorView(name, (above * (width + 2 * beside) + beside) * pixel, strides(buffer))

    def arena(self) -> Arena:
        """Return the arena, which tells buffers of a batch tile from those outside."""
        return arena_of(self.lifetimes, self.batch_tiling)

    def max_tile_rows(self) -> Mapping[int, int]:
        """Return the target's maximum number of tile rows per number of 16-channel blocks."""
        if self.target is None:
            raise ValueError("the plan has no instruction set yet; call schedule_plan(plan, ...) first")
        return self.target.max_tile_rows

    def with_reasons(self, choice: Choice, reasons: Mapping[str, str]) -> Plan:
        """Return the plan with reasons for one kind of decision, by value or partition."""
        return replace(self, reasons={**self.reasons, **{(choice, name): why for name, why in reasons.items()}})

    def text(self) -> str:
        """Return partitions, layouts, views, memory, schedules and batch tiling, with the reason of each decision."""
        lines = [target_line(self.target, len(self.steps), self.segments())]
        decided = decided_texts(self.schedules, self.guarded, self.kernels, self.loops)
        for index, step in enumerate(self.steps):
            lines += step_lines(index, step, self.graph, decided, self.reasons)
            lines += small_group_lines(step, self.small_groups)
            lines += growing_lines(step, self.growing)
        places = placed_texts(self.arena(), self.buffers, dict.fromkeys(self.graph.symbols(), 1))
        for name, buffer in self.buffers.items():
            lines += buffer_lines(buffer, places.get(name), self.reasons)
        lines += view_lines(self.views, self.reasons)
        lines += [f"external {', '.join(f'%{name}' for name in self.external)}"] * bool(self.external)
        lines += batch_tiling_lines(self.batch_tiling, self.reasons)
        return "\n".join(lines) + "\n"
