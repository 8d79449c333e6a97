"""Quantized values in place of floats for operators that only select and move them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from intaglio.ir import Graph, Op, TensorType, fresh
from intaglio.ops import op_def
from intaglio.ops.direct.indexing import INDEX
from intaglio.ops.loop_ops.loop import LOOP
from intaglio.ops.movement.shape import PERMUTE, RESHAPE
from intaglio.ops.pointwise import QUANTIZE

SELECTING = (INDEX, PERMUTE, RESHAPE)


def quantize_before_indexing(graph: Graph) -> tuple[Graph, int]:
    """Quantize the result of a loop before an index selects from it, instead of what it selects.

    The loop then writes bytes, and the copy moves a quarter of those of floats. If the index selects less than the loop
    computes, the loop quantizes more than is read, which costs less than storing floats.
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
        if root is None or op_def(root) is not LOOP or not any(op_def(one) is INDEX for one in moves):
            continue
        value = fresh(types, f"{moves[0].inputs[0]}_quantized")
        ops[op.output] = [replace(op, inputs=moves[0].inputs[:1], outputs=(value,))]
        for one in moves:
            types[value] = TensorType(types[one.inputs[0]].shape, types[op.output].dtype, parameters)
            made = op.output if one is moves[-1] else fresh(types, f"{one.output}_quantized")
            ops[op.output].append(replace(one, inputs=(value, *one.inputs[1:]), outputs=(made,)))
            del ops[one.output]
            value = made
        count += 1
    return graph.replace(ops=tuple(one for made in ops.values() for one in made), types=types), count


def _moves_before(value: str, makers: Mapping[str, Op], readers: Mapping[str, int]) -> list[Op]:
    """Return the operators without computation that make a value, each of which has one reader, in their order."""
    found: list[Op] = []
    while (maker := makers.get(value)) is not None and op_def(maker) in SELECTING and readers[value] == 1:
        found.insert(0, maker)
        value = maker.inputs[0]
    return found
