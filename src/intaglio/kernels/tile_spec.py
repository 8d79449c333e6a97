"""Parameters of a GEMM microkernel: some output pixels by blocks of 16 channels, over all taps, with an epilogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

RESULTS = ("u8", "add", "f32", "rows")
"""Epilogues: requantize; add a residual operand and requantize; dequantize to float, with scales of channels or with
those of rows and channels and a bias (`numerics.dequantize_rows`)."""
PACKED_RESULTS = ("u8", "add")
"""Results that are packed to bytes."""

TILE_FIELDS = (
    "a",
    "a_pixel",
    "b",
    "tap_rows",
    "a_row",
    "taps",
    "a_tap",
    "run",
    "bias",
    "factor",
    "out",
    "out_pixel",
    "residual",
    "residual_pixel",
    "residual_factor",
    "limits",
    "mask",
    "count",
    "ahead",
    "table",
    "remainder",
    "remainder_pixel",
    "residual_remainder",
    "residual_remainder_pixel",
    "row_scale",
    "row_bias",
    "setup",
    "part_rows",
    "a_skip",
    "out_skip",
    "residual_skip",
    "remainder_skip",
    "residual_remainder_skip",
    "levels",
)
"""Fields of ``struct Tile`` in native/products/tile.h, 8 bytes each, in order."""

LIMITS_FIELDS = {
    "zero_point16": 0,
    "low8": 64,
    "high8": 128,
    "low16": 192,
    "high16": 256,
    "zero_point": 320,
    "low": 324,
    "high": 328,
    "other_zero_point": 332,
    "convertible_low": 336,
    "convertible_high": 340,
}
"""Byte offsets of the fields of ``struct Limits``."""

INT4_GROUP, INT4_CHANNELS, INT4_MULTIPLES = 32, 64, 16
"""Input channels that share a multiple in panels of 4-bit weights; input channels of a line of a panel; bytes of the
multiples of a line for each block. Constants with these names in native/layers/int4_weights.h."""

STREAMED_ROWS = 3
"""Rows up to which a kernel takes the time of reading its weights, all of which it then prefetches."""


class Streaming(NamedTuple):
    """Prefetching of weights by kernels with few rows: one line for each that they read.

    Attributes:
        prefetch: The instruction.
        ahead: Bytes between the weights that are multiplied and those that are prefetched; with several streams, bytes
            between the beginning of the next panel and the first of those.
        int4_ahead: The same of 4-bit weights.
        streams: Parts of a panel that are prefetched side by side; of 8-bit weights, one for each block.
    """

    prefetch: str
    ahead: int
    int4_ahead: int
    streams: int


ONE_LEVEL = Streaming("prefetchnta", 3072, 10240, 1)
"""Prefetching into the first-level cache only, so that weights do not evict what the rest of a call reads again:
activations, the cache of a decoder and the Python interpreter. Steps of a decoder of 0.5 billion weights take 0.90 to
0.93 of the time of prefetches into the second-level cache 1536 and 6144 bytes ahead (Zen 5, one and two threads, 8 and
4 bits), and Python between them half of it. Lines must arrive before they are read: on one thread, 6144 bytes with 4
bits and 1536 with 8 gain nothing.
"""

TWO_LEVELS = Streaming("prefetcht1", 4096, 8192, 4)
"""Prefetching into the second-level cache, for processors of Intel. Their cores share a first-level cache with another
thread, often that of another guest, which evicts lines before they are read; then memory must deliver them again. On
two threads of a Xeon with AMX a loop reads 8-bit weights at 21 to 28 GB/s and 4-bit weights at 21 to 22, with
`ONE_LEVEL` at 10 to 15 and at 13, and a loop without products and prefetching at 19 to 25.

These processors read several pages at a time faster than one: a page that is read in order makes them prefetch the rest
of it, and then more lines are on their way than a core can ask for. With four streams a loop reads 4-bit weights at
1.16 to 1.35 times the rate of one.
"""

SETUP_FIELDS = {name: 8 * index for index, name in enumerate(("blocks", "rows", "first", "run", "steps", "step_run"))}
"""Byte offsets of the fields of ``struct TileSetup``."""


@dataclass(frozen=True)
class TileSpec:
    """Parameters of a GEMM microkernel that computes ``rows`` output pixels by ``blocks`` of 16 channels.

    Attributes:
        rows: Output pixels.
        blocks: Blocks of 16 output channels.
        result: One of `RESULTS`.
        saturates: Quantized values are in 0..255 with the zero point 0, also those of a residual operand, so that
            saturation replaces the clamp. For 16-bit results, the 8-bit zero point is 0 and the lower bound is the zero
            point, as after a ReLU.
        clamps_float: Products may exceed the range of the conversion to int32 and are clamped in float first.
        looks_up: Quantized values are mapped by a lookup table before they are stored; the table includes the clamp.
        remainder: Results have 16 bits, stored as an 8-bit value and a remainder (`numerics.split_16bit`).
        residual_remainder: The residual operand has 16 bits in this form, with any zero point.
        int4: Weights have 4 bits, with a multiple for each group of ``INT4_GROUP`` input channels of an output channel.
        row_taps: Taps of a row whose products are computed together, so that every pixel is read once; 1 if taps are
            computed one after the other. The pixels of a tap must be the neighbours of those of the tap before it.
        widened: Activations were widened to 16 bits in memory (native/layers/widened.cpp).
        sums: Sums of products are in memory, 16 int32 for each pixel, and the kernel only adds the bias and applies
            the epilogue (native/layers/winograd.cpp).
    """

    rows: int
    blocks: int
    result: str = "u8"
    saturates: bool = False
    clamps_float: bool = False
    looks_up: bool = False
    remainder: bool = False
    residual_remainder: bool = False
    int4: bool = False
    row_taps: int = 1
    widened: bool = False
    sums: bool = False

    @property
    def name(self) -> str:
        """Return the kernel's C symbol without the instruction set."""
        return f"tile_{self.rows}x{self.blocks}_{self.result}{self.marks}"

    @property
    def family(self) -> str:
        """Return the C symbol, without the instruction set, of the table of these kernels by height."""
        return f"tiles_x{self.blocks}_{self.result}{self.marks}"

    @property
    def marks(self) -> str:
        """Return the suffix of both names."""
        marks = {
            "natural": self.saturates,
            "guard": self.clamps_float,
            "table": self.looks_up,
            "rest": self.remainder,
            "of_rest": self.residual_remainder,
            "int4": self.int4,
            f"taps{self.row_taps}": self.row_taps > 1,
            "widened": self.widened,
            "sums": self.sums,
        }
        return "".join(f"_{mark}" for mark, has in marks.items() if has)

    @property
    def tile(self) -> tuple[int, int]:
        """Return the numbers of output pixels and channels."""
        return self.rows, 16 * self.blocks


def permutation(packed: bool, blocks: int) -> list[int]:
    """Return the channel (within a panel) that each accumulator column holds.

    Packing instructions saturate pairs of registers within 128-bit lanes: with n registers, dword ``4L + t`` of
    register j becomes byte ``4nL + 4j + t``.
    """
    if not packed:
        return list(range(16 * blocks))
    return [4 * blocks * (p // 4) + 4 * j + p % 4 for j in range(blocks) for p in range(16)]


def tile_offset(field: str) -> int:
    """Return the byte offset of a field of ``struct Tile``."""
    return 8 * TILE_FIELDS.index(field)


def layout_checks() -> str:
    """Return C++ static assertions that the structs agree with the tables above."""
    lines = [f'static_assert(offsetof(struct Tile, {f}) == {tile_offset(f)}, "Tile");' for f in TILE_FIELDS]
    lines += [f'static_assert(offsetof(struct Limits, {f}) == {at}, "Limits");' for f, at in LIMITS_FIELDS.items()]
    lines += [f'static_assert(offsetof(struct TileSetup, {f}) == {at}, "TileSetup");' for f, at in SETUP_FIELDS.items()]
    return "\n".join(lines) + "\n"
