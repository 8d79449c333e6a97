"""Buffers: where the elements of an internal tensor are in memory, and what a move between two of them copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from intaglio.ir import Dim, DType, Op, Shape
from intaglio.ops import op_def
from intaglio.ops.movement.data_movement import Box, Strides, row_major_strides


def lies(shape: Shape, rows: bool) -> tuple[Dim, Dim, Dim, Dim]:
    """Images, rows, columns and bytes (or elements) of a pixel, as a tensor lies in memory.

    With channels last: [n, c, w] is one row an image, [n, c, d, h, w] is d images each. Row-major, or of another rank:
    the last axis is the pixel, the axes before it columns, rows and images, as far as they go.
    """
    if not rows and len(shape) in (3, 4, 5):
        n, c, *image = shape
        return (n if len(image) < 3 else n * image[0]), (1 if len(image) < 2 else image[-2]), image[-1], c
    *outer, pixel = shape or (1,)
    sizes = [*outer[-3:], *[1] * (3 - len(outer))]
    for dim in outer[:-3]:
        sizes[0] = sizes[0] * dim
    return sizes[0], sizes[1], sizes[2], pixel


@dataclass(frozen=True)
class Buffer:
    """Memory of one internal tensor, channels last or, with ``rows`` and for other than three to five axes, row-major.

    ``halo``: rows and columns around each image, filled with the zero point. ``alias`` names the buffer whose bytes it
    shares (a reshape that moves nothing); with ``part`` it is some channels of it, from that one on (an operand of a
    concatenation, written where it belongs).
    """

    value: str
    shape: Shape
    dtype: DType
    halo: tuple[int, int] = (0, 0)
    alias: str | None = None
    rows: bool = False
    part: int | None = None

    @property
    def spatial(self) -> bool:
        return len(self.shape) in (3, 4, 5) and not self.rows

    def lies(self) -> tuple[Dim, Dim, Dim, Dim]:
        """Images, rows, columns, channels, without halo."""
        return lies(self.shape, self.rows)

    def pixels(self) -> Dim:
        """Pixels with their halo."""
        n, h, w, _ = self.lies()
        return n * ((h + 2 * self.halo[0]) * (w + 2 * self.halo[1]))

    def channels(self) -> Dim:
        """Of a pixel; a number wherever a kernel has constants for each."""
        return self.lies()[3]

    def size(self) -> Dim:
        """Bytes, without slack."""
        return self.pixels() * (self.lies()[3] * self.dtype.bytes)


def strides(buffer: Buffer) -> Strides:
    """Elements between neighbours along each logical axis."""
    if not buffer.spatial:
        return row_major_strides(buffer.shape)
    _, height, width, pixel = buffer.lies()
    line = (width + 2 * buffer.halo[1]) * pixel
    image = (height + 2 * buffer.halo[0]) * line
    if len(buffer.shape) == 5:
        return image * buffer.shape[2], 1, image, line, pixel
    return (image, 1, line, pixel) if len(buffer.shape) == 4 else (image, 1, pixel)


def in_order(buffer: Buffer) -> bool:
    """Whether memory order is logical order without gaps."""
    pairs = zip(strides(buffer), row_major_strides(buffer.shape), buffer.shape, strict=True)
    return all(found == plain or size == 1 for found, plain, size in pairs)


def boxes(op: Op, sources: Sequence[Buffer], result: Buffer) -> tuple[Box, ...]:
    """What a move copies where: longest strides of the result first, runs merged where both sides allow."""
    return op_def(op).strided_copies(op, [(buffer.shape, strides(buffer)) for buffer in sources], strides(result))


def moves_nothing(op: Op, source: Buffer, result: Buffer) -> bool:
    """Whether every level of the result lies where its source's does."""
    if any((*source.halo, *result.halo)):
        return False
    if op_def(op).keeps_order and source.shape != result.shape:
        return in_order(source) and in_order(result)
    found = boxes(op, [source], result)
    (box, *others) = found
    same = not (others or box.fill) and box.source == box.result == 0
    return same and source.size() == result.size() and all(run.source == run.result for run in box.runs)
