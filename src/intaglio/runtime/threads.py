"""How many threads a stretch of a program is worth: a model of its time, and the fewest that come close to the best.

    time(threads) = start + sum over steps of (step + work / rate / threads as far as its units divide) + barriers

The constants were measured on two cores of an AMD EPYC (family 25, 2.6 GHz); benchmarks/scale.py shows what they
predict and what a machine does. Nothing is timed at run time, and results never depend on the number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from intaglio.ir import Program, Work, evaluate

MACS_PER_SECOND: Mapping[str, float] = {"avx512vnni": 220e9, "avx2": 72e9, "portable": 7.3e9}
"""Of one thread in convolutions of 16 channels or more (CIFAR ResNet-20 and ResNet-18)."""

BYTES_PER_SECOND = 24e9
"""Activations one thread reads and writes beside that: quantize runs at 44e9, max_pool at 80e9, MobileNetV2 as a whole
at this."""

STEP = 0.1e-6
"""Seconds of a step before its first tile."""

START = 5e-6
"""Seconds until other threads work: 0.2e-6 while they still wait for the next call, 30e-6 to 200e-6 once they sleep."""

BARRIER, BARRIER_THREAD = 0.08e-6, 0.04e-6
"""Seconds of a barrier, and for each thread at it. Two threads were measured (0.05e-6 without work between, 0.15e-6 for
a line that moves and lateness); the rise is an estimate for cores of one socket."""

CLOSE = 1.02
"""More threads are not worth 2 % of the time: they take cores from others."""


@dataclass(frozen=True)
class Stretch:
    """The steps of a segment at given sizes: seconds each takes on one thread, units of each, barriers between them."""

    seconds: np.ndarray
    units: np.ndarray
    barriers: int

    def time(self, threads: int) -> float:
        """Predicted seconds."""
        largest = np.ceil(self.units / threads) / self.units
        shared = float((self.seconds * largest).sum()) + STEP * len(self.seconds)
        if threads == 1:
            return shared
        return shared + START + self.barriers * (BARRIER + BARRIER_THREAD * threads)

    def threads(self, most: int) -> int:
        """The fewest, up to ``most``, whose time is close to the best."""
        times = [self.time(count) for count in range(1, most + 1)]
        return next(count for count, time in enumerate(times, start=1) if time <= CLOSE * min(times))


def stretches(program: Program, symbols: Mapping[str, int]) -> list[Stretch]:
    """One for every segment."""
    found: list[list[Work]] = [[] for _ in range(program.segments)]
    for step in program.steps:
        found[step.work.segment].append(step.work)
    return [_stretch(works, symbols, MACS_PER_SECOND[program.isa]) for works in found]


def _stretch(works: Sequence[Work], symbols: Mapping[str, int], rate: float) -> Stretch:
    macs, moved, units = (
        np.array([evaluate(dim, symbols) for dim in dims], np.float64)
        for dims in ([w.macs for w in works], [w.bytes for w in works], [w.units for w in works])
    )
    phases = len({work.phase for work in works})
    return Stretch(macs / rate + moved / BYTES_PER_SECOND, np.maximum(units, 1), max(phases - 1, 0))


def shares(program: Program, symbols: Mapping[str, int], allowed: int) -> tuple[int, ...]:
    """Threads of every segment: at most ``allowed``, at most the cores this process may use."""
    most = min(allowed, len(os.sched_getaffinity(0)))
    if most <= 1:
        return (1,) * program.segments
    return tuple(stretch.threads(most) for stretch in stretches(program, symbols))
