"""Memory planning: scratch buffers, the lifetime of every buffer, and the order in which buffers are placed.

The program computes the offsets at run time, because sizes may be free: first fit, in that order.
"""

from __future__ import annotations

from dataclasses import replace

from intaglio.ir import DType, evaluate, symbols_of
from intaglio.ops import op_def
from intaglio.ops.products.scratch_memory import CACHE_LINE, MAX_SCRATCH_THREADS
from intaglio.plan.buffers import Buffer
from intaglio.plan.execution_plan import Plan
from intaglio.plan.plan_records import BufferLifetime, Choice

MAX_SUM_THREADS = 8
"""Maximum number of threads that sum one image together."""
FEW_CHANNELS = 192
"""Threads sum one image together up to this number of channels; with more channels, each thread sums some of them."""


def add_scratch_buffers(plan: Plan) -> Plan:
    """Add the scratch buffers of steps: partial sums of pools, packed operands and attention scores of threads."""
    found: dict[str, Buffer] = {}
    reasons: dict[str, str] = {}
    for partition in plan.partitions:
        op, record = partition.anchor, op_def(partition.anchor)
        if record.sums_image and set(op.attrs["size"]) == {1}:
            channels = plan.buffers[op.inputs[0]].channels()
            if isinstance(channels, int) and channels <= FEW_CHANNELS:
                name = f"{op.output}.sums"
                found[name] = Buffer(name, (MAX_SUM_THREADS, channels), DType.I32)
                reasons[name] = f"{MAX_SUM_THREADS} threads sum one image of {channels} channels together"
        name = f"{partition.output}.scratch"
        if lines := record.scratch(op, plan.graph.types):
            found[name] = Buffer(name, (MAX_SCRATCH_THREADS, lines, CACHE_LINE), DType.U8, row_major=True)
            reasons[name] = f"each thread packs its operands of the {op.kind}"
        if lines := record.shared_scratch(op, plan.graph.types):
            found[name] = Buffer(name, (1, lines, CACHE_LINE), DType.U8, row_major=True)
            reasons[name] = f"gates and states of the {op.kind}, shared by threads"
    return replace(plan, buffers={**plan.buffers, **found}).with_reasons(Choice.MEMORY, reasons)


def plan_memory(plan: Plan) -> Plan:
    """Compute the lifetime of every buffer in barrier groups, and order buffers by size, largest first.

    A large buffer that is placed late finds only gaps that are too small (Pisarchyk and Lee 2020).
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for step in plan.steps:
        outputs = step.partition.ops[-1].outputs
        scratch = [f"{output}.{what}" for output in outputs for what in ("sums", "scratch")]
        for name in (*outputs, *scratch, *step.partition.reads()):
            root = plan.root(name)
            if root in plan.buffers:
                first.setdefault(root, step.barrier_group)
                last[root] = step.barrier_group
    ordered = sorted(first, key=lambda name: (-_typical_bytes(plan.buffers[name]), first[name], name))
    lifetimes = (BufferLifetime(name, first[name], last[name], order) for order, name in enumerate(ordered))
    return replace(plan, lifetimes=tuple(lifetimes))


def _typical_bytes(buffer: Buffer) -> int:
    """Return the size of a buffer in bytes with every free dimension set to 1."""
    size = buffer.size()
    return evaluate(size, dict.fromkeys(symbols_of(size), 1))
