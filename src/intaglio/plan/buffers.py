"""Buffers: the memory layout of internal tensors, and the copies of data movement between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from intaglio.ir import Dim, DType, Op, Shape, symbol
from intaglio.ir.names import sanitized
from intaglio.ops import op_def
from intaglio.ops.movement.data_movement import Box, Strides, row_major_strides


def nhwc_sizes(shape: Shape, row_major: bool) -> tuple[Dim, Dim, Dim, Dim]:
    """Return the numbers of images, rows, columns and elements per pixel of a tensor in memory.

    Channels last: [n, c, w] has one row per image, [n, c, d, h, w] has d images per entry of the batch. Row-major, or
    of another rank: the last axis is the pixel, and the axes before it are columns, rows and images, as far as they
    exist.
    """
    if not row_major and len(shape) in (3, 4, 5):
        n, c, *image = shape
        return (n if len(image) < 3 else n * image[0]), (1 if len(image) < 2 else image[-2]), image[-1], c
    *outer, pixel = shape or (1,)
    sizes = [*outer[-3:], *[1] * (3 - len(outer))]
    for dim in outer[:-3]:
        sizes[0] = sizes[0] * dim
    return sizes[0], sizes[1], sizes[2], pixel


@dataclass(frozen=True)
class Buffer:
    """Memory of one internal tensor.

    It is channels last if it has three to five axes, unless ``row_major`` is set, and row-major otherwise.

    Attributes:
        value: Name of the value.
        shape: Logical shape.
        dtype: Element type.
        halo: Rows and columns around each image that are filled with the zero point.
        alias: Buffer whose memory it shares, as the result of a reshape without a copy does.
        row_major: The layout is row-major.
        first_channel: For an operand that is written directly into a concatenation, its first channel in the alias.
    """

    value: str
    shape: Shape
    dtype: DType
    halo: tuple[int, int] = (0, 0)
    alias: str | None = None
    row_major: bool = False
    first_channel: int | None = None

    @property
    def channels_last(self) -> bool:
        """Return whether the layout is channels last."""
        return len(self.shape) in (3, 4, 5) and not self.row_major

    def nhwc_sizes(self) -> tuple[Dim, Dim, Dim, Dim]:
        """Return the numbers of images, rows, columns and channels, without the halo."""
        return nhwc_sizes(self.shape, self.row_major)

    def pixels(self) -> Dim:
        """Return the number of pixels, including the halo."""
        n, h, w, _ = self.nhwc_sizes()
        return n * ((h + 2 * self.halo[0]) * (w + 2 * self.halo[1]))

    def channels(self) -> Dim:
        """Return the channels per pixel; a Python int where kernels are specialized on it."""
        return self.nhwc_sizes()[3]

    def size(self) -> Dim:
        """Return the size in bytes, without slack."""
        return self.pixels() * (self.nhwc_sizes()[3] * self.dtype.bytes)


def strides(buffer: Buffer) -> Strides:
    """Return the strides along each logical axis, in elements."""
    if not buffer.channels_last:
        return row_major_strides(buffer.shape)
    _, height, width, pixel = buffer.nhwc_sizes()
    line = (width + 2 * buffer.halo[1]) * pixel
    image = (height + 2 * buffer.halo[0]) * line
    if len(buffer.shape) == 5:
        return image * buffer.shape[2], 1, image, line, pixel
    return (image, 1, line, pixel) if len(buffer.shape) == 4 else (image, 1, pixel)


def caller_stride(name: str, axis: int) -> Dim:
    """Return the symbol of a stride, in elements, of a caller's tensor that is read with the strides of each call."""
    return symbol(f"stride{axis}_of_{sanitized(name)}")


def caller_strides(name: str, shape: Shape) -> Strides:
    """Return the symbols of all strides of such a tensor."""
    return tuple(caller_stride(name, axis) for axis in range(len(shape)))


def in_order(buffer: Buffer) -> bool:
    """Return whether the memory order is the logical order, without gaps."""
    pairs = zip(strides(buffer), row_major_strides(buffer.shape), buffer.shape, strict=True)
    return all(found == plain or size == 1 for found, plain, size in pairs)


def boxes(op: Op, sources: Sequence[Buffer], result: Buffer) -> tuple[Box, ...]:
    """Return the strided copies of data movement, largest strides of the result first, merged where possible."""
    return op_def(op).strided_copies(op, [(buffer.shape, strides(buffer)) for buffer in sources], strides(result))


def is_identity_copy(op: Op, source: Buffer, result: Buffer) -> bool:
    """Return whether every element of the result is already at its location in the source."""
    if any((*source.halo, *result.halo)):
        return False
    if op_def(op).keeps_order and source.shape != result.shape:
        return in_order(source) and in_order(result)
    found = boxes(op, [source], result)
    (box, *others) = found
    same = not (others or box.fill) and box.source == box.result == 0
    return same and source.size() == result.size() and all(run.source == run.result for run in box.runs)
