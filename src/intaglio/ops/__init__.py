"""The vocabulary: one record per operator, the interpreter. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from intaglio.ops import (
    channels,
    dynamic_quant,
    embedding,
    fused_activations,
    norm,
    pointwise,
    pool,
    resize,
    shape,
    unary,
)
from intaglio.ops.interpret import interpret, run_op
from intaglio.ops.loop_ops import loop
from intaglio.ops.opdef import Call, OpDef, Roles
from intaglio.ops.operator_groups import ACCUMULATING, ANCHORS, NUMBERS, SUMS
from intaglio.ops.products import attention, conv, linear_f32, lstm_gru


def index(*groups: Iterable[OpDef]) -> tuple[Mapping[str, OpDef], Mapping[str, OpDef]]:
    """Records by name and by ATen overload; two records that claim one name are an error, unless the first says when
    the second answers `instead`."""
    by_name: dict[str, OpDef] = {}
    by_target: dict[str, OpDef] = {}
    for record in (record for group in groups for record in group):
        for key, table in [(record.name, by_name), *((target, by_target) for target in record.targets)]:
            if key in table and record in table[key].instead.values():
                continue
            if key in table:
                raise ValueError(f"{key} is claimed by {table[key].name} and {record.name}")
            table[key] = record
    return MappingProxyType(by_name), MappingProxyType(by_target)


OPS, BY_TARGET = index(
    conv.OPS,
    pointwise.OPS,
    channels.OPS,
    pool.OPS,
    norm.OPS,
    resize.OPS,
    shape.OPS,
    unary.OPS,
    fused_activations.OPS,
    loop.OPS,
    attention.OPS,
    dynamic_quant.OPS,
    lstm_gru.OPS,
    embedding.OPS,
    linear_f32.OPS,
)

__all__ = [
    "ACCUMULATING",
    "ANCHORS",
    "BY_TARGET",
    "NUMBERS",
    "OPS",
    "SUMS",
    "Call",
    "OpDef",
    "Roles",
    "index",
    "interpret",
    "run_op",
]
