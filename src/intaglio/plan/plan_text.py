"""Lines of a plan's text: decisions about a step, a buffer or a view, with their reasons."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from intaglio.ir import Dim, Graph, Schedule
from intaglio.plan.arena import Arena
from intaglio.plan.buffers import Buffer
from intaglio.plan.kernel_records import Kernel, TiledKernel
from intaglio.plan.loops.loop_records import LoopSchedule
from intaglio.plan.plan_records import (
    SMALL_WORK,
    BatchTiling,
    Choice,
    Reasons,
    SharedWork,
    Step,
    Target,
    TensorView,
)


def target_line(target: Target | None, steps: int, segments: int) -> str:
    """Return the first line, such as ``plan for avx2 (L1 32 KiB, L2 512 KiB): 5 steps, 1 segment``."""
    caches = "" if target is None else f", L1 {target.caches.l1 >> 10} KiB, L2 {target.caches.l2 >> 10} KiB"
    where = "any machine" if target is None else target.isa + caches
    return f"plan for {where}: {_count(steps, 'step')}, {_count(segments, 'segment')}"


def step_lines(
    index: int, step: Step, graph: Graph, decided: Mapping[Choice, Mapping[str, str]], reasons: Reasons
) -> Iterator[str]:
    """Yield the operators, result and barrier group of a step, then the decisions about it, each with its reason."""
    partition = step.partition
    kinds = " + ".join(op.kind for op in partition.ops)
    results = partition.ops[-1].outputs
    result = ", ".join(f"%{name}: {graph.types[name]}" for name in results)
    place = f"barrier group {step.barrier_group}, segment {step.segment}"
    yield f"p{index:02d} {partition.name}: {kinds} -> {result}; {place}"
    yield from _reason_lines(Choice.FUSION, results[0], reasons)
    yield from _reason_lines(Choice.BARRIER, results[0], reasons)
    for choice, texts in decided.items():
        if results[0] in texts:
            yield f"    {texts[results[0]]}"
            yield from _reason_lines(choice, results[0], reasons)


def small_group_lines(step: Step, small_groups: Mapping[int, SharedWork]) -> Iterator[str]:
    """Yield up to which work of its barrier group one thread computes a step."""
    work = small_groups.get(step.barrier_group)
    if work is not None and work.parts:
        total = " + ".join(f"{one}" + f" if {units} > 1" * (not isinstance(units, int)) for units, one in work.parts)
        yield f"    one thread, without barriers to such groups, up to {SMALL_WORK} bytes and MACs: {total}"
    elif work is not None:
        yield "    one thread, without barriers to such groups"


def growing_lines(step: Step, growing: Mapping[str, str]) -> Iterator[str]:
    """Yield which tensor of the caller a concatenation extends, if the caller has memory for that."""
    root = growing.get(step.partition.output)
    if root is not None:
        yield f"    copies only the new values, behind %{root}, in calls with memory there"


def decided_texts(
    schedules: Mapping[str, Schedule],
    guarded: Collection[str],
    kernels: Mapping[str, tuple[Kernel, ...]],
    loops: Mapping[str, LoopSchedule],
) -> Mapping[Choice, Mapping[str, str]]:
    """Return the decisions about steps by the values they compute; a schedule is shown only if a product has tiles."""
    tiled = {name for name, found in kernels.items() if any(isinstance(one, TiledKernel) for one in found)}
    return {
        Choice.SCHEDULE: {name: _schedule_text(one) for name, one in schedules.items() if name in tiled},
        Choice.GUARD: dict.fromkeys(guarded, "accumulators are clamped before they are converted"),
        Choice.KERNEL: {name: _kernels_text(found) for name, found in kernels.items()},
        Choice.LOOP: {name: f"loop: {one.text()}" for name, one in loops.items()},
    }


def _schedule_text(schedule: Schedule) -> str:
    return f"tile {schedule.tile_rows}x{16 * schedule.tile_columns}, chunks of {schedule.chunk_bytes} bytes"


def _kernels_text(kernels: tuple[Kernel, ...]) -> str:
    texts = dict.fromkeys(kernel.text() for kernel in kernels)
    pieces = f" for {len(kernels)} phases" if len(kernels) > 1 else ""
    return f"runs {'; '.join(texts)}{pieces}"


def placed_texts(arena: Arena, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> dict[str, str]:
    """Return size, offset for these free sizes, lifetime and placement order of every buffer in the arena."""
    found, where = dict[str, str](), ", ".join(f"{name}={size}" for name, size in sizes.items())
    offsets, tile = arena.offsets(buffers, sizes), {one.value for one in arena.tile}
    for one in (*arena.outside, *arena.tile):
        offset = f"at {offsets[one.value]}" + " of the batch tile" * (one.value in tile) + f" ({where})" * bool(where)
        lifetime = f"barrier groups {one.first}..{one.last}, placed {one.order}"
        found[one.value] = f"{_bytes(buffers[one.value].size())} bytes {offset}, {lifetime}"
    return found


def buffer_lines(buffer: Buffer, place: str | None, reasons: Reasons) -> Iterator[str]:
    """Yield location, size and lifetime of a buffer, then the reasons for its layout, halo and alias."""
    shape = ", ".join(map(str, buffer.shape))
    halo = f", halo {buffer.halo[0]}x{buffer.halo[1]}" if any(buffer.halo) else ""
    layout = "channels last" if buffer.channels_last else "row-major"
    where = place or "never in memory"
    if buffer.alias is not None:
        where = f"in %{buffer.alias}" + (
            f" from channel {buffer.first_channel}" if buffer.first_channel is not None else ""
        )
    yield f"buffer %{buffer.value} {buffer.dtype}[{shape}] {layout}{halo}: {where}"
    for choice in (Choice.LAYOUT, Choice.HALO, Choice.ALIAS, Choice.MEMORY):
        yield from _reason_lines(choice, buffer.value, reasons)


def view_lines(views: Mapping[str, TensorView], reasons: Reasons) -> Iterator[str]:
    """Yield all views, then all results of data movement that are copied although they could be views."""
    for name, view in views.items():
        yield f"view %{name} in %{view.root} from {view.start}, strides ({', '.join(map(str, view.strides))})"
        yield from _reason_lines(Choice.VIEW, name, reasons)
    for (choice, name), reason in reasons.items():
        if choice is Choice.VIEW and name not in views:
            yield f"copy %{name}: {reason}"


def batch_tiling_lines(tiling: BatchTiling | None, reasons: Reasons) -> Iterator[str]:
    """Yield the steps that run on sub-batches, the size of these, and the reason."""
    reason = reasons.get((Choice.BATCH_TILING, ""))
    if tiling is not None:
        images = _count(tiling.images, "image")
        yield f"batch tiling along {tiling.batch}: barrier groups 0..{tiling.groups - 1} on {images} a thread: {reason}"
    elif reason is not None:
        yield f"no batch tiling: {reason}"


def _reason_lines(choice: Choice, name: str, reasons: Reasons) -> Iterator[str]:
    if (reason := reasons.get((choice, name))) is not None:
        yield f"    {choice.value}: {reason}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _bytes(size: Dim) -> str:
    return f"({size})" if " " in str(size) else str(size)
