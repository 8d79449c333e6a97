"""Quantize and dequantize that others wrote, moved past operators that select values, so that levels are selected."""

from __future__ import annotations

from torch import fx

from intaglio.fxgraph.node_info import adopt_origin, inherit_info, known_type
from intaglio.fxgraph.nodes import activations, call_before, call_of, is_constant, known_record, record_of
from intaglio.ir import DType, TensorType
from intaglio.quant.qdq.qdq_normalize import (
    levels_behind,
    levels_of,
    numbers_of,
    quantizes_to_bytes,
    round_trip,
    target,
)


def carry_levels(module: fx.GraphModule) -> int:
    """Operators that select values select levels: what is quantized behind one is quantized in front of it, and what
    was dequantized in front is quantized behind it for layers that read it. Quantizing keeps the order of values, so
    both ways give the same."""
    before = len(module.graph.nodes)
    for node in list(module.graph.nodes):
        if _selects(node) and not known_record(node).clamps:
            _carry_down(node)
    pending = [node for node in module.graph.nodes if quantizes_to_bytes(node)]
    while pending:
        pending += _carry_up(pending.pop())
    return len(module.graph.nodes) - before


def _selects(node: fx.Node) -> bool:
    record = record_of(node)
    if record is None or not record.shares or known_type(node).dtype is not DType.F32:
        return False
    values = activations(node)
    return all(v is not None and not is_constant(v) for v in values) and record.check(call_of(node, record)) is None


def _carry_down(node: fx.Node) -> None:
    found = {levels_behind(value) for value in activations(node)}
    q = found.pop()
    if found or q is None:
        return
    readers = [user for user in node.users if _takes_levels(user)]
    if not readers:
        return
    with node.graph.inserting_after(node):
        levels = node.graph.call_function(target("quantize_per_tensor"), (node, *numbers_of(q)))
    inherit_info(levels, node, type=TensorType(known_type(node).shape, DType.U8, q))
    for user in readers:
        real = call_before(user, known_type(node), target("dequantize_per_tensor"), levels, *numbers_of(q))
        adopt_origin(real, user)
        user.replace_input_with(node, real)


def _takes_levels(user: fx.Node) -> bool:
    record = record_of(user)
    return record is not None and (record.anchor or record.shares or record.adds)


def _carry_up(node: fx.Node) -> list[fx.Node]:
    """Quantizes put in front of the operator that one stands behind."""
    select, q = node.args[0], levels_of(node)
    if not _selects(select) or list(select.users) != [node]:
        return []
    values = dict.fromkeys(activations(select))
    if known_record(select).clamps and not all(levels_behind(v) or _selects(v) for v in values):
        return []  # kernels clamp what they accumulate
    assert q is not None, f"{node} was not paired"
    made = []
    for value in values:
        if (known := levels_behind(value)) is not None and (known.step, known.zero) == (q.step, q.zero):
            continue
        real = round_trip(select, value, q)
        made.append(real.args[0])
        select.replace_input_with(value, real)
    return made
