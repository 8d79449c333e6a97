"""The arena of a program: which buffers belong to a batch tile, and the offsets of all buffers.

Sizes may be free, so the program computes offsets at run time by `place_buffers` of native/base/run.h. `first_fit` here
computes the same offsets for the text of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from intaglio.ir import Dim, evaluate, symbol
from intaglio.plan.buffers import Buffer
from intaglio.plan.plan_records import BatchTiling, BufferLifetime

OFFSET_STEP = 64
"""Alignment of offsets in bytes."""
SLACK_BYTES = 64
"""Bytes after each buffer that vector loads may read."""


@dataclass(frozen=True)
class Arena:
    """Buffers in placement order: those ``outside`` of batch tiles and, with batch tiling, those inside of a ``tile``.

    All barrier groups of a tile run one after another for some images. A buffer outside that one of them uses is
    therefore alive from the first group on.
    """

    tiling: BatchTiling | None
    outside: tuple[BufferLifetime, ...]
    tile: tuple[BufferLifetime, ...] = ()

    def positions(self) -> dict[str, int]:
        """Return the index of each buffer in the table of offsets.

        With batch tiling, the table holds the memory of all tiles, the buffers outside, the bytes of one tile, and the
        buffers of a tile, whose offsets are relative to the tile.
        """
        found = {one.value: index for index, one in enumerate(self.outside, start=int(self.tiling is not None))}
        return found | {one.value: index for index, one in enumerate(self.tile, start=len(self.outside) + 2)}

    def offsets(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the offset of each buffer for these free sizes, with a batch that is a single tile."""
        placed = [evaluate(buffers[one.value].size(), sizes) for one in self.outside]
        if self.tiling is None:
            return dict(zip(_names(self.outside), first_fit(self.outside, placed)[0], strict=True))
        images = min(sizes[self.tiling.batch], self.tiling.images)
        own = [_bytes_in_tile(buffers[one.value], self.tiling, sizes, images) for one in self.tile]
        inside, total = first_fit(self.tile, own)
        memory = BufferLifetime("", 0, self.tiling.groups - 1, -1)
        _, *others = first_fit([memory, *self.outside], [total, *placed])[0]
        return dict(zip([*_names(self.outside), *_names(self.tile)], [*others, *inside], strict=True))


def arena_of(lifetimes: Sequence[BufferLifetime], tiling: BatchTiling | None) -> Arena:
    """Return the arena of buffers with these lifetimes, in placement order."""
    if tiling is None:
        return Arena(None, tuple(lifetimes))
    outside = (one for one in lifetimes if one.last >= tiling.groups)
    extended = (replace(one, first=0) if one.first < tiling.groups else one for one in outside)
    return Arena(tiling, tuple(extended), tuple(one for one in lifetimes if one.last < tiling.groups))


def bytes_per_image(buffer: Buffer, tiling: BatchTiling) -> Dim | None:
    """Return the bytes of one image; ``None`` for a buffer without a batch axis, such as partial sums of threads."""
    if buffer.shape[0] != symbol(tiling.batch):
        return None
    return replace(buffer, shape=(1, *buffer.shape[1:])).size()


def first_fit(lifetimes: Sequence[BufferLifetime], sizes: Sequence[int]) -> tuple[list[int], int]:
    """Place each buffer at the lowest offset that does not overlap an earlier buffer alive at the same time.

    Returns:
        The offsets, and the total number of bytes.
    """
    found: list[tuple[int, int]] = []
    for index, (lifetime, size) in enumerate(zip(lifetimes, sizes, strict=True)):
        room = -(-(size + SLACK_BYTES) // OFFSET_STEP) * OFFSET_STEP
        taken = sorted(found[other] for other in range(index) if lifetimes[other].overlaps(lifetime))
        offset = 0
        for start, end in taken:
            if offset < end and start < offset + room:
                offset = end
        found.append((offset, offset + room))
    return [start for start, _ in found], max((end for _, end in found), default=0)


def conflicts_of(lifetimes: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the earlier buffers that each buffer must not overlap, as one list, and where those of each buffer end.

    Args:
        lifetimes: the first and the last barrier group of every buffer, in the order in which they are placed.
    """
    first, last = np.array(lifetimes, np.int64).reshape(-1, 2).T
    found: list[int] = []
    ends = []
    for index in range(len(lifetimes)):
        together = (first[:index] <= last[index]) & (first[index] <= last[:index])
        found += np.flatnonzero(together).tolist()
        ends.append(len(found))
    return found, ends


def _names(lifetimes: Sequence[BufferLifetime]) -> Iterator[str]:
    return (one.value for one in lifetimes)


def _bytes_in_tile(buffer: Buffer, tiling: BatchTiling, sizes: Mapping[str, int], images: int) -> int:
    """Return the bytes of a buffer for the images of one tile."""
    one = bytes_per_image(buffer, tiling)
    return evaluate(buffer.size(), sizes) if one is None else images * evaluate(one, sizes)
