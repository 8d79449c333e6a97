"""Quantized values in place of floats for operators that only select and move them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from intaglio.fusion.loop_conditions import as_loop
from intaglio.ir import Graph, Op, TensorType, fresh
from intaglio.ops import op_def
from intaglio.ops.direct.indexing import INDEX
from intaglio.ops.dynamic_quant import DEQUANTIZE_ROWS
from intaglio.ops.loop_ops.loop import LOOP
from intaglio.ops.movement.shape import PERMUTE, RESHAPE
from intaglio.ops.pointwise import QUANTIZE

SELECTING = (INDEX, PERMUTE, RESHAPE)


def quantize_before_movement(graph: Graph) -> tuple[Graph, int]:
    """Quantize the result of a loop or of a product before it is moved, instead of what was moved.

    The loop, or the product, then writes bytes, and a copy moves a quarter of those of floats. If an index selects less
    than the loop computes, the loop quantizes more than is read, which costs less than storing floats.
    """
    makers, types, count = graph.makers(), dict(graph.types), 0
    readers = {name: len(users) for name, users in graph.users().items()} | dict.fromkeys(graph.outputs, 2)
    ops: dict[str, list[Op]] = {op.output: [op] for op in graph.ops}
    for op in graph.ops:
        parameters = types[op.output].q
        if op_def(op) is not QUANTIZE or parameters is None or parameters.axis is not None:
            continue
        moves = _moves_before(op.inputs[0], makers, readers)
        root = makers.get(moves[0].inputs[0]) if moves else None
        if root is None or not _is_faster_before(moves, root):
            continue
        value = fresh(types, f"{moves[0].inputs[0]}_quantized")
        types[value] = TensorType(types[moves[0].inputs[0]].shape, types[op.output].dtype, parameters)
        ops[op.output] = [as_loop(replace(op, inputs=moves[0].inputs[:1], outputs=(value,)), types)]
        for one in moves:
            made = op.output if one is moves[-1] else fresh(types, f"{one.output}_quantized")
            types[made] = TensorType(types[one.output].shape, types[op.output].dtype, parameters)
            ops[op.output].append(replace(one, inputs=(value, *one.inputs[1:]), outputs=(made,)))
            del ops[one.output]
            value = made
        count += 1
    return graph.replace(ops=tuple(one for made in ops.values() for one in made), types=types), count


def _is_faster_before(moves: list[Op], root: Op) -> bool:
    """Return whether the operator that made a value can quantize it, and the movement would copy floats."""
    return op_def(root) in (LOOP, DEQUANTIZE_ROWS) and any(op_def(one) is not RESHAPE for one in moves)


def _moves_before(value: str, makers: Mapping[str, Op], readers: Mapping[str, int]) -> list[Op]:
    """Return the operators without computation that make a value, each of which has one reader, in their order."""
    found: list[Op] = []
    while (maker := makers.get(value)) is not None and op_def(maker) in SELECTING and readers[value] == 1:
        found.insert(0, maker)
        value = maker.inputs[0]
    return found
