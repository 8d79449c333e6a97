"""Concatenations that need no copy of a tensor of the caller, if the caller has memory for more behind it.

The keys and values of a cache are such tensors: a step appends those of the new tokens, and attention reads them
together. In calls that say so (`Run.grows` of native/base/run.h) the program writes the new ones behind the caller's
tensor, and reads all of them from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from intaglio.ir import Graph, Op
from intaglio.ops import op_def
from intaglio.ops.movement.shape import CAT
from intaglio.ops.products.attention import is_attention_over
from intaglio.plan.buffers import caller_strides
from intaglio.plan.execution_plan import Plan

TOKENS, AXES = 2, 4
"""Axis of tokens, and number of axes, of keys and values: [batch, heads, tokens, size]."""


def find_growing_inputs(plan: Plan) -> Plan:
    """Find the concatenations of an input and new values that only attention reads, as keys or values."""
    found: dict[str, str] = {}
    users = plan.graph.users()
    for step in plan.steps:
        op = step.partition.anchor
        alone = len(step.partition.ops) == 1 and op.output not in plan.graph.outputs
        if alone and _appends_tokens(op, users[op.output], plan.graph) and _has_memory_of_its_own(op, plan):
            root = plan.location(op.inputs[0]).root
            if root in plan.strided and root not in found.values() and _is_whole(op.inputs[0], plan):
                found[op.output] = root
    return replace(plan, growing=found)


def _is_whole(value: str, plan: Plan) -> bool:
    """Return whether a view of a tensor of the caller is all of it. Axes of one element may have any stride."""
    location, shape = plan.location(value), plan.graph.types[value].shape
    if location.start != 0 or shape != plan.graph.types[location.root].shape or len(location.strides) != len(shape):
        return False
    pairs = zip(shape, location.strides, caller_strides(location.root, shape), strict=True)
    return all(size == 1 or found == given for size, found, given in pairs)


def _appends_tokens(op: Op, readers: Sequence[Op], graph: Graph) -> bool:
    """Return whether an operator appends new tokens to others, and attention alone reads them, as keys or values."""
    joins = op_def(op) is CAT and len(op.inputs) == 2 and op.attrs["axis"] == TOKENS
    if not joins or not readers or len(graph.types[op.output].shape) != AXES:
        return False
    return all(is_attention_over(reader, op.output) for reader in readers)


def _has_memory_of_its_own(op: Op, plan: Plan) -> bool:
    """Return whether the result has a buffer that no other value uses, and the new tokens are not written there."""
    buffer = plan.buffers.get(op.output)
    others = [one for one in plan.buffers.values() if one.alias == op.output]
    viewed = any(view.root == op.output for view in plan.views.values())
    return buffer is not None and buffer.alias is None and not (any(buffer.halo) or others or viewed)
