"""Planning of an integer graph as a literal sequence of passes from plan to plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from intaglio.fusion.table import FUSIONS
from intaglio.ir import Graph, Op
from intaglio.ops import op_def
from intaglio.plan.buffers import Buffer
from intaglio.plan.execution_plan import Plan
from intaglio.plan.growing_inputs import find_growing_inputs
from intaglio.plan.layouts import assign_layouts, copy_padded_inputs
from intaglio.plan.loops.loop_schedule import schedule_loops
from intaglio.plan.memory_planning import add_scratch_buffers, plan_memory
from intaglio.plan.partitioning import merge_epilogues, merge_heads, partition_ops
from intaglio.plan.plan_records import Choice, Partition, Step, TensorView
from intaglio.plan.plan_verifier import verify_plan
from intaglio.plan.views import assign_views


def partition_operators(plan: Plan) -> Plan:
    """Put every operator into one partition; operators linked by int32 accumulators share a kernel."""
    return _with_partitions(plan, partition_ops(plan.graph))


def fuse_heads(plan: Plan) -> Plan:
    """Fuse the multiplication of squeeze-and-excite into the 1x1 convolution that is its only reader."""
    return _with_partitions(plan, merge_heads(plan.partitions, plan.graph, plan.buffers))


def fuse_epilogues(plan: Plan) -> Plan:
    """Fuse an elementwise loop, or a dequantize, into the product that it reads."""
    return _with_partitions(plan, merge_epilogues(plan.partitions, plan.graph, plan.buffers))


def drop_copy_free_movement(plan: Plan) -> Plan:
    """Drop steps without work: their result is a view or an alias, or was written directly to its location."""
    kept = [
        partition
        for partition in plan.partitions
        if len(partition.ops) > 1
        or not (_is_view(partition.ops[0], plan.views) or _is_alias(partition.ops[0], plan.buffers))
    ]
    return _with_partitions(plan, kept)


def drop_head_buffers(plan: Plan) -> Plan:
    """Drop the buffers of results of heads, which are never stored as a whole."""
    heads = {partition.head.output for partition in plan.partitions if partition.head is not None}
    return replace(plan, buffers={name: buffer for name, buffer in plan.buffers.items() if name not in heads})


def assign_barrier_groups(plan: Plan) -> Plan:
    """Begin a barrier group where a step reads a result of the current group.

    A step that the runtime calls is a barrier group of its own. The segment number increases where such steps begin and
    where they end.
    """
    steps: list[Step] = []
    reasons: dict[str, str] = {}
    group, segment, made, previous_called = 0, 0, dict[str, str](), False
    for partition in plan.partitions:
        called = Step(partition).called
        read = next((name for name in partition.reads() if plan.root(name) in made), None)
        if steps and (called or previous_called or read is not None):
            reasons[partition.ops[-1].outputs[0]] = (
                "the runtime calls a Python function" if read is None else f"reads %{read}"
            )
            group, made = group + 1, {}
            segment += called != previous_called
        steps.append(Step(partition, group, segment))
        made.update((plan.root(name), name) for name in partition.ops[-1].outputs)
        previous_called = called
    return replace(plan, steps=tuple(steps)).with_reasons(Choice.BARRIER, reasons)


def list_external_values(plan: Plan) -> Plan:
    """List the values in tensors of the caller, in order of appearance: all but buffers, views and constants."""
    graph = plan.graph
    inside = {output for op in graph.ops for output in op.outputs if graph.types[output].q is not None}
    inside -= graph.external_values()
    names = [*graph.inputs, *(output for op in graph.ops for output in op.outputs), *graph.outputs]
    skipped = inside.union(plan.buffers, graph.constants, plan.views)
    return replace(plan, external=tuple(dict.fromkeys(name for name in names if name not in skipped)))


def explain_partitions(plan: Plan) -> Plan:
    """Record which fusions joined the operators of each partition, and their purpose."""
    purposes = {row.name: row.purpose for row in FUSIONS}
    fused = (partition for partition in plan.partitions if partition.fusions)
    why = {p.ops[-1].outputs[0]: "; ".join(f"{name}: {purposes[name]}" for name in p.fusions) for p in fused}
    return plan.with_reasons(Choice.FUSION, why)


PLAN_PASSES: tuple[Callable[[Plan], Plan], ...] = (
    copy_padded_inputs,  # first: the copies get layouts and partitions too
    assign_layouts,  # before views and heads, which use the locations of buffers
    assign_views,  # removes buffers, and thereby the steps that would fill them
    partition_operators,
    fuse_heads,  # before epilogues: a head changes what a partition reads, an epilogue what it computes
    fuse_epilogues,
    drop_copy_free_movement,  # after fusion: only a step with a single operator can be dropped
    drop_head_buffers,
    explain_partitions,
    assign_barrier_groups,  # needs the final steps, and the roots of views and aliases
    add_scratch_buffers,
    schedule_loops,  # after epilogues and views: rows of loops follow strides
    find_growing_inputs,  # after views and aliases: a concatenation must have memory of its own
    list_external_values,  # after scratch buffers: values without a buffer belong to the caller
    plan_memory,  # last: lifetimes are measured in barrier groups
)


def plan_graph(graph: Graph) -> Plan:
    """Return the verified, machine-independent plan of an integer graph; `schedule_plan` completes it for a machine."""
    plan = Plan(graph)
    for step in PLAN_PASSES:
        plan = step(plan)
    verify_plan(plan)
    return plan


def _with_partitions(plan: Plan, partitions: Sequence[Partition]) -> Plan:
    return replace(plan, steps=tuple(map(Step, partitions)))


def _is_view(op: Op, views: Mapping[str, TensorView]) -> bool:
    """Return whether data movement has no work: its result is a view, or its source was written directly to its
    location.
    """
    if not op_def(op).moves_data:
        return False
    return op.output in views or any(name in views and views[name].root == op.output for name in op.inputs)


def _is_alias(op: Op, buffers: Mapping[str, Buffer]) -> bool:
    """Return whether the result is in the memory of its source, or was written there part by part."""
    buffer = buffers.get(op.outputs[0])
    if buffer is None or not op_def(op).variadic:
        return buffer is not None and buffer.alias is not None and buffer.first_channel is None
    return not any(buffer.halo) and all(
        name in buffers and buffers[name].first_channel is not None for name in op.inputs
    )
