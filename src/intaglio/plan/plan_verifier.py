"""Verifier of plans: operators, order of steps, memory, views, halos. It runs after planning."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from intaglio.ir import Op, VerifyError, evaluate, symbols_of
from intaglio.ops import op_def
from intaglio.plan.execution_plan import Plan
from intaglio.plan.layouts import halo_of
from intaglio.plan.plan_records import Step

ALL_CHANNELS = 1 << 62
"""Upper end of the channels of a buffer that a single step writes as a whole."""


def verify_plan(plan: Plan) -> None:
    """Raise `VerifyError` with all problems of a plan."""
    found = [problem for check in PLAN_CHECKS for problem in check(plan)]
    if found:
        raise VerifyError("; ".join(found))


def operators_once(plan: Plan) -> Iterator[str]:
    """Yield operators that are in no partition or in several; only data movement without a copy may be in none."""
    count: dict[tuple[str, ...], int] = {}
    for partition in plan.partitions:
        for op in partition.ops:
            count[op.outputs] = count.get(op.outputs, 0) + 1
    for op in plan.graph.ops:
        times = count.pop(op.outputs, 0)
        if times > 1:
            yield f"%{op.outputs[0]}: {times} partitions compute it"
        elif times == 0 and not _needs_no_step(op, plan):
            yield f"%{op.outputs[0]}: no partition computes it"
    yield from (f"%{outputs[0]}: a partition computes it, but the graph does not" for outputs in count)


def written_before_read(plan: Plan) -> Iterator[str]:
    """Yield values that a step reads although no earlier barrier group writes them."""
    group_of = {name: step.barrier_group for step in plan.steps for op in step.partition.ops for name in op.outputs}
    dropped = {op.output: op for op in plan.graph.ops if not group_of.keys() & {*op.outputs}}
    position = {id(step): index for index, step in enumerate(plan.steps)}
    made_at = {name: position[id(step)] for step in plan.steps for op in step.partition.ops for name in op.outputs}
    for step in plan.steps:
        for name in step.partition.reads():
            for source in _sources(name, dropped):
                if source not in group_of:
                    if source not in plan.graph.inputs and source not in plan.graph.constants:
                        yield f"%{source}: {step.partition.name} reads it, but no step writes it"
                elif group_of[source] >= step.barrier_group or made_at[source] >= position[id(step)]:
                    group = group_of[source]
                    yield f"%{source}: {step.partition.name} reads it before its barrier group {group} ends"


def groups_in_order(plan: Plan) -> Iterator[str]:
    """Yield steps whose barrier group or segment is lower than that of the preceding step."""
    for before, step in pairwise(plan.steps):
        if step.barrier_group < before.barrier_group or step.segment < before.segment:
            yield f"{step.partition.name}: barrier group {step.barrier_group} comes after {before.barrier_group}"


def lifetimes_cover_uses(plan: Plan) -> Iterator[str]:
    """Yield buffers that are used in a barrier group outside of their lifetime."""
    lifetimes = {lifetime.value: lifetime for lifetime in plan.lifetimes}
    if len(lifetimes) < len(plan.lifetimes) or len({one.order for one in plan.lifetimes}) < len(plan.lifetimes):
        yield "a buffer has two places in memory"
    for step in plan.steps:
        for name in dict.fromkeys(map(plan.root, _touched(step, plan))):
            lifetime = lifetimes.get(name)
            if name not in plan.buffers:
                continue
            if lifetime is None:
                yield f"%{name}: {step.partition.name} uses it, but it has no place in memory"
            elif not lifetime.first <= step.barrier_group <= lifetime.last:
                yield (
                    f"%{name}: {step.partition.name} uses it in barrier group {step.barrier_group}, "
                    f"but it lives from {lifetime.first} to {lifetime.last}"
                )


def one_writer(plan: Plan) -> Iterator[str]:
    """Yield buffers that a second step overwrites.

    Operands of a concatenation may write their own channels, and the concatenation the remaining ones.
    """
    joined = {partition.output for partition in plan.partitions if op_def(partition.anchor).variadic}
    writers: dict[str, list[str]] = {}
    for step in plan.steps:
        for name in step.partition.ops[-1].outputs:
            writers.setdefault(plan.root(name), []).append(name)
    for root, names in writers.items():
        spans = []
        for name in names:
            buffer = plan.buffers.get(name)
            if buffer is None or buffer.first_channel is None:
                spans += [] if name == root and name in joined else [(name, 0, ALL_CHANNELS)]
            else:
                channels = buffer.channels()
                spans.append(
                    (
                        name,
                        buffer.first_channel,
                        buffer.first_channel + evaluate(channels, dict.fromkeys(symbols_of(channels), 1)),
                    )
                )
        spans.sort(key=lambda span: span[1])
        for (first, _, end), (second, begin, _) in pairwise(spans):
            if begin < end:
                yield f"%{root}: %{second} overwrites what %{first} wrote"


def views_can_be_read(plan: Plan) -> Iterator[str]:
    """Yield views without underlying memory, and views read by an operator that does not support strides."""
    known = {*plan.buffers, *plan.graph.constants, *plan.external}
    for name, view in plan.views.items():
        if view.root not in known:
            yield f"%{name} is a view of %{view.root}, which has no memory"
    for step in plan.steps:
        for op in step.partition.ops:
            for name in op.inputs:
                if name in plan.views and not (op_def(op).any_strides or op_def(op).moves_data):
                    yield f"%{name} is a view, but {op.kind} %{op.outputs[0]} does not support strides"


def aliases_have_memory(plan: Plan) -> Iterator[str]:
    """Yield aliases of values that are not buffers, or that are aliases themselves."""
    for name, buffer in plan.buffers.items():
        if buffer.alias is not None and (buffer.alias not in plan.buffers or plan.buffers[buffer.alias].alias):
            yield f"%{name} is an alias of %{buffer.alias}, which has no memory of its own"


def halos_fit(plan: Plan) -> Iterator[str]:
    """Yield buffers whose halo differs from that of their widest zero-padding reader."""
    needed: dict[str, tuple[int, int]] = {}
    for op in plan.graph.ops:
        if op_def(op).convolves:
            (y, x), (wide_y, wide_x) = halo_of(op, plan.graph), needed.get(op.inputs[0], (0, 0))
            needed[op.inputs[0]] = max(y, wide_y), max(x, wide_x)
    heads = {partition.head.output for partition in plan.partitions if partition.head is not None}
    for name in {*needed, *plan.buffers}:
        halo = plan.buffers[name].halo if name in plan.buffers else (0, 0)
        if halo != needed.get(name, (0, 0)):
            yield f"%{name}: its halo is {halo[0]}x{halo[1]}, its readers need {needed.get(name, (0, 0))}"
        if name in heads and any(needed.get(name, (0, 0))):
            yield f"%{name}: a multiplication computes it pixel by pixel, but its reader needs padding"


PLAN_CHECKS = (
    operators_once,
    written_before_read,
    groups_in_order,
    lifetimes_cover_uses,
    one_writer,
    views_can_be_read,
    aliases_have_memory,
    halos_fit,
)


def _needs_no_step(op: Op, plan: Plan) -> bool:
    """Return whether the result of data movement is already in place."""
    if not op_def(op).moves_data:
        return False
    if op.output in plan.views or any(plan.root(name) == op.output for name in op.inputs):
        parts = (plan.buffers.get(name) for name in op.inputs) if op_def(op).variadic else ()
        return all(part is not None and part.first_channel is not None for part in parts)
    buffer = plan.buffers.get(op.output)
    return buffer is not None and buffer.alias is not None and buffer.first_channel is None


def _sources(name: str, dropped: dict[str, Op]) -> Iterator[str]:
    """Yield the values that must be written before a value can be read, through data movement without a step."""
    if name in dropped:
        for source in dropped[name].inputs:
            yield from _sources(source, dropped)
    else:
        yield name


def _touched(step: Step, plan: Plan) -> list[str]:
    """Return all values that a step reads and writes, including its scratch buffers."""
    outputs = step.partition.ops[-1].outputs
    scratch = [f"{name}.{what}" for name in outputs for what in ("sums", "scratch")]
    return [*outputs, *(name for name in scratch if name in plan.buffers), *step.partition.reads()]
