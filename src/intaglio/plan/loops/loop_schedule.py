"""Loop scheduling: rows, passes along them, values kept between passes, results written past the caches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np

from intaglio import numerics
from intaglio.ir import DType, Graph, Op, numel
from intaglio.ops import op_def
from intaglio.ops.loop_ops.loop_space import body_of, row_axis, space
from intaglio.ops.loop_ops.primitives import PRIMITIVES, primitive
from intaglio.plan.execution_plan import Plan
from intaglio.plan.loops.loop_access import loop_operands, loop_rows
from intaglio.plan.loops.loop_records import EpilogueTile, LoopSchedule, LoopVariant
from intaglio.plan.loops.loop_stages import LoopStage, RowValues, magnitudes
from intaglio.plan.plan_records import Choice

MAX_KEPT_ELEMENTS = 4096
"""Longest row, in elements, for which values are kept between passes."""
KEPT_BYTES = 1 << 18
"""Bytes of the stack for the kept values of a row."""
MAX_CONVERTIBLE_STEPS = 1 << 29
"""Bound in quantization steps; values proved to be below it convert to int32 without clamping."""
STREAMED_BYTES = 1 << 24
"""Float results of at least this size are written past the caches."""


def schedule_loops(plan: Plan) -> Plan:
    """Schedule every loop, including epilogues, by its first result."""
    found = {op.outputs[0]: schedule_loop(op, plan, tile) for op, tile in _loops(plan)}
    return replace(plan, loops=found).with_reasons(Choice.LOOP, {name: _reason(loop) for name, loop in found.items()})


def _reason(loop: LoopSchedule) -> str:
    """Return the reason for the rows and for the number of passes."""
    if loop.tile is not None:
        return f"a row has the channels of one pixel and runs while a tile of %{loop.tile.value} is in cache"
    if loop.axis is None:
        return f"single elements, in the memory order of %{loop.op.outputs[0]}"
    if any(primitive(op).reduces for op in loop.body.ops):
        return "rows are along the axis of the reductions, and each reduction ends a pass"
    return "a row is a row of the table"


def _loops(plan: Plan) -> Iterator[tuple[Op, EpilogueTile | None]]:
    """Yield every loop, with the tile that it reads if it is an epilogue."""
    for partition in plan.partitions:
        if partition.anchor.is_loop:
            yield partition.anchor, None
        elif partition.epilogue is not None:
            made = partition.ops[-2].output
            channels = 1 if op_def(partition.anchor).convolves else len(plan.graph.types[made].shape) - 1
            yield partition.epilogue, EpilogueTile(made, channels)


def schedule_loop(op: Op, plan: Plan, tile: EpilogueTile | None = None) -> LoopSchedule:
    """Return the schedule of a loop, or of an epilogue that reads a tile."""
    body, operands = body_of(op), loop_operands(op, plan, tile)
    rows = loop_rows(body, operands, tile)
    single = {name for name, steps in rows.strides.items() if steps[-1] == 0 and name not in body.outputs}
    values = RowValues(body, single | set(body.constants))
    found = LoopSchedule(
        op, operands, rows, row_axis(body), tile, frozenset(values.row), values.producers, values.value_with_axis,
        nonpositive=frozenset(name for name in values.producers if _is_nonpositive(name, values.producers)),
        convertible=_convertible(body),
    )  # fmt: skip
    streamed = frozenset(name for name in body.outputs if _is_streamed(name, found))
    variants = tuple(
        replace(variant, stages=tuple(_arranged(stage, found) for stage in variant.stages))
        for variant in _variants(found, values)
    )
    return replace(found, variants=variants, streamed=streamed)


def _variants(loop: LoopSchedule, values: RowValues) -> tuple[LoopVariant, ...]:
    """Return the passes; values are kept between passes if a row is short enough for the first-level cache."""
    if loop.tile is not None:
        return (LoopVariant(values.stages(dict.fromkeys(loop.body.outputs, True), keep=False)),)
    outputs, size = {name: loop.along(name) for name in loop.body.outputs}, loop.rows.size
    keeping_variant = LoopVariant(values.stages(outputs, keep=True))
    if not keeping_variant.kept:
        return (keeping_variant,)
    plain = LoopVariant(values.stages(outputs, keep=False))
    longest = min(MAX_KEPT_ELEMENTS, KEPT_BYTES // (4 * len(keeping_variant.kept)))
    if isinstance(size, int):
        return (replace(keeping_variant, longest=size) if size <= longest else plain,)
    return replace(keeping_variant, longest=longest), plain


def _arranged(stage: LoopStage, loop: LoopSchedule) -> LoopStage:
    """Find results that are written as they are computed, and whether vectors may process elements in any order."""
    read = {name for op in stage.ops for name in op.inputs} | {
        loop.value_with_axis.get(name, "") for name in stage.stored
    }
    direct = {op.output for op in stage.ops if primitive(op).quantizes and op.output in stage.stored} - read
    return replace(stage, direct=frozenset(direct), any_order=_takes_any_order(stage, loop, direct))


def _takes_any_order(stage: LoopStage, loop: LoopSchedule, direct_results: Collection[str]) -> bool:
    """Return whether a pass only reads and writes contiguous quantized values."""
    read = {name for op in stage.ops if primitive(op).dequantizes for name in op.inputs}
    other = {name for op in stage.ops if not primitive(op).dequantizes for name in op.inputs}
    operands = {*stage.loads, *stage.stored}
    return (
        not (stage.reductions or stage.kept or stage.restored)
        and {*stage.loads} == read - other
        and {*stage.stored} == {*direct_results}
        and all(loop.operands[name].dtype is DType.U8 and loop.rows.strides[name][-1] == 1 for name in operands)
    )


def _is_streamed(output: str, loop: LoopSchedule) -> bool:
    """Return whether a result may exceed the caches: contiguous floats that are not read from a tile."""
    if loop.tile is not None or loop.operands[output].dtype is not DType.F32 or loop.rows.strides[output][-1] != 1:
        return False
    elements = numel(space(loop.body))
    return loop.along(output) and not (isinstance(elements, int) and 4 * elements < STREAMED_BYTES)


def _is_nonpositive(name: str, producers: Mapping[str, Op]) -> bool:
    """Return whether a value is an element less the largest of its row, and thus at most 0."""
    step = producers[name]
    if not primitive(step).subtracts or step.inputs[1] not in producers:
        return False
    most = producers[step.inputs[1]]
    return primitive(most) is PRIMITIVES["max"] and most.inputs[0] == step.inputs[0]


def _convertible(body: Graph) -> frozenset[str]:
    """Return results of a quantize whose operand is proved to be below `MAX_CONVERTIBLE_STEPS` quantization steps."""
    sizes = magnitudes(body)

    def steps(op: Op) -> float:
        return float(sizes.get(op.inputs[0], np.inf) * numerics.reciprocal(body.types[op.output].qparams.step))

    return frozenset(op.output for op in body.ops if primitive(op).quantizes and steps(op) < MAX_CONVERTIBLE_STEPS)
