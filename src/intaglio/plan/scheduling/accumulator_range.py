"""Proof that requantized accumulators fit into int32; where it fails, a guard clamps them first."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from intaglio import numerics
from intaglio.ir import Graph
from intaglio.ops import op_def
from intaglio.ops.opdef import Tail
from intaglio.plan.execution_plan import Plan
from intaglio.plan.plan_records import Choice, Partition
from intaglio.plan.scheduling.convolution_pieces import weight_shape

QUANTIZING_TAILS = (Tail.REQUANTIZE, Tail.ADD)
"""Tails that convert accumulators in the microkernel; the others read them as floats."""


def mark_guarded_partitions(plan: Plan) -> Plan:
    """Mark the partitions whose requantized accumulators may exceed the range in which float32 converts to int32."""
    products = [partition for partition in plan.partitions if op_def(partition.anchor).multiplies_weight]
    guarded = frozenset(partition.output for partition in products if needs_guard(partition, plan.graph))
    reason = "their bound times the largest factor may exceed the int32 range"
    return replace(plan, guarded=guarded).with_reasons(Choice.GUARD, dict.fromkeys(guarded, reason))


def needs_guard(partition: Partition, graph: Graph) -> bool:
    """Return whether ``|acc * factor|`` may exceed the range in which float32 converts to int32."""
    anchor, tail = partition.anchor, partition.tail[0]
    if op_def(tail).tail not in QUANTIZING_TAILS:
        return False
    weight, bias = anchor.inputs[1], graph.constants[anchor.inputs[2]]
    x = graph.types[anchor.inputs[0]].qparams
    factors = [np.abs(graph.constants[name].astype(np.float64)) for name in tail.inputs if name in graph.constants]
    max_quantized = 255 * (numerics.QUANT_STEPS + 1 if tail.inputs[4:] else 1)
    other = max_quantized * factors[1].max(initial=0) if len(factors) > 1 else 0
    most = np.abs(bias.astype(np.int64)).max(initial=0) + prod(weight_shape(anchor, graph)[1:]) * 128 * 2 * 255
    if most * factors[0].max(initial=0) + other < numerics.CONVERTIBLE / 2:  # true for any weights: do not read them
        return False
    groups = anchor.attrs.get("groups", 1)
    bound = numerics.accumulator_bound(graph.constants[weight], bias, x.qmin, x.qmax, x.zeros, groups)
    total = bound * factors[0] + (max_quantized * factors[1] if len(factors) > 1 else 0)
    return bool(total.max(initial=0) >= numerics.CONVERTIBLE / 2)
