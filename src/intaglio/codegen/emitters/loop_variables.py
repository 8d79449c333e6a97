"""C variables of a loop: names of its values, and pointers to its operands and results."""

from __future__ import annotations

from intaglio.codegen.context import Context
from intaglio.ir import DType, Graph, Op
from intaglio.ops.loop_ops.primitives import primitive
from intaglio.plan.loops.loop_access import operand_strides
from intaglio.plan.loops.loop_records import LoopOperand, LoopSchedule


class Loop:
    """A loop that is being printed.

    Attributes:
        schedule: Schedule of the loop.
        names: C variables by value.
        pointers: C pointers to operands and results by value.
        clip_counts: Index of the count of clipped elements, by quantized result.
    """

    def __init__(self, schedule: LoopSchedule, context: Context) -> None:
        self.schedule, self.context, self.body = schedule, context, schedule.body
        op, tile = schedule.op, schedule.tile
        self.pointers = {name: self._operand(name) for name in op.inputs if tile is None or name != tile.value}
        self.pointers |= {name: context.strided(name)[0] for name in op.outputs}
        self.names = _c_names(self.body)
        self.clip_counts: dict[str, int] = {}

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


def _c_names(body: Graph) -> dict[str, str]:
    """Return the C variable of each value: its name after `v_`, or `v` and a number if the name is not ASCII."""
    return {name: f"v_{name}" if name.isascii() else f"v{index}" for index, name in enumerate(body.types)}
