"""How many threads a stretch of a program is worth: a model of its time, and the fewest that come close to the best.

    time(threads) = start + sum over steps of (step + work / rate / threads as far as its units divide) + barriers

The constants were measured on two cores of an AMD EPYC (family 25, 2.6 GHz); benchmarks/scale.py shows what they
predict and what a machine does. Nothing is timed at run time, and results never depend on the number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from intaglio.ir import Program, evaluator
from intaglio.native.cpu import IsaName

MACS_PER_SECOND: Mapping[str, float] = {
    IsaName.AVX512VNNI: 220e9,
    IsaName.AVX2: 72e9,
    IsaName.PORTABLE: 7.3e9,
}
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
class SegmentCost:
    """The steps of a segment at given sizes: seconds each takes on one thread, units of each, barriers between them."""

    seconds: np.ndarray
    units: np.ndarray
    barriers: int

    def times(self, most: int) -> np.ndarray:
        """Predicted seconds with 1 to ``most`` threads."""
        counts = np.arange(1, most + 1)
        largest = np.ceil(self.units / counts[:, None]) / self.units
        shared = (self.seconds * largest).sum(1) + STEP * len(self.seconds)
        others = START + self.barriers * (BARRIER + BARRIER_THREAD * counts)
        return shared + np.where(counts > 1, others, 0)

    def time(self, threads: int) -> float:
        """Predicted seconds."""
        return float(self.times(threads)[-1])

    def threads(self, most: int) -> int:
        """The fewest, up to ``most``, whose time is close to the best."""
        times = self.times(most)
        return int(np.argmax(times <= CLOSE * times.min())) + 1


@dataclass(frozen=True)
class _Table:
    """Of a program: what evaluates macs, bytes and units of all steps, the steps of every segment, and barriers."""

    evaluate: Callable[..., tuple[int, ...]]
    segments: tuple[np.ndarray, ...]
    barriers: tuple[int, ...]


_TABLES: WeakKeyDictionary[Program, _Table] = WeakKeyDictionary()
"""Made once a program."""


def _table(program: Program) -> _Table:
    found = _TABLES.get(program)
    if found is None:
        works = [step.work for step in program.steps]
        evaluate = evaluator([dim for w in works for dim in (w.macs, w.bytes, w.units)], program.symbols)
        segments = tuple(
            np.array([i for i, work in enumerate(works) if work.segment == segment], np.intp)
            for segment in range(program.segments)
        )
        groups = [len({works[i].barrier_group for i in steps}) for steps in segments]
        found = _TABLES[program] = _Table(evaluate, segments, tuple(max(count - 1, 0) for count in groups))
    return found


def stretches(program: Program, symbols: Mapping[str, int]) -> list[SegmentCost]:
    """One for every segment."""
    table = _table(program)
    found = table.evaluate(*[symbols[name] for name in program.symbols])
    macs, moved, units = np.array(found, np.float64).reshape(-1, 3).T
    seconds = macs / MACS_PER_SECOND[program.isa] + moved / BYTES_PER_SECOND
    units = np.maximum(units, 1)
    return [
        SegmentCost(seconds[steps], units[steps], barriers)
        for steps, barriers in zip(table.segments, table.barriers, strict=True)
    ]


def shares(program: Program, symbols: Mapping[str, int], allowed: int) -> tuple[int, ...]:
    """Threads of every segment: at most ``allowed``, at most the cores this process may use."""
    most = min(allowed, len(os.sched_getaffinity(0)))
    if most <= 1:
        return (1,) * program.segments
    return tuple(stretch.threads(most) for stretch in stretches(program, symbols))
