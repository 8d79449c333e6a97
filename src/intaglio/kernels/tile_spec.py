"""Parameters of a matrix product kernel: some output pixels by blocks of 16 channels, all taps, an epilogue."""

from __future__ import annotations

from dataclasses import dataclass

RESULTS = ("u8", "add", "f32")
"""Requantize to levels; add a residual operand and requantize; dequantize to float."""

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
    "other",
    "other_pixel",
    "other_factor",
    "limits",
    "mask",
    "count",
    "ahead",
    "table",
    "rest",
    "rest_pixel",
    "other_rest",
    "other_rest_pixel",
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
"""Byte offsets in ``struct Limits``."""


@dataclass(frozen=True)
class TileSpec:
    """``rows`` output pixels by ``blocks`` of 16 channels.

    natural: levels lie in 0..255 with the zero point 0, that of a residual operand too, so that saturation alone bounds
    them. guard: products may exceed the range of the conversion to int32 and are clamped in float first. table: levels
    are looked up before they are stored, in a table that knows of bounds inside 0..255. rest: results have 16 bits, a
    level and a rest (numerics.split); natural ones are levels with the zero point 0, none below it. other_rest: so has
    the residual operand, whatever its zero point.
    """

    rows: int
    blocks: int
    result: str = "u8"
    natural: bool = False
    guard: bool = False
    table: bool = False
    rest: bool = False
    other_rest: bool = False

    @property
    def name(self) -> str:
        """C symbol, less the instruction set."""
        return f"tile_{self.rows}x{self.blocks}_{self.result}{self.marks}"

    @property
    def family(self) -> str:
        """C symbol of the table of these kernels by height, less the instruction set."""
        return f"tiles_x{self.blocks}_{self.result}{self.marks}"

    @property
    def marks(self) -> str:
        """The end of both names."""
        marks = {
            "natural": self.natural,
            "guard": self.guard,
            "table": self.table,
            "rest": self.rest,
            "of_rest": self.other_rest,
        }
        return "".join(f"_{mark}" for mark, has in marks.items() if has)

    @property
    def tile(self) -> tuple[int, int]:
        """Output pixels and channels."""
        return self.rows, 16 * self.blocks


def permutation(packed: bool, blocks: int) -> list[int]:
    """Channel (within a panel) that each accumulator column holds.

    Packing saturates pairs of registers lane by lane: of n registers, dword ``4L + t`` of register j ends up as byte
    ``4nL + 4j + t``.
    """
    if not packed:
        return list(range(16 * blocks))
    return [4 * blocks * (p // 4) + 4 * j + p % 4 for j in range(blocks) for p in range(16)]


def tile_offset(field: str) -> int:
    """Byte offset of a field of ``struct Tile``."""
    return 8 * TILE_FIELDS.index(field)


def layout_checks() -> str:
    """C++ that fails to compile when the structs and the tables above disagree."""
    lines = [f'static_assert(offsetof(struct Tile, {f}) == {tile_offset(f)}, "Tile");' for f in TILE_FIELDS]
    lines += [f'static_assert(offsetof(struct Limits, {f}) == {at}, "Limits");' for f, at in LIMITS_FIELDS.items()]
    return "\n".join(lines) + "\n"
