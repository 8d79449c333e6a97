"""Steps that only move levels: strided copies, and reshapes that follow logical order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from intaglio.codegen.context import Context, finish
from intaglio.codegen.writer import Code
from intaglio.ir import Dim, Partition
from intaglio.ir.moves import Box, Run, boxes, strides

RUNS = 8
"""Runs of one strided copy in native/program.h."""
AXES = 6
"""Axes of one side of a reshape there."""
SHORT = 8
"""An innermost run shorter than this changes places with a longer one around it."""


def emit_move(code: Code, partition: Partition, context: Context) -> None:
    """One strided copy a box."""
    op, buffers = partition.anchor, context.plan.buffers
    code(f"const struct Image out = {context.image(op.output)};")
    for index, name in enumerate(op.inputs):
        code(f"const struct Image in{index} = {context.image(name)};")
    zero_point = context.graph.types[op.output].levels.zero
    level = context.constant(np.array([zero_point], np.uint8), "uint8_t")
    halves = op.kind == "shuffle" and op.attrs["groups"] == 2
    if halves and all(buffers[name].spatial for name in (*op.inputs, op.output)):
        code("interleave_levels(&in0, &out, thread, threads);")
        finish(code, context, op.output, context.limits(op))
        return
    for box in boxes(op, [buffers[name] for name in op.inputs], buffers[op.output]):
        if buffers[op.inputs[box.operand]].part is not None:
            continue
        source = level if box.fill else f"in{box.operand}.base + {context.dim(box.source)}"
        runs = _ordered(box)
        with code.block(""):
            code(f"struct Copy c = {{{source}, out.base + {context.dim(box.result)}, {_table(runs, context)}}};")
            code("copy_levels(&c, thread, threads);")
    finish(code, context, op.output, context.limits(op))


def _ordered(box: Box) -> list[Run]:
    """Innermost last, and not a short one where another is long; the source of a fill stands still."""
    runs = [Run(run.size, 0, run.result) if box.fill else run for run in box.runs]
    if len(runs) > 1 and _is_short(runs[-1]) and not _is_short(runs[-2]):
        runs[-2:] = runs[:-3:-1]
    return runs


def _is_short(run: Run) -> bool:
    return isinstance(run.size, int) and run.size < SHORT


def _table(runs: Sequence[Run], context: Context) -> str:
    """Sizes, source strides and result strides, runs of one element in front."""
    whole = [Run(1, 0, 0)] * (RUNS - len(runs)) + list(runs)
    columns = ([run.size for run in whole], [run.source for run in whole], [run.result for run in whole])
    return ", ".join(_braced(column, context) for column in columns)


def _braced(values: Sequence[Dim], context: Context) -> str:
    return "{" + ", ".join(map(context.dim, values)) + "}"


def emit_reshape(code: Code, partition: Partition, context: Context) -> None:
    """Logical order is the same on both sides; each lies in its own. A change of layout alone is a strided copy."""
    op, buffers = partition.anchor, context.plan.buffers
    ends = buffers[op.inputs[0]], buffers[op.output]
    if ends[0].shape == ends[1].shape:
        emit_move(code, partition, context)
        return
    for name, buffer in zip(("in", "out"), ends, strict=True):
        missing = AXES - len(buffer.shape)
        sizes = _braced([1] * missing + list(buffer.shape), context)
        steps = _braced([0] * missing + list(strides(buffer)), context)
        code(f"const struct Side {name} = {{{context.image(buffer.value)}.base, {sizes}, {steps}}};")
    code("reshape_levels(&in, &out, thread, threads);")
    finish(code, context, op.output, context.limits(op))
