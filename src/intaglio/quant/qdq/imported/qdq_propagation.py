"""Propagation of quantize and dequantize past data movement, so that it moves quantized values."""

from __future__ import annotations

from torch import fx

from intaglio.fxgraph.node_info import adopt_origin, inherit_info, known_type
from intaglio.fxgraph.nodes import activations, call_before, call_of, is_constant, known_record, record_of
from intaglio.ir import DType, TensorType
from intaglio.quant.qdq.qdq_normalize import (
    dequantized_u8_qparams,
    is_u8_quantize,
    qdq_overload,
    round_trip,
    u8_arguments,
    u8_qparams,
)


def propagate_qdq(module: fx.GraphModule) -> int:
    """Propagate quantize and dequantize past operators that only select values, and return the number of nodes added.

    A dequantize in front of such an operator is repeated behind it for the layers that read the result; a quantize
    behind it moves in front. Quantization is monotonic, so the results do not change.
    """
    before = len(module.graph.nodes)
    for node in list(module.graph.nodes):
        if _selects(node) and not known_record(node).clamps:
            _propagate_dequantize(node)
    pending = [node for node in module.graph.nodes if is_u8_quantize(node)]
    while pending:
        pending += _propagate_quantize(pending.pop())
    return len(module.graph.nodes) - before


def _selects(node: fx.Node) -> bool:
    record = record_of(node)
    if record is None or not record.shares_qparams or known_type(node).dtype is not DType.F32:
        return False
    values = activations(node)
    return all(v is not None and not is_constant(v) for v in values) and record.check(call_of(node, record)) is None


def _propagate_dequantize(node: fx.Node) -> None:
    """Repeat the dequantize in front of an operator behind it, for the readers that take quantized operands."""
    found = {dequantized_u8_qparams(value) for value in activations(node)}
    q = found.pop()
    if found or q is None:
        return
    readers = [user for user in node.users if _takes_quantized(user)]
    if not readers:
        return
    with node.graph.inserting_after(node):
        quantized = node.graph.call_function(qdq_overload("quantize_per_tensor"), (node, *u8_arguments(q)))
    inherit_info(quantized, node, type=TensorType(known_type(node).shape, DType.U8, q))
    for user in readers:
        real = call_before(user, known_type(node), qdq_overload("dequantize_per_tensor"), quantized, *u8_arguments(q))
        adopt_origin(real, user)
        user.replace_input_with(node, real)


def _takes_quantized(user: fx.Node) -> bool:
    record = record_of(user)
    return record is not None and (record.anchor or record.shares_qparams or record.adds)


def _propagate_quantize(node: fx.Node) -> list[fx.Node]:
    """Move a quantize in front of the operator it follows, and return the quantizes inserted."""
    select, q = node.args[0], u8_qparams(node)
    if not _selects(select) or list(select.users) != [node]:
        return []
    values = dict.fromkeys(activations(select))
    if known_record(select).clamps and not all(dequantized_u8_qparams(v) or _selects(v) for v in values):
        return []  # kernels apply such a clamp only to accumulators
    assert q is not None, f"{node} was not paired"
    made = []
    for value in values:
        if (known := dequantized_u8_qparams(value)) is not None and (known.step, known.zero) == (q.step, q.zero):
            continue
        real = round_trip(select, value, q)
        made.append(real.args[0])
        select.replace_input_with(value, real)
    return made
