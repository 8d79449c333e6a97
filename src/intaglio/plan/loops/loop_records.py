"""Records of a loop's schedule: operands and results, rows, passes along them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from intaglio.ir import Dim, DType, Graph, Op, Shape
from intaglio.ops.loop_ops.loop_space import body_of
from intaglio.ops.loop_ops.primitives import primitive
from intaglio.ops.movement.data_movement import Strides
from intaglio.plan.loops.loop_stages import LoopStage


@dataclass(frozen=True)
class LoopOperand:
    """An operand or result of a loop.

    Attributes:
        name: Name of the value in the body.
        value: Name of the graph's value whose memory it uses.
        dtype: Element type.
        strides: Strides in elements along the axes of the iteration space.
    """

    name: str
    value: str
    dtype: DType
    strides: Strides


@dataclass(frozen=True)
class LoopRows:
    """The iteration space of a loop as rows.

    Attributes:
        outer: Sizes of the axes around a row.
        size: Elements of a row.
        strides: Strides of each operand and result along the outer axes, then along the row.
    """

    outer: Shape
    size: Dim
    strides: Mapping[str, Strides]


@dataclass(frozen=True)
class EpilogueTile:
    """The operand that an epilogue reads from the tiles of its product, and the axis of its channels."""

    value: str
    channels: int

    def name_in(self, op: Op) -> str:
        """Return the operand's name in the body of a loop."""
        return body_of(op).inputs[op.inputs.index(self.value)]


@dataclass(frozen=True)
class LoopVariant:
    """Passes of a loop for rows of at most ``longest`` elements; 0 means any length, and no values are kept."""

    stages: tuple[LoopStage, ...]
    longest: int = 0

    @property
    def kept(self) -> tuple[str, ...]:
        """Return the values that passes keep for later passes."""
        return tuple(name for stage in self.stages for name in stage.kept)


@dataclass(frozen=True)
class LoopSchedule:
    """Schedule of a loop.

    Attributes:
        op: The loop.
        operands: Operands and results by their names in the body.
        rows: The iteration space as rows.
        axis: Axis of reductions.
        tile: Operand that an epilogue reads from its product's tiles, in which a row is the channels of one pixel.
        row_values: Values with one number per row; all others have one per element.
        producers: Operator that computes each value.
        value_with_axis: For each result without the axis of reductions, the value with this axis that it equals.
        variants: Passes; if there are two variants, the first is for short rows.
        streamed: Results that are written past the caches.
        nonpositive: Values less the largest of their row, which are at most 0.
        convertible: Results of a quantize whose operand provably converts to int32 without clamping.
    """

    op: Op
    operands: Mapping[str, LoopOperand]
    rows: LoopRows
    axis: int | None
    tile: EpilogueTile | None
    row_values: frozenset[str]
    producers: Mapping[str, Op]
    value_with_axis: Mapping[str, str]
    variants: tuple[LoopVariant, ...] = ()
    streamed: frozenset[str] = frozenset()
    nonpositive: frozenset[str] = frozenset()
    convertible: frozenset[str] = frozenset()

    @property
    def body(self) -> Graph:
        """Return the body of the loop."""
        return body_of(self.op)

    @property
    def tables(self) -> Mapping[str, Op]:
        """Return the values that are rows of a table, with the operator that looks them up."""
        return {step.output: step for step in self.body.ops if primitive(step).gathers}

    @property
    def tile_name(self) -> str | None:
        """Return the name in the body of the operand that is read from a tile, or ``None``."""
        return None if self.tile is None else self.tile.name_in(self.op)

    def equal_value(self, output: str) -> str:
        """Return the value that an output equals: with the axis of reductions, if the output lacks it."""
        return self.value_with_axis.get(output, output)

    def along(self, output: str) -> bool:
        """Return whether a result is stored per element instead of once per row."""
        return (
            self.axis is None or self.equal_value(output) not in self.row_values or self.rows.strides[output][-1] != 0
        )

    def text(self) -> str:
        """Return rows, passes and the values they keep."""
        outer = " x ".join(f"({size})" if " " in str(size) else str(size) for size in self.rows.outer) or "1"
        count = len(self.variants[0].stages)
        lines = [f"{outer} rows of {self.rows.size}, {count} pass{'es' * (count > 1)}"]
        kept = ", ".join(f"%{name}" for name in self.variants[0].kept)
        if kept:
            lines.append(f"{kept} kept between passes of rows up to {self.variants[0].longest} elements")
        if self.streamed:
            lines.append(f"{', '.join(f'%{name}' for name in sorted(self.streamed))} written past the caches")
        return "; ".join(lines)
