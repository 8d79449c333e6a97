"""Steps, phases, and the life of every buffer: the plan table that the program turns into offsets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from intaglio.ir import DType, Graph, Op, evaluate, symbols_of
from intaglio.ir.moves import MOVES
from intaglio.plan.buffers import Buffer
from intaglio.plan.layouts import copy_for_halos, lay_out
from intaglio.plan.partitioning import fuse, join_epilogues, join_heads
from intaglio.plan.plan_records import Partition, Placement, Plan, Step, View
from intaglio.plan.scratch_memory import LINE, SHARERS, recurrent_lines, scratch_lines
from intaglio.plan.views import find_views

SHARES = 8
"""Threads that sum one image together, at most."""
FEW_CHANNELS = 192
"""Up to here they do: of more, each thread takes some."""


def plan_graph(graph: Graph) -> Plan:
    """Partitions in order, grouped into phases (steps of one phase do not depend on each other) and segments (native
    stretches between islands), with buffers and the order in which they get their place. The graph of the plan has
    the copies of `copy_for_halos` in it.
    """
    graph = copy_for_halos(graph)
    buffers, rows = lay_out(graph)
    views = find_views(graph, buffers, rows)
    buffers = {name: _behind(buffer, buffers, views) for name, buffer in buffers.items() if name not in views}
    partitions = join_epilogues(join_heads(fuse(graph), graph, buffers), graph)
    partitions = [p for p in partitions if len(p.ops) > 1 or not (_is_view(p.ops[0], views) or _is_alias(p, buffers))]
    heads = {p.head.output for p in partitions if p.head is not None}
    buffers = {name: buffer for name, buffer in buffers.items() if name not in heads}  # never made as a whole
    steps = _steps(partitions, buffers, views)
    buffers = {**buffers, **_sums(partitions, graph, buffers), **_scratch(partitions, graph)}
    external = tuple(name for name in _external(graph, buffers) if name not in views)
    return Plan(graph, tuple(steps), buffers, _placements(steps, buffers, views), external, rows, views)


def _behind(buffer: Buffer, buffers: Mapping[str, Buffer], views: Mapping[str, View]) -> Buffer:
    """A buffer whose alias lies in the memory of another value now: that is its alias if it was one like it."""
    if buffer.alias is None or buffer.alias not in views:
        return buffer
    root = views[buffer.alias].root
    alike = root in buffers and root != buffer.value and buffers[root].alias == buffer.alias
    return replace(buffer, alias=root if alike else None)


def _is_view(op: Op, views: Mapping[str, View]) -> bool:
    """Whether a move has nothing to do: its result stays where its source lies, or that was written in its place."""
    if op.kind not in MOVES:
        return False
    return op.output in views or any(name in views and views[name].root == op.output for name in op.inputs)


def _is_alias(partition: Partition, buffers: Mapping[str, Buffer]) -> bool:
    """Whether there is nothing to do: the result lies where its source does, or was written in its place."""
    op = partition.ops[0]
    buffer = buffers.get(op.outputs[0])
    if buffer is None or op.kind != "cat":
        return buffer is not None and buffer.alias is not None and buffer.part is None
    return not any(buffer.halo) and all(name in buffers and buffers[name].part is not None for name in op.inputs)


def _root(name: str, buffers: Mapping[str, Buffer], views: Mapping[str, View]) -> str:
    name = views[name].root if name in views else name
    buffer = buffers.get(name)
    return buffer.alias if buffer is not None and buffer.alias else name


def _steps(partitions: list[Partition], buffers: Mapping[str, Buffer], views: Mapping[str, View]) -> list[Step]:
    steps: list[Step] = []
    phase, segment = 0, 0
    made: set[str] = set()
    previous_island = False
    for partition in partitions:
        island = partition.anchor.kind in ("island", "host")
        depends = any(_root(name, buffers, views) in made for name in partition.reads())
        if steps and (island or previous_island or depends):
            phase, made = phase + 1, set()
            segment += island != previous_island
        steps.append(Step(partition, phase, segment))
        made.update(_root(name, buffers, views) for name in partition.ops[-1].outputs)
        previous_island = island
    return steps


def _sums(partitions: list[Partition], graph: Graph, buffers: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """Where threads that sum one image together leave what each of them found."""
    found: dict[str, Buffer] = {}
    for op in (partition.anchor for partition in partitions):
        if op.kind in ("adaptive_avg_pool1d", "adaptive_avg_pool2d") and set(op.attrs["size"]) == {1}:
            channels = buffers[op.inputs[0]].channels()
            if isinstance(channels, int) and channels <= FEW_CHANNELS:
                name = f"{op.output}.sums"
                found[name] = Buffer(name, (SHARES, channels), DType.I32)
    return found


def _scratch(partitions: list[Partition], graph: Graph) -> dict[str, Buffer]:
    """What threads need for themselves, side by side, or together."""
    found: dict[str, Buffer] = {}
    for partition in partitions:
        if lines := scratch_lines(partition.anchor, graph.types):
            name = f"{partition.output}.scratch"
            found[name] = Buffer(name, (SHARERS, lines, LINE), DType.U8, rows=True)
        if lines := recurrent_lines(partition.anchor, graph.types):
            name = f"{partition.output}.scratch"
            found[name] = Buffer(name, (1, lines, LINE), DType.U8, rows=True)
    return found


def _placements(steps: list[Step], buffers: Mapping[str, Buffer], views: Mapping[str, View]) -> tuple[Placement, ...]:
    """Largest first: a big buffer placed late finds only gaps too small for it (Pisarchyk and Lee 2020)."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for step in steps:
        outputs = step.partition.ops[-1].outputs
        own = [f"{output}.{what}" for output in outputs for what in ("sums", "scratch")]
        for name in (*outputs, *own, *step.partition.reads()):
            root = _root(name, buffers, views)
            if root in buffers:
                first.setdefault(root, step.phase)
                last[root] = step.phase
    ordered = sorted(first, key=lambda name: (-_typical(buffers[name]), first[name], name))
    return tuple(Placement(name, first[name], last[name], order) for order, name in enumerate(ordered))


def _typical(buffer: Buffer) -> int:
    size = buffer.size()
    return evaluate(size, dict.fromkeys(symbols_of(size), 1))


def _external(graph: Graph, buffers: Mapping[str, Buffer]) -> tuple[str, ...]:
    """Values in tensors of the caller, in order of appearance: everything that is no buffer and no constant."""
    inside = {output for op in graph.ops for output in op.outputs if graph.types[output].q is not None}
    inside -= graph.outside()
    names = [*graph.inputs, *(output for op in graph.ops for output in op.outputs), *graph.outputs]
    skipped = inside.union(buffers, graph.constants)
    return tuple(dict.fromkeys(name for name in names if name not in skipped))
