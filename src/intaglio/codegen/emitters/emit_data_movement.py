"""Print data movement: strided copies, channel interleaving, and reshapes in logical order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from intaglio.codegen.context import Context, fill_result_halo
from intaglio.codegen.writer import Code
from intaglio.ir import Dim, Op
from intaglio.ops.movement.data_movement import Box, Run
from intaglio.plan.kernel_records import MAX_RUNS, Movement, MovementKernel
from intaglio.plan.plan_records import Partition

AXES = 7
"""Number of axes of a `struct Side` in native/elementwise/data_movement.h."""


def emit_movement(code: Code, partition: Partition, context: Context) -> None:
    """Print the data movement that the plan chose, and fill the halo of the result."""
    kernel = context.kernel(partition, MovementKernel)
    MOVEMENTS[kernel.movement](code, partition.anchor, kernel, context)
    if context.graph.types[partition.output].q is not None:
        fill_result_halo(code, context, partition.output, context.limits(partition.anchor))


def _interleave(code: Code, op: Op, kernel: MovementKernel, context: Context) -> None:
    context.include("images/shuffle.h")
    code(f"const struct Image in = {context.image(op.inputs[0])}, out = {context.image(op.output)};")
    code("interleave_channel_groups(&in, &out, thread, threads);")


def _copy(code: Code, op: Op, kernel: MovementKernel, context: Context) -> None:
    context.include("elementwise/data_movement.h")
    to, kind = context.strided(op.output)[0], context.graph.types[op.output]
    starts = [context.strided(name)[0] for name in op.inputs]
    code(f"uint8_t* const out = {to};")
    for index, start in enumerate(starts):
        code(f"const uint8_t* const in{index} = {start};")
    zero = context.constant(
        np.full(kind.dtype.bytes, 0 if kind.q is None else kind.q.zero & 0xFF, np.uint8), "uint8_t", "fill"
    )
    if op.output in context.plan.growing:
        with code.block(f"if ({context.grows(op.output)})"):
            begin = context.strided(op.inputs[0])[0]
            _copy_boxes(code, kernel.growing, zero, f"(uint8_t*){begin}", context)
            code("return;")
    _copy_boxes(code, kernel.boxes, zero, "out", context)


def _copy_boxes(code: Code, boxes: Sequence[Box], zero: str, out: str, context: Context) -> None:
    """Print strided copies to memory that begins at the pointer ``out``."""
    for box in boxes:
        source = zero if box.fill else f"in{box.operand} + {context.dim(box.source)}"
        with code.block(""):
            tables = _table(box.runs, context)
            code(f"struct Copy c = {{{source}, {out} + {context.dim(box.result)}, {box.element}, {tables}}};")
            code("copy_strided(&c, thread, threads);")


def _table(runs: Sequence[Run], context: Context) -> str:
    """Return sizes, source strides and result strides of a copy, padded with leading runs of one element."""
    padded = [Run(1, 0, 0)] * (MAX_RUNS - len(runs)) + list(runs)
    columns = ([run.size for run in padded], [run.source for run in padded], [run.result for run in padded])
    return ", ".join(_braced(column, context) for column in columns)


def _braced(values: Sequence[Dim], context: Context) -> str:
    return "{" + ", ".join(map(context.dim, values)) + "}"


def _reshape(code: Code, op: Op, kernel: MovementKernel, context: Context) -> None:
    """Print a reshape, which copies in logical order between two sets of strides."""
    context.include("elementwise/data_movement.h")
    element = context.graph.types[op.output].dtype.bytes
    for name, value in (("in", op.inputs[0]), ("out", op.output)):
        (start, steps), shape = context.strided(value), context.graph.types[value].shape
        missing = AXES - len(shape)
        sizes = _braced([1] * missing + list(shape), context)
        strides = _braced([0] * missing + [step * element for step in steps], context)
        cast = "(uint8_t*)" if context.plan.location(value).root in context.graph.constants else ""  # it is only read
        code(f"const struct Side {name} = {{{cast}{start}, {sizes}, {strides}}};")
    code(f"copy_in_logical_order(&in, &out, {element}, thread, threads);")


MOVEMENTS: Mapping[Movement, Callable[[Code, Op, MovementKernel, Context], None]] = {
    Movement.INTERLEAVE: _interleave,
    Movement.COPY: _copy,
    Movement.RESHAPE: _reshape,
}
