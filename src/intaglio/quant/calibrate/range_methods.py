"""Range methods, which choose a quantization range from statistics: ``(statistics, qmin, qmax) -> (low, high)``.

A range always contains zero and never exceeds the smallest and largest finite value. All methods read the same
statistics, so a change of the method needs no new calibration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np
from numpy.typing import NDArray

from intaglio import numerics
from intaglio.errors import did_you_mean
from intaglio.ir import QParams
from intaglio.native.statistics import HALF_BINS, MANTISSA_BITS, SKETCH, exponent_of
from intaglio.quant.calibrate.tensor_statistics import Range, Statistics, nearest_rank, sketch_end

F64 = NDArray[np.float64]
Method = Callable[[Statistics, int, int], Range]

STEPS_PER_OCTAVE = 3
"""The search first tries ranges of ``2^(-i / STEPS_PER_OCTAVE)`` times the full range."""
SMALLEST_OCTAVES = 8
"""The smallest range tried is 2^-8 of the full range, at which a u8 step is as narrow as a histogram bin."""
REFINEMENTS = (1 / 6, 1 / 12, 1 / 24, 1 / 48)
"""Steps in octaves by which the search then moves each end once in both directions."""
OUTLIER_RATIO = 1e3
"""Values this many times as large as usual ones are outliers: in range, they leave usual values less than a step."""
PARTS_PER_BIN = 8
"""Number of parts that a bin of the sketch is split into for the search, with its values spread evenly over them."""
UNMASKED, MASKED = ((127 + 10) << MANTISSA_BITS), ((127 + 13) << MANTISSA_BITS) + 7
"""Bins of the sketch: logits end in that of 2^10, and masks begin in that of 9984 = 1.21875 * 2^13."""
MASK_DISTANCE, MASK_DISTANCE_FROM_ZEROS = 16.0, 1024.0
"""Distance from the smallest other value to the lower end, where masked values are clipped to.

After softmax they are e^-16 times as large as that value, or less. The second distance is used if all other values are
zero.
"""
PERCENTILE = Fraction("99.999")
"""Default of ``percent``: at each end, at most 0.001 % of the values are outside of the range."""
SMOOTHING = 0.01
"""Default weight of a new batch in the exponential moving average."""


def minmax(statistics: Statistics, qmin: int = 0, qmax: int = 255) -> Range:
    """Return the smallest and largest finite value, widened to contain 0; (0, 0) without finite values."""
    return min(statistics.low, 0.0), max(statistics.high, 0.0)


def mse(statistics: Statistics, qmin: int = 0, qmax: int = 255) -> Range:
    """Return the range within min-max with the least mean squared quantization error.

    The search goes from coarse to fine over the histogram, first with both ends together, then with each alone. The
    result is min-max if the gain is below what the width of a bin can hide, or if there are at most two bins, whose
    shape is unknown. Values `OUTLIER_RATIO` times as large as usual ones are left out, because a sum of squares would
    never clip one value to make all others more precise.
    """
    histogram = _Histogram.of(statistics)
    return _search(histogram, partial(histogram.squared_error, qmin=qmin, qmax=qmax), histogram.undetectable_error)


def kl(statistics: Statistics, qmin: int = 0, qmax: int = 255) -> Range:
    """Return the range within min-max with the least Kullback-Leibler divergence.

    The divergence is from the distribution of the nonzero values, clipped to the range, to the distribution that is
    left after quantization, in which the values that round to the same quantized value are spread evenly over their
    bins and clipped values are missing. A share c of clipped values thus adds at least ``-log(1 - c)``; otherwise a
    range around a single bin, whose distributions are equal, would have no divergence. The search is that of `mse`.
    """
    histogram = _Histogram.of(statistics)
    return _search(histogram, partial(histogram.divergence, qmin=qmin, qmax=qmax))


def percentile(statistics: Statistics, qmin: int = 0, qmax: int = 255, percent: Fraction = PERCENTILE) -> Range:
    """Return the range that excludes as many values at each end as ``percent`` allows, by nearest rank.

    Of N finite values the upper end is the one that ``ceil(percent / 100 * N)`` values do not exceed, rounded outwards
    to the end of its bin in the finer one of both histograms. The lower end mirrors it. The result is min-max for 100,
    and for tails of less than one value.
    """
    outliers = statistics.finite - nearest_rank(percent / 100, statistics.finite)
    bins, sketch = statistics.bins, statistics.sketch
    ends = []
    for dyadic, upper in ((bins[:HALF_BINS][::-1], sketch[SKETCH // 2 :]), (bins[HALF_BINS:], sketch[: SKETCH // 2])):
        edges = (
            math.ldexp(_bin_of_tail(dyadic, outliers) + 1, statistics.exponent),
            sketch_end(_bin_of_tail(upper, outliers)),
        )
        ends.append(min(edges) if outliers < upper.sum() else 0.0)
    return _within(-ends[0], ends[1], statistics)


def average(statistics: Statistics, qmin: int = 0, qmax: int = 255) -> Range:
    """Return the range from the mean of the samples' smallest values to the mean of their largest values.

    Without samples it is min-max.
    """
    if not statistics.samples:
        return minmax(statistics)
    return _within(*statistics.mean_extrema, statistics)


def ema(statistics: Statistics, qmin: int = 0, qmax: int = 255, weight: float = SMOOTHING) -> Range:
    """Return the exponential moving average of the extrema of batches, in the order of their indices.

    This is the only method whose result depends on how the data was cut into batches, and on their order. Statistics
    that were collected outside of calibration have no batches and count as one.
    """
    batches = [ends for _, ends in sorted(statistics.history.items())] or [minmax(statistics)]
    low, high = batches[0]
    for lower, higher in batches[1:]:
        low, high = low + weight * (lower - low), high + weight * (higher - high)
    return _within(low, high, statistics)


METHODS: dict[str, Method] = {
    "minmax": minmax,
    "mse": mse,
    "percentile": percentile,
    "kl": kl,
    "average": average,
    "ema": ema,
}
"""Range methods by name."""


def method_of(text: str) -> Method:
    """Return the method for a name with an optional parameter after a colon: ``percentile:99.99``, ``ema:0.1``.

    Raises:
        ValueError: if the method does not exist, or does not take this parameter.
    """
    name, colon, parameter = str(text).partition(":")
    if name not in METHODS:
        parts = [f"unknown method {name!r}; known are {', '.join(METHODS)}", did_you_mean(name, METHODS)]
        raise ValueError("; ".join(filter(None, parts)))
    if not colon:
        return METHODS[name]
    if name not in LIMITS:
        raise ValueError(f"method {name!r} takes no parameter; only {' and '.join(LIMITS)} do")
    most = LIMITS[name]
    try:
        value = Fraction(parameter)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"method {text!r}: {parameter!r} is not a number") from error
    if not 0 < value <= most:
        raise ValueError(f"method {text!r}: its parameter must be above 0 and at most {most}")
    return partial(percentile, percent=value) if name == "percentile" else partial(ema, weight=float(value))


LIMITS = {"percentile": 100, "ema": 1}
"""Methods that take a parameter -> its largest value."""


def channel_ranges(statistics: Statistics, method: Method, qmin: int = 0, qmax: int = 255) -> list[Range]:
    """Return a range for each channel: its extrema, clipped to the range that the method chooses for the whole tensor.

    Raises:
        ValueError: if the statistics have no extrema per channel.
    """
    if statistics.channels is None:
        raise ValueError("these statistics have no minimum and maximum per channel")
    low, high = method(statistics, qmin, qmax)
    lows, highs = statistics.channels.low, statistics.channels.high
    return [(max(min(float(a), 0.0), low), min(max(float(b), 0.0), high)) for a, b in zip(lows, highs, strict=True)]


def contains_mask(statistics: Statistics) -> bool:
    """Return whether the values contain an attention mask: large negative values among far smaller ones."""
    negative = statistics.sketch[SKETCH // 2 :]
    common = negative[MASKED:].sum() * 10_000 > statistics.finite
    return bool(common) and not negative[UNMASKED:MASKED].any() and not statistics.sketch[UNMASKED : SKETCH // 2].any()


def without_mask(method: Method) -> Method:
    """Return the method for operands of a softmax: it ignores mask values and extends the range below the other values.

    Masked values are clipped to the lower end, which is low enough for softmax to return about zero. If all other
    values are zero, the range is extended by more than logits ever differ, which costs no precision.
    """

    def of_others(statistics: Statistics, qmin: int, qmax: int) -> Range:
        if not contains_mask(statistics):
            return method(statistics, qmin, qmax)
        others = _unmasked_statistics(statistics)
        low, high = method(others, qmin, qmax)
        return low - (MASK_DISTANCE if others.largest_magnitude else MASK_DISTANCE_FROM_ZEROS), high

    return of_others


def _unmasked_statistics(statistics: Statistics) -> Statistics:
    """Return statistics of the values that do not belong to a mask, read from the sketch.

    Each value counts as the outer end of its bin.
    """
    sketch = statistics.sketch.copy()
    sketch[SKETCH // 2 + MASKED :] = 0
    ends = np.array([sketch_end(index) for index in range(UNMASKED)], np.float64)
    positive, negative = sketch[:UNMASKED], sketch[SKETCH // 2 : SKETCH // 2 + UNMASKED]
    values, counts = np.concatenate([ends, -ends]), np.concatenate([positive, negative])
    low, high = (float(values[counts > 0].min(initial=0)), float(values[counts > 0].max(initial=0)))
    exponent = exponent_of(max(-low, high))
    bins = np.zeros(2 * HALF_BINS, np.int64)
    np.add.at(bins, np.floor(np.ldexp(values[counts > 0], -exponent)).astype(np.int64) + HALF_BINS, counts[counts > 0])
    kept = statistics.zeros + int(counts.sum())
    return Statistics(kept, low, high, statistics.zeros, exponent=exponent, bins=bins, sketch=sketch)


def rounding_decibels(statistics: Statistics, q: QParams) -> float:
    """Return the signal-to-noise ratio in decibels that rounding values to one scale and zero point gives.

    The noise of values within a step is that of the histogram's bins, or a uniform one if a step has few bins. Zeros
    have no noise.
    """
    histogram = _Histogram.of(statistics)
    low, high = (q.step * (end - q.zero) for end in (q.qmin, q.qmax))
    step = math.ldexp(q.step, -histogram.exponent)
    signal = float((histogram.counts * histogram.centres**2).sum())
    uniform = float(histogram.counts.sum()) * step**2 / 12
    noise = max(histogram.squared_error(low, high, q.qmin, q.qmax), uniform)
    return 10 * math.log10(signal / noise) if signal and noise else math.inf


def _within(low: float, high: float, statistics: Statistics) -> Range:
    """Return the range clipped to min-max, and widened to contain 0."""
    lowest, highest = minmax(statistics)
    return min(max(low, lowest), 0.0) + 0.0, max(min(high, highest), 0.0) + 0.0  # Adding 0.0 turns -0.0 into 0.0.


def _bin_of_tail(counts: NDArray[np.int64], outliers: int) -> int:
    """Return the bin, counted from zero outwards, with at most `outliers` values further out; 0 if there is none."""
    reached = np.cumsum(counts[::-1]) > outliers
    return len(counts) - 1 - int(reached.argmax()) if reached.any() else 0


@dataclass(frozen=True)
class _Histogram:
    """The occupied bins of a histogram in units of 2^exponent, and the range that they cover.

    The first and the last bin are cut off at the ends of the range.
    """

    centres: F64
    counts: F64
    widths: F64
    exponent: int
    full: Range

    @classmethod
    def of(cls, statistics: Statistics) -> _Histogram:
        """Return a histogram of the dyadic bins, or of the sketch if outliers make the dyadic bins too wide."""
        if statistics.largest_magnitude > OUTLIER_RATIO * statistics.typical_magnitude:
            return cls.from_sketch(statistics)
        occupied = np.flatnonzero(statistics.bins)
        left = (occupied - HALF_BINS).astype(np.float64)
        full = minmax(statistics)
        low, high = (math.ldexp(end, -statistics.exponent) for end in full)
        centres = (np.maximum(left, low) + np.minimum(left + 1, high)) / 2
        counts = statistics.bins[occupied].astype(np.float64)
        return cls(centres, counts, np.ones(len(occupied)), statistics.exponent, full)

    @classmethod
    def from_sketch(cls, statistics: Statistics) -> _Histogram:
        """Return a histogram of all values except outliers, from the sketch."""
        counts = statistics.sketch.reshape(2, -1).copy()
        limit = OUTLIER_RATIO * statistics.typical_magnitude
        while (farthest := int(np.flatnonzero(counts.sum(0))[-1])) and sketch_end(farthest) > limit:
            counts[:, farthest] = 0
        parts: list[tuple[F64, F64, F64]] = []
        ends = [0.0, 0.0]
        for sign, of_sign in ((1.0, counts[0]), (-1.0, counts[1])):
            occupied = np.flatnonzero(of_sign)
            if occupied.size:
                ends[sign > 0] = sign * sketch_end(int(occupied[-1]))
            left = np.array([sketch_end(index - 1) if index else 0.0 for index in occupied.tolist()])
            widths = (np.array([sketch_end(index) for index in occupied.tolist()]) - left) / PARTS_PER_BIN
            middles = left[:, None] + widths[:, None] * (np.arange(PARTS_PER_BIN) + 0.5)
            spread = np.repeat(of_sign[occupied] / PARTS_PER_BIN, PARTS_PER_BIN)
            parts.append((sign * middles.reshape(-1), spread, np.repeat(widths, PARTS_PER_BIN)))
        low, high = _within(ends[0], ends[1], statistics)
        centres, spread, widths = (np.concatenate(each) for each in zip(*parts, strict=True))
        return cls(centres, spread, widths, 0, (low, high))

    @property
    def undetectable_error(self) -> float:
        """Return an upper bound of the squared error that the width of the bins can hide, summed over all values."""
        return float((self.counts * self.widths**2).sum()) / 4

    def squared_error(self, low: float, high: float, qmin: int, qmax: int) -> float:
        """Return the squared error of a range, with each value at the centre of its bin; zeros have no error.

        The variance of values within a bin is left out, because it adds the same to every range.
        """
        step, least, most = self._grid(low, high, qmin, qmax)
        values = numerics.round_clamp(self.centres / step, least, most)
        values *= step
        values -= self.centres
        values *= values
        values *= self.counts
        return float(values.sum())

    def divergence(self, low: float, high: float, qmin: int, qmax: int) -> float:
        """Return the Kullback-Leibler divergence of a range in nats, see `kl`; infinite if no bin is inside."""
        step, least, most = self._grid(low, high, qmin, qmax)
        steps = np.rint(self.centres / step)
        inside = (steps >= least) & (steps <= most)
        if not inside.any():
            return math.inf
        index = (steps[inside] - least).astype(np.int64)
        counts, widths = self.counts[inside], self.widths[inside]
        smoothed = np.bincount(index, counts)[index] * widths / np.bincount(index, widths)[index]
        observed, centres = counts.copy(), self.centres[inside]
        observed[centres.argmin()] += self.counts[steps < least].sum()
        observed[centres.argmax()] += self.counts[steps > most].sum()
        observed, smoothed = observed / observed.sum(), smoothed / self.counts.sum()
        return float((observed * np.log(observed / smoothed)).sum())

    def _grid(self, low: float, high: float, qmin: int, qmax: int) -> tuple[float, int, int]:
        """Return the step in units of the bins, and the quantized range relative to the zero point."""
        scale, zero_point = numerics.affine_qparams(low, high, qmin, qmax)
        return math.ldexp(scale, -self.exponent), qmin - zero_point, qmax - zero_point


def _search(histogram: _Histogram, error: Callable[[float, float], float], undetectable_error: float = 0.0) -> Range:
    """Return the best range found, or the full range if the gain is at most ``undetectable_error``."""
    if histogram.centres.size <= 2:
        return histogram.full
    search = _Search(error, histogram.full)
    start = search.error
    search.run()
    return search.range if start - search.error > undetectable_error else histogram.full


class _Search:
    """The best range found so far; at most 100 ranges are tried.

    Its ends are ``2^-octaves`` of those of the full range.
    """

    def __init__(self, error: Callable[[float, float], float], full: Range) -> None:
        self.full, self._error_of = full, error
        self.octaves = (0.0, 0.0)
        self.error = error(*full)

    @property
    def range(self) -> Range:
        return self._range(self.octaves)

    def run(self) -> None:
        """Search shrunk ranges with both ends together, then each end alone, then small steps of each end."""
        coarse = [i / STEPS_PER_OCTAVE for i in range(1, SMALLEST_OCTAVES * STEPS_PER_OCTAVE + 1)]
        ends = [end for end in (0, 1) if self.full[end] != 0]
        for octaves in coarse:
            self._try((octaves, octaves))
        if len(ends) == 2:
            for end in ends:
                for octaves in (0.0, *coarse):
                    self._move(end, octaves)
        for step in REFINEMENTS:
            for end in ends:
                centre = self.octaves[end]
                self._move(end, centre - step)
                self._move(end, centre + step)

    def _move(self, end: int, octaves: float) -> None:
        low, high = self.octaves
        self._try((octaves, high) if end == 0 else (low, octaves))

    def _try(self, octaves: tuple[float, float]) -> None:
        if min(octaves) < 0:
            return
        error = self._error_of(*self._range(octaves))
        if error < self.error:
            self.octaves, self.error = octaves, error

    def _range(self, octaves: tuple[float, float]) -> Range:
        low, high = (end * 2.0**-shrink for end, shrink in zip(self.full, octaves, strict=True))
        return low, high
