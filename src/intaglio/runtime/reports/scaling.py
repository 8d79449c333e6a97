"""Scaling: the predicted time of a call with more threads, from the steps of a call on one thread.

    time(threads) = overhead + max(sum over steps of step * ceil(units / threads) / units, weights / memory) + barriers

A step is divided into whole units, so its slowest thread has ``ceil(units / threads)`` of them. Between steps threads
wait for each other, and fetch the lines of activations that other cores have written, which counts as a part of the
barrier. Its time is measured with two threads; the growth with more threads, 0.04 us for each, is an estimate for cores
of one socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from intaglio.formatting.html_text import html_table
from intaglio.runtime.calls.threads import BARRIER_SECONDS, BARRIER_SECONDS_PER_THREAD

SHOWN_THREADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of threads with a line in the text."""
TWO_THREADS = BARRIER_SECONDS + 2 * BARRIER_SECONDS_PER_THREAD
"""Seconds of a barrier of two threads on one socket, without what is fetched after it."""


class DividedStep(Protocol):
    """A step with its time on one thread, and how it can be divided: the attributes are those of `ProfiledStep`."""

    @property
    def microseconds(self) -> float:
        """Return the microseconds per call."""

    @property
    def units(self) -> int:
        """Return the number of parts that threads can divide it into."""

    @property
    def barrier_group(self) -> int:
        """Return the number of its group; steps of one group need no barrier between them."""

    @property
    def island(self) -> bool:
        """Return whether it is a float island."""


@dataclass(frozen=True)
class ScalingRow:
    """A number of threads.

    Attributes:
        threads: the number.
        microseconds: predicted time of a call.
        speedup: time on one thread divided by this time.
        uneven: microseconds that a call would save if every step could be divided evenly.
        barriers: microseconds in barriers.
        memory: microseconds of reading all weights from memory beyond those of the steps.
    """

    threads: int
    microseconds: float
    speedup: float
    uneven: float
    barriers: float
    memory: float


@dataclass(frozen=True)
class Scaling:
    """Predicted times of a call, in order of the number of threads, which begins at 1.

    Attributes:
        rows: one row for every number of threads.
        barrier_us: microseconds of a barrier of two threads that were assumed.
        memory_gb_per_second: rate of the memory of all cores that was assumed, or ``None``: without limit.
    """

    rows: tuple[ScalingRow, ...]
    barrier_us: float
    memory_gb_per_second: float | None

    def __getitem__(self, threads: int) -> ScalingRow:
        """Return the row of a number of threads."""
        if not 1 <= threads <= len(self.rows):
            raise KeyError(f"{threads} threads; there are rows for 1 to {len(self.rows)}")
        return self.rows[threads - 1]

    @property
    def fastest(self) -> ScalingRow:
        """Return the fewest threads with the least time."""
        return min(self.rows, key=lambda row: row.microseconds)

    def __repr__(self) -> str:
        best = self.fastest
        return f"Scaling(1 to {len(self.rows)} threads, fastest {best.microseconds:.1f} us with {best.threads})"

    def __str__(self) -> str:
        """Format the assumptions, and a line for each power of two and for the fastest number of threads."""
        lines = [self._assumptions(), "threads         us  speedup  uneven us  barriers us  memory us"]
        for row in self._shown():
            parts = f"{row.uneven:9.1f}  {row.barriers:11.1f}  {row.memory:9.1f}"
            lines.append(f"{row.threads:7}  {row.microseconds:9.1f}  {row.speedup:7.2f}  {parts}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the same lines for notebooks."""
        head = ("threads", "µs", "speedup", "uneven, µs", "barriers, µs", "memory, µs")
        rows = []
        for row in self._shown():
            times = (f"{time:.1f}" for time in (row.uneven, row.barriers, row.memory))
            rows.append((str(row.threads), f"{row.microseconds:.1f}", f"{row.speedup:.2f}", *times))
        return html_table(head, rows, text=0)

    def _assumptions(self) -> str:
        memory = f", memory {self.memory_gb_per_second:g} GB/s" if self.memory_gb_per_second else ""
        return f"predicted from one thread: {self.barrier_us:.2f} us for a barrier of two threads{memory}"

    def _shown(self) -> list[ScalingRow]:
        numbers = {count for count in SHOWN_THREADS if count <= len(self.rows)} | {self.fastest.threads}
        return [self[count] for count in sorted(numbers)]


def scaling_of(
    parts: Sequence[DividedStep],
    overhead: float,
    weight_bytes: int,
    most: int,
    barrier_us: float | None,
    memory_gb_per_second: float | None,
) -> Scaling:
    """Return the predicted times with 1 to ``most`` threads. See `Profile.scaling`."""
    barrier_us = TWO_THREADS * 1e6 if barrier_us is None else barrier_us
    counts = np.arange(1, most + 1)
    even, divided = np.zeros(most), np.zeros(most)
    for part in parts:
        units = 1 if part.island else max(part.units, 1)
        divided += part.microseconds * np.ceil(units / counts) / units
        even += part.microseconds / (1 if part.island else counts)
    waits = barrier_us + BARRIER_SECONDS_PER_THREAD * 1e6 * (counts - 2)
    barriers = np.where(counts > 1, _barriers(parts) * waits, 0)
    reading = weight_bytes / (memory_gb_per_second * 1e3) if memory_gb_per_second else 0
    memory = np.maximum(reading - divided, 0)
    total = overhead + divided + barriers + memory
    columns: tuple[Any, ...] = (counts, total, total[0] / np.maximum(total, 1e-9), divided - even, barriers, memory)
    rows = (ScalingRow(int(count), *map(float, values)) for count, *values in zip(*columns, strict=True))
    return Scaling(tuple(rows), barrier_us, memory_gb_per_second)


def barrier_of(parts: Sequence[DividedStep], overhead: float, shared_us: float, threads: int) -> float:
    """Return the microseconds of a barrier of two threads that explain the time of a call on several threads.

    Args:
        parts: the steps on one thread.
        overhead: microseconds of a call outside of its steps.
        shared_us: time of a call on ``threads`` threads.
        threads: at least 2.
    """
    without = scaling_of(parts, overhead, 0, threads, 0.0, None)[threads].microseconds
    count = _barriers(parts)
    return max(shared_us - without, 0.0) / count if count else 0.0


def _barriers(parts: Sequence[DividedStep]) -> int:
    """Return the number of barriers between the steps."""
    return max(len({part.barrier_group for part in parts}) - 1, 0)
