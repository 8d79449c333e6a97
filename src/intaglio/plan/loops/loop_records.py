"""The records of a loop's schedule: operands, rows, passes along them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from intaglio.ir import Dim, DType, Graph, Op, Shape
from intaglio.ops.loop_ops.loop_space import body_of
from intaglio.ops.loop_ops.primitives import primitive
from intaglio.ops.movement.data_movement import Strides
from intaglio.plan.loops.loop_stages import LoopStage


@dataclass(frozen=True)
class LoopEnd:
    """An operand or a result of a loop.

    ``name``: the value of the body; ``value``: that of the graph in whose memory it is; ``strides``: elements between
    neighbours along the axes of the loop's space.
    """

    name: str
    value: str
    dtype: DType
    strides: Strides


@dataclass(frozen=True)
class LoopRows:
    """The space of a loop as rows around one inner run.

    ``outer``: sizes around it; ``size``: of the run; ``strides``: end -> strides along the outer axes, then the run.
    """

    outer: Shape
    size: Dim
    strides: Mapping[str, Strides]


@dataclass(frozen=True)
class EpilogueTile:
    """What an epilogue reads from the product it follows: the value, and the axis of its channels."""

    value: str
    channels: int

    def name_in(self, op: Op) -> str:
        """Return the name in the body of a loop of what the loop reads as a tile."""
        return body_of(op).inputs[op.inputs.index(self.value)]


@dataclass(frozen=True)
class LoopVariant:
    """The passes of a loop for rows of at most ``longest`` elements; 0 where passes keep nothing, for any length."""

    stages: tuple[LoopStage, ...]
    longest: int = 0

    @property
    def kept(self) -> tuple[str, ...]:
        """Values that passes keep for later ones."""
        return tuple(name for stage in self.stages for name in stage.kept)


@dataclass(frozen=True)
class LoopSchedule:
    """How a loop runs.

    ``ends``: operands and results by their names in the body; ``rows``: the space as rows; ``axis``: of reductions;
    ``tile``: what an epilogue reads from its product, of which a row is the channels of one pixel. ``row_values`` are
    one number a row, all others one an element; ``makers``: value -> operator; ``same``: result -> the value that it is
    with an axis less. ``variants``: passes; of two, the first is for rows that are short enough. ``streamed``: results
    written past the caches; ``distances``: values less the largest of their row, so at most 0; ``convertible``: results
    of a quantize whose operand is proved to convert to int32 without bounds.
    """

    op: Op
    ends: Mapping[str, LoopEnd]
    rows: LoopRows
    axis: int | None
    tile: EpilogueTile | None
    row_values: frozenset[str]
    makers: Mapping[str, Op]
    same: Mapping[str, str]
    variants: tuple[LoopVariant, ...] = ()
    streamed: frozenset[str] = frozenset()
    distances: frozenset[str] = frozenset()
    convertible: frozenset[str] = frozenset()

    @property
    def body(self) -> Graph:
        return body_of(self.op)

    @property
    def tables(self) -> Mapping[str, Op]:
        """Values that are rows of a table -> the operator that finds these."""
        return {step.output: step for step in self.body.ops if primitive(step).gathers}

    @property
    def tile_name(self) -> str | None:
        """The name in the body of what an epilogue reads as a tile."""
        return None if self.tile is None else self.tile.name_in(self.op)

    def at(self, output: str) -> str:
        """Return the value that an output is, perhaps with an axis less."""
        return self.same.get(output, output)

    def along(self, output: str) -> bool:
        """Return whether a result is stored along rows, not once for each."""
        return self.axis is None or self.at(output) not in self.row_values or self.rows.strides[output][-1] != 0

    def text(self) -> str:
        """Return rows, passes and what they keep."""
        outer = " x ".join(f"({size})" if " " in str(size) else str(size) for size in self.rows.outer) or "1"
        count = len(self.variants[0].stages)
        lines = [f"{outer} rows of {self.rows.size}, {count} pass{'es' * (count > 1)}"]
        kept = ", ".join(f"%{name}" for name in self.variants[0].kept)
        if kept:
            lines.append(f"{kept} kept between passes of rows up to {self.variants[0].longest} elements")
        if self.streamed:
            lines.append(f"{', '.join(f'%{name}' for name in sorted(self.streamed))} written past the caches")
        return "; ".join(lines)
