"""C variables and expressions of a loop: names of its values, pointers to its operands and results, and operators."""

from __future__ import annotations

import numpy as np

from intaglio import numerics
from intaglio.codegen.context import Context
from intaglio.ir import DType, Graph, Op, QParams
from intaglio.ops.loop_ops.primitives import primitive
from intaglio.plan.loops.loop_access import operand_strides
from intaglio.plan.loops.loop_records import LoopOperand, LoopSchedule

LEAST_ACROSS = 8
"""Smallest size of an axis that vectors run along instead of the rows of a reduction."""


class Loop:
    """A loop that is being printed.

    Attributes:
        schedule: Schedule of the loop.
        names: C variables by value.
        pointers: C pointers to operands and results by value.
        clip_counts: Index of the count of clipped elements, by quantized result.
        across: Axis around the rows that vectors run along, or ``None`` if they run along the rows.
    """

    def __init__(self, schedule: LoopSchedule, context: Context) -> None:
        self.schedule, self.context, self.body = schedule, context, schedule.body
        op, tile = schedule.op, schedule.tile
        self.pointers = {name: self._operand(name) for name in op.inputs if tile is None or name != tile.value}
        self.pointers |= {name: context.strided(name)[0] for name in op.outputs}
        self.names = _c_names(self.body)
        self.clip_counts: dict[str, int] = {}
        self.across = axis_across_rows(schedule)

    def count_clipped(self) -> None:
        """Count the clipped elements of the loop's quantized results.

        A loop that reads quantized values only is left out: its results saturate like those of integer operators.
        """
        operands, constants = self.schedule.operands.values(), self.context.graph.constants
        read = [one for one in operands if not self.is_result(one) and one.value not in constants]
        if all(one.dtype is DType.U8 for one in read):
            return
        for name, value in zip(self.body.outputs, self.schedule.op.outputs, strict=True):
            if (op := self.quantize_of(name)) is not None:
                self.clip_counts[name] = self.context.clip_count(op.inputs[0], value)

    def quantize_of(self, result: str) -> Op | None:
        """Return the quantize operator that makes a result, or ``None`` if another operator does."""
        op = self.schedule.producers.get(self.schedule.equal_value(result))
        return op if op is not None and primitive(op).quantizes else None

    def _operand(self, value: str) -> str:
        if value not in self.context.graph.constants:
            return self.context.strided(value)[0]
        return f"({self.context.stored_constant(value, 'values')})"

    def graph_value(self, name: str) -> str:
        """Return the value of the graph that the loop's input `name` refers to."""
        return self.schedule.op.inputs[self.body.inputs.index(name)]

    def row_stride(self, name: str) -> str:
        """Return the stride between the rows of an embedding table, in elements."""
        return self.context.dim(operand_strides(self.graph_value(name), self.context.plan)[0])

    def is_result(self, operand: LoopOperand) -> bool:
        """Return whether an operand is a result of the loop."""
        return operand.name in self.body.outputs

    def is_tile(self, operand: LoopOperand) -> bool:
        """Return whether an operand is the accumulator tile that an epilogue reads."""
        return operand.name == self.schedule.tile_name


def axis_across_rows(schedule: LoopSchedule) -> int | None:
    """Return the axis around the rows of a reduction that vectors run along, ``None`` if they run along the rows.

    A reduction over the columns of an image whose channels are adjacent reads each vector of a row from as many cache
    lines as it has elements. Vectors of neighbouring channels are adjacent, and so are those of the results.
    """
    stages, rows = [stage for one in schedule.variants for stage in one.stages if not stage.empty], schedule.rows
    if len(schedule.variants) != 1 or len(stages) != 1 or schedule.tile is not None:
        return None
    stage = stages[0]
    if not stage.reductions or stage.any_order or stage.kept or stage.restored or schedule.tables or schedule.streamed:
        return None
    along = [steps for steps in rows.strides.values() if steps[-1] != 0]
    for axis, size in enumerate(rows.outer):
        if not isinstance(size, int) or size < LEAST_ACROSS:
            continue
        if all(steps[-1] != 1 and steps[axis] == 1 for steps in along):
            return axis
    return None


def _c_names(body: Graph) -> dict[str, str]:
    """Return the C variable of each value: its name after `v_`, or `v` and a number if the name is not ASCII."""
    return {name: f"v_{name}" if name.isascii() else f"v{index}" for index, name in enumerate(body.types)}


def operand_of(name: str, loop: Loop) -> str:
    """Return the C variable of a value, its i-th vector if it varies along the row, or a constant in every lane."""
    array = loop.body.constants.get(name)
    if array is not None:
        is_integer = loop.body.types[name].dtype is DType.I64
        return f"all_{'integers' if is_integer else 'lanes'}({number(array)})"
    return loop.names[name] if name in loop.schedule.row_values else f"{loop.names[name]}[i]"


def value_of(op: Op, loop: Loop) -> str:
    """Return the C expression of an operator on the variables of its operands."""
    types, constants = loop.body.types, loop.body.constants
    given, result = [operand_of(name, loop) for name in op.inputs], types[op.output]
    row = primitive(op)
    if row.dequantizes:
        q = types[op.inputs[0]].qparams
        return f"dequantize_lanes({given[0]}, {zero_point(q)}, {number(q.step)})"
    if row.quantizes:
        q = result.qparams
        bounds = f"{number(q.qmin - q.zero)}, {number(q.qmax - q.zero)}"
        return f"quantize_lanes({given[0]}, {number(numerics.reciprocal(q.step))}, {zero_point(q)}, {bounds})"
    if not row.c:
        return _cast(given[0], types[op.inputs[0]].dtype, result.dtype)
    if row.takes_number and op.inputs[1] in constants and op.inputs[0] not in constants:
        given[1] = number(constants[op.inputs[1]])
    integers = types[op.inputs[-1]].dtype is DType.I64
    text = row.c_of_integers if integers and row.c_of_integers else row.c
    found = text.format(*given, **{name: number(op.attrs[name]) for name in row.attrs})
    compares_integers = result.dtype is DType.BOOL and integers
    return f"__builtin_convertvector({found}, RealBits)" if compares_integers else found


def _cast(value: str, source: DType, result: DType) -> str:
    if result is DType.I64:
        truth = f"-__builtin_convertvector({value}, Longs)"
        return {DType.I64: value, DType.BOOL: truth}.get(source, f"whole_numbers({value})")
    if result is DType.BOOL:
        nonzero = f"{value} != 0"
        if source is DType.I64:
            return f"__builtin_convertvector({nonzero}, RealBits)"
        return value if source is DType.BOOL else nonzero
    real = {DType.I64: f"__builtin_convertvector({value}, Reals)", DType.BOOL: f"ones({value})"}.get(source, value)
    return f"to_bfloat16({real})" if result is DType.BF16 and source is not DType.BF16 else real


def zero_point(q: QParams) -> str:
    """Return a zero point as a C literal that is told from sizes by its type."""
    return f"(int32_t){q.zero}"


def number(value: float | np.ndarray) -> str:
    """Return a number as an exact C literal: an int64 array as an integer, any other number as a float32."""
    if isinstance(value, np.ndarray) and value.dtype == np.int64:
        return f"(int64_t){int(value) & (2**64 - 1):#x}u"
    single = float(np.float32(value))
    if np.isnan(single):
        return '__builtin_nanf("")'
    if np.isinf(single):
        return "__builtin_inff()" if single > 0 else "-__builtin_inff()"
    return f"{single.hex()}f"
