"""Thread counts: a cost model of the segments of a program, and the fewest threads that come close to the best time.

    time(threads) = start + delay + barriers
                    + sum over steps of (step + work / rate / threads as far as its units divide)

The constants were measured on two cores of an AMD EPYC (family 25, 2.6 GHz); benchmarks/scale.py compares predictions
and measurements. Nothing is timed at run time, and results do not depend on the number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from intaglio.ir import Program, evaluator
from intaglio.native.cpu import IsaName

MACS_PER_SECOND: Mapping[str, float] = {
    IsaName.AMX_INT8: 500e9,
    IsaName.AVX512VNNI: 220e9,
    IsaName.AVXVNNI: 160e9,
    IsaName.AVX2: 72e9,
    IsaName.NEON_I8MM: 72e9,
    IsaName.NEON_DOT: 72e9,
    IsaName.PORTABLE: 7.3e9,
}
"""Rate of one thread in convolutions of 16 channels or more (CIFAR ResNet-20 and ResNet-18). Those of AArch64 are
assumed, not measured; those of AMX and AVX-VNNI were measured on a Xeon, the latter rounded down (ResNet-50: 177e9)."""

BYTES_PER_SECOND = 24e9
"""Rate at which one thread reads and writes activations in addition. Quantize reaches 44e9, max_pool 80e9, and the
whole MobileNetV2 this rate."""

STEP_SECONDS = 0.1e-6
"""Seconds of a step before its first tile."""

START_SECONDS = 5e-6
"""Seconds until the other threads work: 0.2e-6 while they still spin for the next call, 30e-6 to 200e-6 once they
sleep."""

ISLAND_DELAY_SECONDS = 300e-6
"""Seconds by which the other threads begin later in a program whose float islands have layers, where it cannot run in
PyTorch's threads. They sleep while PyTorch computes an island, and PyTorch's threads then spin on their cores for
milliseconds. Measured as 120e-6 to 320e-6 per
segment in MobileNetV3 and MiniLM with 10 to 49 islands, on two cores of a Xeon with AMX."""

BARRIER_SECONDS, BARRIER_SECONDS_PER_THREAD = 0.08e-6, 0.04e-6
"""Seconds of a barrier, and for each thread that waits at it. Two threads were measured (0.05e-6 without work in
between, 0.15e-6 for cache line transfer and late arrival); the increase is an estimate for cores of one socket."""

TIME_TOLERANCE = 1.02
"""More threads are used only if they save more than 2 % of the time, because they take cores from other work."""


MAX_DECISIONS = 1024
"""Number of decisions that are kept for a program."""


@dataclass(frozen=True)
class SegmentCost:
    """Cost of a segment at given sizes.

    Attributes:
        seconds: f64[steps], time of each step on one thread.
        units: f64[steps], number of units that each step can be divided into.
        barriers: number of barriers between the steps.
        delay: seconds by which the other threads begin later than `START_SECONDS`.
    """

    seconds: np.ndarray
    units: np.ndarray
    barriers: int
    delay: float = 0.0

    def times(self, most: int) -> np.ndarray:
        """Return the predicted seconds with 1 to ``most`` threads, f64[most]."""
        counts = np.arange(1, most + 1)
        largest = np.ceil(self.units / counts[:, None]) / self.units
        shared = (self.seconds * largest).sum(1) + STEP_SECONDS * len(self.seconds)
        begin = START_SECONDS + self.delay
        others = begin + self.barriers * (BARRIER_SECONDS + BARRIER_SECONDS_PER_THREAD * counts)
        return shared + np.where(counts > 1, others, 0)

    def time(self, threads: int) -> float:
        """Return the predicted seconds with this number of threads."""
        return float(self.times(threads)[-1])

    def threads(self, most: int) -> int:
        """Return the fewest threads, up to ``most``, whose time is close to the best."""
        times = self.times(most)
        return int(np.argmax(times <= TIME_TOLERANCE * times.min())) + 1


@dataclass(frozen=True)
class _CostExpressions:
    """Compiled cost expressions of a program.

    Attributes:
        evaluate: function of the dynamic dimensions that returns MACs, bytes and units of every step.
        segments: indices of the steps of every segment.
        barriers: number of barriers of every segment.
        chosen: numbers of threads of every segment, by the largest number, the delay and the rounded sizes of dynamic
            dimensions.
    """

    evaluate: Callable[..., tuple[int, ...]]
    segments: tuple[np.ndarray, ...]
    barriers: tuple[int, ...]
    chosen: dict[tuple[float, ...], tuple[int, ...]] = field(default_factory=dict)


_EXPRESSIONS: WeakKeyDictionary[Program, _CostExpressions] = WeakKeyDictionary()
"""Cost expressions by program, compiled once."""


def _expressions_of(program: Program) -> _CostExpressions:
    """Return the cost expressions of a program, compiled at the first call."""
    found = _EXPRESSIONS.get(program)
    if found is None:
        costs = [step.cost for step in program.steps]
        evaluate = evaluator([dim for cost in costs for dim in (cost.macs, cost.bytes, cost.units)], program.symbols)
        segments = tuple(
            np.array([i for i, cost in enumerate(costs) if cost.segment == segment], np.intp)
            for segment in range(program.segments)
        )
        groups = [len({costs[i].barrier_group for i in steps}) for steps in segments]
        found = _EXPRESSIONS[program] = _CostExpressions(
            evaluate, segments, tuple(max(count - 1, 0) for count in groups)
        )
    return found


def segment_costs(program: Program, symbols: Mapping[str, int], delay: float = 0.0) -> list[SegmentCost]:
    """Return the cost of every segment, whose other threads begin later by a number of seconds."""
    table = _expressions_of(program)
    found = table.evaluate(*[symbols[name] for name in program.symbols])
    macs, moved, units = np.array(found, np.float64).reshape(-1, 3).T
    seconds = macs / MACS_PER_SECOND[program.isa] + moved / BYTES_PER_SECOND
    units = np.maximum(units, 1)
    return [
        SegmentCost(seconds[steps], units[steps], barriers, delay)
        for steps, barriers in zip(table.segments, table.barriers, strict=True)
    ]


def thread_counts(program: Program, symbols: Mapping[str, int], allowed: int, delay: float = 0.0) -> tuple[int, ...]:
    """Return the number of threads for every segment, at most ``allowed`` and at most the cores this process may use.

    Sizes above 64 are rounded up by a sixteenth at most, so that the steps of a decoder, whose past grows, share one
    decision.
    """
    most = min(allowed, len(os.sched_getaffinity(0)))
    if most <= 1:
        return (1,) * program.segments
    rounded = {name: _rounded(symbols[name]) for name in program.symbols}
    chosen, key = _expressions_of(program).chosen, (most, delay, *rounded.values())
    if key not in chosen:
        if len(chosen) >= MAX_DECISIONS:
            chosen.clear()
        chosen[key] = tuple(cost.threads(most) for cost in segment_costs(program, rounded, delay))
    return chosen[key]


def _rounded(size: int) -> int:
    """Return a size rounded up to five significant bits."""
    step = 1 << max(size.bit_length() - 5, 0) if size > 64 else 1
    return -(-size // step) * step
