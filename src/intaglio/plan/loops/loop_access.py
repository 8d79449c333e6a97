"""Memory locations of the operands and results of a loop, and its iteration order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from intaglio.ir import Dim, Graph, Op, Shape, evaluate
from intaglio.ops.loop_ops.loop_space import body_of, row_axis, space
from intaglio.ops.loop_ops.primitives import primitive
from intaglio.ops.movement.data_movement import Strides, row_major_strides
from intaglio.plan.execution_plan import Plan
from intaglio.plan.loops.loop_records import EpilogueTile, LoopOperand, LoopRows

ASSUMED_SIZE = 7
"""Assumed size of a free dimension when axes are sorted by stride."""


def loop_operands(op: Op, plan: Plan, tile: EpilogueTile | None) -> dict[str, LoopOperand]:
    """Return the operands and results of a loop by their names in the body.

    Channels of an operand that is read from a tile are contiguous.
    """
    axes = len(space(body_of(op)))
    return {operand.name: operand for operand in (*_operands(op, plan, tile, axes), *_results(op, plan, axes))}


def _operands(op: Op, plan: Plan, tile: EpilogueTile | None, axes: int) -> list[LoopOperand]:
    """Return the operands with the axes that the body adds, except for tables, of which the loop reads only rows."""
    body, found = body_of(op), list[LoopOperand]()
    records = [(step, primitive(step)) for step in body.ops]
    read = {name for step, row in records if not (row.adds_axis or row.gathers) for name in step.inputs}
    read |= {step.inputs[1] for step, row in records if row.gathers}
    for name, value in zip(body.inputs, op.inputs, strict=True):
        dtype, shape = body.types[name].dtype, body.types[name].shape
        if tile is not None and name == tile.name_in(op):
            found.append(LoopOperand(name, value, dtype, tuple(int(axis == tile.channels) for axis in range(axes))))
            continue
        strides = operand_strides(value, plan)
        if name in read:
            found.append(LoopOperand(name, value, dtype, _aligned(shape, strides, axes)))
        for step, row in records:
            if row.adds_axis and step.inputs[0] == name:
                wide = _with_axis(shape, strides, step.attrs["axis"])
                found.append(LoopOperand(step.output, value, dtype, _aligned(*wide, axes)))
    return found


def _results(op: Op, plan: Plan, axes: int) -> list[LoopOperand]:
    """Return the results, with the axes that the body drops as axes of stride 0."""
    body = body_of(op)
    dropped = {step.output: step.attrs["axis"] for step in body.ops if primitive(step).drops_axis}
    found = []
    for value, name in zip(op.outputs, body.outputs, strict=True):
        shape, strides = body.types[name].shape, plan.location(value).strides
        if name in dropped:
            shape, strides = _with_axis(shape, strides, dropped[name])
        found.append(LoopOperand(name, value, body.types[name].dtype, _aligned(shape, strides, axes)))
    return found


def operand_strides(value: str, plan: Plan) -> Strides:
    """Return the strides of an operand; constants are row-major."""
    if value in plan.graph.constants:
        return row_major_strides(plan.graph.types[value].shape)
    return plan.location(value).strides


def _with_axis(shape: Shape, strides: Strides, axis: int) -> tuple[Shape, Strides]:
    return (*shape[:axis], 1, *shape[axis:]), (*strides[:axis], 0, *strides[axis:])


def _aligned(shape: Shape, strides: Strides, axes: int) -> Strides:
    """Return the strides along the axes of the iteration space; 0 for axes of one element."""
    own = tuple(0 if size == 1 else step for size, step in zip(shape, strides, strict=True))
    return (0,) * (axes - len(own)) + own


def loop_rows(body: Graph, operands: Mapping[str, LoopOperand], tile: EpilogueTile | None) -> LoopRows:
    """Choose the rows: along the axis of reductions, or along the smallest stride of an elementwise loop's first
    result.
    """
    sizes, along = space(body), row_axis(body) if tile is None else tile.channels
    axes = [axis for axis, size in enumerate(sizes) if size != 1 and axis != along]
    if along is None:
        first = operands[body.outputs[0]]
        axes.sort(key=lambda axis: -evaluate(first.strides[axis], _AssumedSizes()))
    runs = [(sizes[axis], {name: operand.strides[axis] for name, operand in operands.items()}) for axis in axes]
    inner: tuple[Dim, dict[str, Dim]]
    if along is None:
        *outer, inner = _joined(runs) or [(1, dict.fromkeys(operands, 0))]
    else:
        outer = _joined(runs)
        inner = sizes[along], {name: operand.strides[along] for name, operand in operands.items()}
    strides = {name: (*(run[1][name] for run in outer), inner[1][name]) for name in operands}
    return LoopRows(tuple(size for size, _ in outer), inner[0], strides)


class _AssumedSizes(dict[str, int]):
    """Sizes of free dimensions: `ASSUMED_SIZE` for all."""

    def __missing__(self, key: str) -> int:
        return ASSUMED_SIZE


def _joined(runs: Sequence[tuple[Dim, dict[str, Dim]]]) -> list[tuple[Dim, dict[str, Dim]]]:
    """Merge axes that are contiguous in memory for all operands and results."""
    found: list[tuple[Dim, dict[str, Dim]]] = []
    for size, steps in runs:
        if found and all(found[-1][1][name] == step * size for name, step in steps.items()):
            found[-1] = found[-1][0] * size, steps
        else:
            found.append((size, steps))
    return found
