"""Keys and values of grouped-query attention, which a model repeats for every head of queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from intaglio.ir import Graph, Op
from intaglio.ops import op_def
from intaglio.ops.movement.shape import EXPAND, RESHAPE
from intaglio.ops.products.attention import ATTENTION


def share_heads(graph: Graph) -> tuple[Graph, int]:
    """Let attention read keys and values before they are repeated for several heads of queries.

    The kernel packs each head once and multiplies it by all its heads of queries, so that the copy is not needed.
    """
    makers, ops, count = graph.makers(), list[Op](), 0
    for op in graph.ops:
        if op_def(op) is ATTENTION:
            keys, values = (_before_repetition(name, makers, graph) for name in op.inputs[1:3])
            if keys and values and graph.types[keys].shape[1] == graph.types[values].shape[1]:
                op, count = replace(op, inputs=(op.inputs[0], keys, values, *op.inputs[3:])), count + 1
        ops.append(op)
    return graph.replace(ops=tuple(ops)), count


def _before_repetition(value: str, makers: Mapping[str, Op], graph: Graph) -> str | None:
    """Return [batch, groups, rows, width] from which [batch, groups * times, rows, width] was made by repeating each
    group, or ``None`` if the value was made otherwise."""
    merged = makers.get(value)
    repeated = makers.get(merged.inputs[0]) if merged is not None and op_def(merged) is RESHAPE else None
    split = makers.get(repeated.inputs[0]) if repeated is not None and op_def(repeated) is EXPAND else None
    if split is None or repeated is None or op_def(split) is not RESHAPE:
        return None
    source, result = (graph.types[name].shape for name in (split.inputs[0], value))
    batch, groups, *rest = source
    times = graph.types[repeated.output].shape[2:3]
    wanted = (batch, groups, 1, *rest), (batch, groups, *times, *rest)
    found = graph.types[split.output].shape, graph.types[repeated.output].shape
    if len(source) != 4 or found != wanted or result[:1] + result[2:] != (batch, *rest):
        return None
    return split.inputs[0]
