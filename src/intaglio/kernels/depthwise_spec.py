"""Parameters of depthwise convolution microkernels, in which a four-byte dot product computes four vertical taps.

A tile is a few output rows by a few output pixels by the channels of one vector. A column of input is loaded row by row
and interleaved into quads, which hold four rows of a channel in a dword. Every tap column and every output row that
reads the quad takes one dot product of it, with zero weights for rows outside of its window. Interleaving permutes the
channels, and the two packing instructions of the epilogue restore their order.

Two neighbouring output pixels multiply the same weights by columns that are a stride apart. With strides of 1 and 2
these columns stay in registers, so that each weight is loaded once for both pixels. Columns that the next tile reads
too are not interleaved again, if they are still in registers then.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

REGISTERS = 32
QUAD_REGISTERS = 4
"""Registers of a quad, of the four rows that are being interleaved to one, and of the accumulators of a pixel."""
LARGEST_SHARED_STRIDE = 2
"""Largest stride along x with which neighbouring pixels share the weights that are loaded."""
MAX_INPUT_ROWS = 16
"""Maximum number of input rows of a tile, four quads."""

DEPTHWISE_FIELDS = (
    "in",
    "line",
    "pixel",
    "weights",
    "bias",
    "factor",
    "out",
    "out_pixel",
    "out_line",
    "limits",
    "mask",
    "count",
    "table",
)
"""Fields of ``struct DepthwiseTile`` in native/products/tile.h, 8 bytes each, in order."""


@dataclass(frozen=True)
class DepthwiseSpec:
    """Parameters of a depthwise microkernel that computes ``rows`` by ``columns`` output pixels.

    Attributes:
        rows: Output rows.
        columns: Output pixels per row.
        taps: Kernel size (y, x).
        stride: Stride (y, x).
        lanes: Blocks of 16 channels in a vector.
        result: "u8", or "f32" with channels in order and whole vectors per pixel.
        saturates: See `TileSpec`.
        clamps_float: See `TileSpec`.
        looks_up: See `TileSpec`.
    """

    rows: int
    columns: int
    taps: tuple[int, int]
    stride: tuple[int, int]
    lanes: int = 4
    result: str = "u8"
    saturates: bool = False
    clamps_float: bool = False
    looks_up: bool = False

    @property
    def name(self) -> str:
        """Return the kernel's C symbol without the instruction set."""
        return f"depthwise_{self.rows}x{self.columns}_{self._problem}"

    @property
    def family(self) -> str:
        """Return the C symbol, without the instruction set, of the table of these kernels up to this size."""
        return f"depthwise_to_{self.rows}x{self.columns}_{self._problem}"

    @property
    def _problem(self) -> str:
        (ky, kx), (sy, sx) = self.taps, self.stride
        marks = (
            ("f32", self.result == "f32"),
            ("natural", self.saturates),
            ("guard", self.clamps_float),
            ("table", self.looks_up),
        )
        end = "".join(f"_{mark}" for mark, has in marks if has)
        return f"taps{ky}x{kx}_stride{sy}x{sx}_{16 * self.lanes}{end}"

    @property
    def channels(self) -> int:
        """Return the number of channels of a tile."""
        return 16 * self.lanes

    @property
    def tile(self) -> tuple[int, int]:
        """Return the numbers of output pixels and channels."""
        return self.rows * self.columns, self.channels

    @property
    def rows_read(self) -> int:
        """Return the number of input rows that a tile reads."""
        return (self.rows - 1) * self.stride[0] + self.taps[0]

    @property
    def columns_read(self) -> int:
        """Return the number of input columns that a tile reads."""
        return (self.columns - 1) * self.stride[1] + self.taps[1]

    def reads(self, column: int) -> bool:
        """Return whether an output pixel has a tap in an input column. Not all columns are read if the stride
        exceeds the number of taps."""
        return any(0 <= column - x * self.stride[1] < self.taps[1] for x in range(self.columns))

    @property
    def quads(self) -> int:
        """Return the number of groups of four input rows."""
        return -(-self.rows_read // 4)

    def pairs(self) -> list[tuple[int, int]]:
        """Return (output row, quad) for every quad that the row reads, in the memory order of the weights."""
        return [(r, q) for r, q in product(range(self.rows), range(self.quads)) if self._row_reads_quad(r, q)]

    def _row_reads_quad(self, row: int, quad: int) -> bool:
        """Return whether an output row reads a quad of input rows."""
        first = row * self.stride[0]
        return first < 4 * quad + 4 and first + self.taps[0] > 4 * quad

    @property
    def shares_weights(self) -> bool:
        """Return whether each weight is loaded once for two neighbouring output pixels."""
        return self.columns > 1 and self.stride[1] <= LARGEST_SHARED_STRIDE

    @property
    def live(self) -> int:
        """Return the number of neighbouring input columns of a quad that are in registers at once."""
        return self.stride[1] + 1 if self.shares_weights else 1

    @property
    def carried(self) -> int:
        """Return the number of input columns that a tile takes from the registers of the tile before."""
        shared, shift = self.taps[1] - self.stride[1], self.columns * self.stride[1] % self.live
        return shared if self.quads == 1 and 0 < shared <= self.live and (shared == 1 or not shift) else 0

    @property
    def fits(self) -> bool:
        """Return whether accumulators, quads and the rows that are being interleaved fit into the registers."""
        return QUAD_REGISTERS * (self.rows * self.columns + self.live + 1) <= REGISTERS

    def groups(self) -> list[tuple[int, ...]]:
        """Return the output columns that multiply the same weights together: pairs of neighbours, or single ones."""
        size = 2 if self.shares_weights else 1
        return [tuple(range(x, min(x + size, self.columns))) for x in range(0, self.columns, size)]

    @property
    def cost(self) -> tuple[float, float]:
        """Return the cycles per output pixel of a core with two loads, two products and four vector operations a cycle,
        and the number of all of these."""
        pixels, made = self.rows * self.columns, sum(map(self.reads, range(self.carried, self.columns_read)))
        weights = len(self.pairs()) * self.taps[1] * QUAD_REGISTERS
        products = weights * self.columns + 4 * pixels
        loads = self.rows_read * made + weights * len(self.groups()) + 4 * pixels + 4
        others = 8 * self.quads * made + 11 * pixels  # interleaving; conversions and packing of results
        cycles = max(loads / 2, products / 2, (products + others) / 4)
        return cycles / pixels, (loads + products + others) / pixels


def channel_order(lanes: int) -> np.ndarray:
    """Return the channel of every dword of the four accumulators of a pixel."""
    return np.array([16 * (p // 4) + 4 * j + p % 4 for j in range(4) for p in range(4 * lanes)])


def depthwise_checks() -> str:
    """Return C++ static assertions that ``struct DepthwiseTile`` agrees with the table above."""
    lines = [
        f'static_assert(offsetof(struct DepthwiseTile, {name}) == {8 * index}, "DepthwiseTile");'
        for index, name in enumerate(DEPTHWISE_FIELDS)
    ]
    return "\n".join(lines) + "\n"
