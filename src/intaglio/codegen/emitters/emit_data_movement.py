"""Steps that only move levels: strided copies, and reshapes that follow logical order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from intaglio.codegen.context import Context, finish
from intaglio.codegen.writer import Code
from intaglio.ir import Dim
from intaglio.ops import op_def
from intaglio.ops.movement.data_movement import Box, Run
from intaglio.ops.movement.pixel_shuffle import SHUFFLE
from intaglio.plan.plan_records import Partition

RUNS = 8
"""Runs of one strided copy in native/elementwise/data_movement.h."""
AXES = 7
"""Axes of one side of a reshape there, bytes of an element among them."""
SHORT = 8
"""An innermost run shorter than this changes places with a longer one around it."""


def emit_move(code: Code, partition: Partition, context: Context) -> None:
    """One strided copy a box."""
    op, buffers, kind = partition.anchor, context.plan.buffers, context.graph.types[partition.output]
    halves = op_def(op) is SHUFFLE and op.attrs["groups"] == 2
    if halves and all(name in buffers and buffers[name].spatial for name in (*op.inputs, op.output)):
        context.include("images/shuffle.h")
        code(f"const struct Image in = {context.image(op.inputs[0])}, out = {context.image(op.output)};")
        code("interleave_levels(&in, &out, thread, threads);")
        finish(code, context, op.output, context.limits(op))
        return
    context.include("elementwise/data_movement.h")
    to, apart = context.strided(op.output)
    ends = [context.strided(name) for name in op.inputs]
    shapes = [context.graph.types[name].shape for name in op.inputs]
    code(f"uint8_t* const out = {to};")
    for index, (start, _) in enumerate(ends):
        code(f"const uint8_t* const in{index} = {start};")
    sides = [(shape, steps) for shape, (_, steps) in zip(shapes, ends, strict=True)]
    zero = context.constant(
        np.full(kind.dtype.bytes, 0 if kind.q is None else kind.q.zero, np.uint8), "uint8_t", "fill"
    )
    for box in op_def(op).strided_copies(op, sides, apart, kind.dtype.bytes):
        part = buffers.get(op.inputs[box.operand])
        if part is not None and part.part is not None:
            continue
        source = zero if box.fill else f"in{box.operand} + {context.dim(box.source)}"
        runs = _ordered(box)
        with code.block(""):
            code(f"struct Copy c = {{{source}, out + {context.dim(box.result)}, {_table(runs, context)}}};")
            code("copy_levels(&c, thread, threads);")
    if kind.q is not None:
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
    op, types = partition.anchor, context.graph.types
    if types[op.inputs[0]].shape == types[op.output].shape:
        emit_move(code, partition, context)
        return
    context.include("elementwise/data_movement.h")
    for name, value in (("in", op.inputs[0]), ("out", op.output)):
        (start, steps), kind = context.strided(value), types[value]
        size = kind.dtype.bytes
        bytes_too = ((*kind.shape, size), (*(step * size for step in steps), 1)) if size > 1 else (kind.shape, steps)
        missing = AXES - len(bytes_too[0])
        sizes = _braced([1] * missing + list(bytes_too[0]), context)
        apart = _braced([0] * missing + list(bytes_too[1]), context)
        code(f"const struct Side {name} = {{{start}, {sizes}, {apart}}};")
    code("reshape_levels(&in, &out, thread, threads);")
    if types[op.output].q is not None:
        finish(code, context, op.output, context.limits(op))
