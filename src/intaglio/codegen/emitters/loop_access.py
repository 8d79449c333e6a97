"""Where everything is that a loop touches: its ends, the rows it goes along, the names of its variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from intaglio.codegen.context import Context
from intaglio.codegen.emitters.loop_stages import LoopStage, RowValues, magnitudes
from intaglio.ir import Dim, DType, Graph, Op, Shape, evaluate, numel
from intaglio.ops.loop_ops.loop_space import body_of, row_axis, space
from intaglio.ops.loop_ops.primitives import PRIMITIVES, primitive
from intaglio.ops.movement.data_movement import Strides

STREAMED = 1 << 24
"""Bytes from which on a result of floats is written past the caches."""
ASSUMED_SIZE = 7
"""Stands for every free dimension where strides are put in order."""


@dataclass(frozen=True)
class End:
    """An operand or a result of the loop: C of its first element, elements between neighbours along the axes of the
    space."""

    value: str
    dtype: DType
    pointer: str
    strides: Strides


@dataclass(frozen=True)
class Lines:
    """The space as rows around one inner run. ``outer``: sizes; ``strides``: end -> along them, then the inner."""

    outer: Shape
    size: Dim
    strides: Mapping[str, Strides]


class Loop:
    """One loop, and where everything it touches lies."""

    def __init__(self, op: Op, context: Context, tile: str | None = None, channels: int | None = None) -> None:
        """Of an epilogue, ``tile`` is what a product makes, some pixels of some of the ``channels`` (an axis) at a
        time, and a row is those of one pixel."""
        self.op, self.context, self.body = op, context, body_of(op)
        self.channels = channels
        self.tile = None if tile is None else self.body.inputs[op.inputs.index(tile)]
        self.space, self.axis = space(self.body), row_axis(self.body)
        self.tables = {step.output: step for step in self.body.ops if primitive(step).gathers}
        self.ends = {end.value: end for end in (*self._inputs(), *self._outputs())}
        self.lines = self._lines()
        single = {
            name for name, steps in self.lines.strides.items() if steps[-1] == 0 and name not in self.body.outputs
        }
        self.rows = RowValues(self.body, single | set(self.body.constants))
        self.names = _c_names(self.body)
        self.magnitudes = magnitudes(self.body)

    def _inputs(self) -> list[End]:
        """As the body sees them: with the axes that it adds, tables left out."""
        outer = dict(zip(self.body.inputs, self.op.inputs, strict=True))
        found = []
        rows = [(step, primitive(step)) for step in self.body.ops]
        read = {name for step, row in rows if not (row.adds_axis or row.gathers) for name in step.inputs}
        read |= {step.inputs[1] for step in self.tables.values()}
        for name in self.body.inputs:
            if name == self.tile:
                steps = tuple(int(axis == self.channels) for axis in range(len(self.space)))
                found.append(End(name, self.body.types[name].dtype, "tile", steps))
                continue
            pointer, strides = self._at(outer[name])
            dtype, shape = self.body.types[name].dtype, self.body.types[name].shape
            if name in read:
                found.append(End(name, dtype, pointer, self._aligned(shape, strides)))
            for step in self.body.ops:
                if primitive(step).adds_axis and step.inputs[0] == name:
                    axis = step.attrs["axis"]
                    wide = (*shape[:axis], 1, *shape[axis:]), (*strides[:axis], 0, *strides[axis:])
                    found.append(End(step.output, dtype, pointer, self._aligned(*wide)))
        return found

    def _outputs(self) -> list[End]:
        lost = {step.output: step.attrs["axis"] for step in self.body.ops if primitive(step).drops_axis}
        found = []
        for name, inner in zip(self.op.outputs, self.body.outputs, strict=True):
            (pointer, strides), kind = self.context.strided(name), self.body.types[inner]
            shape, axis = kind.shape, lost.get(inner)
            if axis is not None:
                shape, strides = (*shape[:axis], 1, *shape[axis:]), (*strides[:axis], 0, *strides[axis:])
            found.append(End(inner, kind.dtype, pointer, self._aligned(shape, strides)))
        return found

    def _at(self, value: str) -> tuple[str, Strides]:
        array = self.context.graph.constants.get(value)
        if array is None:
            return self.context.strided(value)
        steps = [int(np.prod(array.shape[axis + 1 :])) for axis in range(array.ndim)]
        return f"({self.context.constant(array, 'uint8_t', 'values')})", tuple(steps)

    def _aligned(self, shape: Shape, strides: Strides) -> Strides:
        """Along the axes of the space; 0 where there is one element."""
        own = tuple(0 if size == 1 else step for size, step in zip(shape, strides, strict=True))
        return (0,) * (len(self.space) - len(own)) + own

    def _lines(self) -> Lines:
        """Rows along the axis of reductions; of single elements, along what the first result has side by side."""
        along = self.axis if self.channels is None else self.channels
        axes = [axis for axis, size in enumerate(self.space) if size != 1 and axis != along]
        if along is None:
            first = self.ends[self.body.outputs[0]]
            axes.sort(key=lambda axis: -evaluate(first.strides[axis], _Typical()))
        runs = [(self.space[axis], {e.value: e.strides[axis] for e in self.ends.values()}) for axis in axes]
        if along is None:
            runs = _joined(runs)
            *outer, inner = runs or [(1, dict.fromkeys(self.ends, 0))]
        else:
            outer = _joined(runs)
            inner = self.space[along], {e.value: e.strides[along] for e in self.ends.values()}
        steps = {name: (*(run[1][name] for run in outer), inner[1][name]) for name in self.ends}
        return Lines(tuple(size for size, _ in outer), inner[0], steps)

    def along(self, output: str) -> bool:
        """Whether a result is stored along rows, not once for each."""
        return self.axis is None or self.rows.at(output) not in self.rows.row or self.lines.strides[output][-1] != 0

    def is_streamed(self, output: str) -> bool:
        """Whether a result may be too large for caches: floats side by side, which are no tile's."""
        if self.tile is not None or self.ends[output].dtype is not DType.F32 or self.lines.strides[output][-1] != 1:
            return False
        elements = numel(self.space)
        return self.along(output) and not (isinstance(elements, int) and 4 * elements < STREAMED)

    def is_distance(self, name: str) -> bool:
        """Whether a value is that of a row less the row's largest, so not above 0."""
        makers = self.rows.makers
        step = makers.get(name)
        if step is None or not primitive(step).subtracts or step.inputs[1] not in makers:
            return False
        most = makers[step.inputs[1]]
        return primitive(most) is PRIMITIVES["max"] and most.inputs[0] == step.inputs[0]

    def kept(self, stages: Sequence[LoopStage]) -> dict[str, int]:
        """Values that are kept, each with its place."""
        return {name: place for place, name in enumerate(name for stage in stages for name in stage.kept)}


class _Typical(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return ASSUMED_SIZE


def _joined(runs: Sequence[tuple[Dim, dict[str, Dim]]]) -> list[tuple[Dim, dict[str, Dim]]]:
    """Axes that lie behind each other in all ends count as one."""
    found: list[tuple[Dim, dict[str, Dim]]] = []
    for size, steps in runs:
        if found and all(found[-1][1][name] == step * size for name, step in steps.items()):
            found[-1] = found[-1][0] * size, steps
        else:
            found.append((size, steps))
    return found


def _c_names(body: Graph) -> dict[str, str]:
    """Names of variables: those of the values where C can have them."""
    return {name: f"v_{name}" if name.isascii() else f"v{index}" for index, name in enumerate(body.types)}
