"""Propagation of quantize and dequantize past data movement, so that it moves quantized values."""

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
    """Propagate quantize and dequantize past operators that only select values, and return the number of nodes added.

    A dequantize in front of such an operator is repeated behind it for the layers that read the result; a quantize
    behind it moves in front. Quantization is monotonic, so the results do not change.
    """
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
    """Repeat the dequantize in front of an operator behind it, for the readers that take quantized operands."""
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
    """Move a quantize in front of the operator it follows, and return the quantizes inserted."""
    select, q = node.args[0], levels_of(node)
    if not _selects(select) or list(select.users) != [node]:
        return []
    values = dict.fromkeys(activations(select))
    if known_record(select).clamps and not all(levels_behind(v) or _selects(v) for v in values):
        return []  # kernels apply such a clamp only to accumulators
    assert q is not None, f"{node} was not paired"
    made = []
    for value in values:
        if (known := levels_behind(value)) is not None and (known.step, known.zero) == (q.step, q.zero):
            continue
        real = round_trip(select, value, q)
        made.append(real.args[0])
        select.replace_input_with(value, real)
    return made
