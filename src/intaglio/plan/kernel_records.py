"""Records of the kernels that a plan selects for its steps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from intaglio.ir import Schedule
from intaglio.kernels import DepthwiseSpec, TileSpec
from intaglio.ops.movement.data_movement import Box


@dataclass(frozen=True)
class TiledKernel:
    """Tiles of a product with constant weights.

    Attributes:
        tile: Tile of a full panel of weights, as tall as its schedule says.
        permuted: Columns of the weights are permuted so that packing instructions restore their order.
        looks_up: The microkernel applies the lookup table of the step if the processor supports it.
        flat: All output pixels of all images are contiguous in memory.
        int4: Tile that expands 4-bit weights in registers. ``None`` for int8 weights.
        expands: With more rows than ``int4`` has, panels of 4-bit weights are expanded to int8 in memory.
        widens: The input is widened to 16 bits before all panels of weights are multiplied by it, where the sizes in
            memory allow this.
        transforms: Winograd's method computes the layer where its images are large enough.
    """

    tile: TileSpec
    permuted: bool
    looks_up: bool
    flat: bool
    int4: TileSpec | None = None
    expands: bool = False
    widens: bool = False
    transforms: bool = False

    def text(self) -> str:
        """Return the kernel's name and how it is used."""
        more = [", looks results up"] * self.looks_up + [", all pixels in one line"] * self.flat
        more += [", input widened to 16 bits"] * (self.widens and not self.transforms)
        more += [", Winograd's method"] * self.transforms
        if self.int4 is not None:
            limit = f" for up to {self.int4.rows} rows" if self.expands else ""
            more.append(f", 4-bit weights, {self.int4.name}{limit}")
        return self.tile.name + "".join(more)


@dataclass(frozen=True)
class DepthwiseKernel:
    """Tiles of a depthwise convolution.

    Attributes:
        tile: Tile of a full block of channels.
        last: Tile of the last block.
        blocks: Number of blocks of channels.
        looks_up: The microkernel applies the lookup table of the step if the processor supports it.
        joined: Number of neighbouring output pixels that are channels of one vector.
    """

    tile: DepthwiseSpec
    last: DepthwiseSpec
    blocks: int
    looks_up: bool
    joined: int = 1

    def text(self) -> str:
        """Return the tile's name, the number of blocks and how the kernel is used."""
        if self.joined > 1:
            return f"{self.tile.name}, {self.joined} pixels in a vector" + ", looks results up" * self.looks_up
        last = f", {self.last.channels} in the last" * (self.last != self.tile)
        count = f"{self.blocks} block{'s' * (self.blocks > 1)} of channels"
        return f"{self.tile.name}, {count}{last}" + ", looks results up" * self.looks_up


@dataclass(frozen=True)
class DepthwiseLoops:
    """A depthwise convolution without microkernels.

    Attributes:
        clamps_float: See `TileSpec`.
    """

    clamps_float: bool

    def text(self) -> str:
        """Return a description for the text of a plan."""
        return "depthwise loops of the library"


@dataclass(frozen=True)
class ActivationTiles:
    """Tiles of products of two activations: the widest, and the widths of panels in blocks of 16 columns."""

    tile: TileSpec
    widths: frozenset[int]

    def text(self) -> str:
        """Return the tile's name and the widths of panels."""
        return f"{self.tile.name}, panels of {', '.join(str(16 * width) for width in sorted(self.widths))} columns"


@dataclass(frozen=True)
class RecurrentTiles:
    """Tiles of both products in every layer and direction of a recurrent layer."""

    schedule: Schedule

    def text(self) -> str:
        """Return the size of the tile and the bytes kept in cache."""
        rows, columns = self.schedule.tile_rows, 16 * self.schedule.tile_columns
        return f"tiles of {rows}x{columns}, chunks of {self.schedule.chunk_bytes} bytes"


class Movement(StrEnum):
    """Methods of moving elements from operands to the result."""

    INTERLEAVE = "interleave two groups of channels"
    COPY = "strided copies"
    RESHAPE = "one pass in logical order"


MAX_RUNS = 8
"""Largest number of runs of a copy, of a `struct Copy` in native/elementwise/data_movement.h."""


@dataclass(frozen=True)
class MovementKernel:
    """Data movement that needs a step.

    Attributes:
        movement: Method.
        boxes: Strided copies in bytes, with the innermost run last.
        growing: Copies of the new values behind a tensor of the caller, see `Plan.growing`.
    """

    movement: Movement
    boxes: tuple[Box, ...] = ()
    growing: tuple[Box, ...] = ()

    def text(self) -> str:
        """Return the number of copies and the method."""
        return f"{len(self.boxes)} {self.movement}" if self.boxes else str(self.movement)


Kernel = TiledKernel | DepthwiseKernel | DepthwiseLoops | ActivationTiles | RecurrentTiles | MovementKernel
