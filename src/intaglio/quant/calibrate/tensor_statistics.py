"""Mergeable statistics of one tensor, in fixed memory: they merge exactly and in any order.

The histogram is dyadic: its bins have a width of 2^exponent and are aligned at zero, with 4096 bins on each side. The
exponent follows from the largest magnitude seen, and a bin of twice the width is the sum of two bins. So one pass over
all data, any split of the data and any order give the same state. A second histogram, the sketch, has 32 bins for each
power of two, from the smallest denormal to the largest float, so that one huge value does not make its bins wider. Sums
are integers in units of the smallest denormal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from intaglio.native.statistics import (
    EXPONENT_BITS,
    HALF_BINS,
    LOWEST_BINARY_EXPONENT,
    SKETCH,
    Int64Array,
    channel_extrema,
    count,
    exact_sum,
    exponent_of,
)

Range = tuple[float, float]

UNIT = 149
"""Sums are integers in units of 2^-UNIT."""
TYPICAL_SHARE = Fraction(9999, 10000)
"""Share of the nonzero values whose magnitude is called usual."""


def widen(bins: Int64Array, steps: int) -> Int64Array:
    """Merge bins of width w into bins of width ``2^steps * w``.

    Each step maps the index, counted from zero, to ``floor(index / 2)``.
    """
    if not bins.any():
        return bins
    for _ in range(min(steps, HALF_BINS.bit_length())):
        wider = np.zeros_like(bins)
        wider[HALF_BINS // 2 : HALF_BINS + HALF_BINS // 2] = bins[::2] + bins[1::2]
        bins = wider
    return bins


def _occupied(bins: Int64Array, zeros: int) -> tuple[int, int]:
    """Return the first and the last bin with values; zeros are in the bin that begins with 0."""
    found = np.flatnonzero(bins)
    first, last = int(found[0]), int(found[-1])
    return (min(first, HALF_BINS), max(last, HALF_BINS)) if zeros else (first, last)


def nearest_rank(share: Fraction, count: int) -> int:
    """Return the nearest rank: the smallest k such that k out of ``count`` are at least that share."""
    return math.ceil(share * count)


@dataclass(frozen=True, eq=False)
class ChannelExtrema:
    """Extrema of each channel along ``axis``, f32[c]; +inf and -inf if a channel has no finite value."""

    axis: int
    low: NDArray[np.float32]
    high: NDArray[np.float32]

    def merge(self, other: ChannelExtrema | None) -> ChannelExtrema | None:
        """Return the extrema over the data of both; ``None`` if `other` is unknown, or if their channels differ."""
        if other is None or (self.axis, self.low.shape) != (other.axis, other.low.shape):
            return None
        return ChannelExtrema(self.axis, np.minimum(self.low, other.low), np.maximum(self.high, other.high))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON, floats as hexadecimal text."""
        low, high = ([float(end).hex() for end in ends] for ends in (self.low, self.high))
        return {"axis": self.axis, "low": low, "high": high}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> ChannelExtrema:
        """Return the extrema that `to_dict` encoded."""
        low, high = (np.array([float.fromhex(end) for end in data[name]], np.float32) for name in ("low", "high"))
        return ChannelExtrema(int(data["axis"]), low, high)


@dataclass(eq=False)
class Statistics:
    """Mergeable statistics of one tensor; it is created empty, then changed by `update` and `merge`.

    Attributes:
        count: number of all values.
        low: smallest finite value, +inf without one.
        high: largest finite value, -inf without one.
        zeros: number of zeros.
        nans: number of NaN.
        infinities: number of infinite values.
        exponent: the width of a bin is 2^exponent.
        bins: bin i counts the finite nonzero values in [i - HALF_BINS, i - HALF_BINS + 1) * 2^exponent.
        sketch: bin i counts the finite nonzero values whose upper float32 bits are i.
        total: exact sum of all finite values, in units of 2^-UNIT.
        samples: number of samples with finite values.
        sample_low: exact sum of the smallest values of samples, in units of 2^-UNIT.
        sample_high: exact sum of the largest values of samples, in units of 2^-UNIT.
        channels: extrema of each channel, if they are kept.
        history: extrema by index of the batch. They are the only part that depends on how the data was cut into
            batches, so equality ignores them.
    """

    count: int = 0
    low: float = math.inf
    high: float = -math.inf
    zeros: int = 0
    nans: int = 0
    infinities: int = 0
    exponent: int = LOWEST_BINARY_EXPONENT
    bins: Int64Array = field(default_factory=lambda: np.zeros(2 * HALF_BINS, np.int64), repr=False)
    sketch: Int64Array = field(default_factory=lambda: np.zeros(SKETCH, np.int64), repr=False)
    total: int = field(default=0, repr=False)
    samples: int = 0
    sample_low: int = field(default=0, repr=False)
    sample_high: int = field(default=0, repr=False)
    channels: ChannelExtrema | None = None
    history: dict[int, Range] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        array: ArrayLike,
        threads: int = 1,
        *,
        samples: int | None = 0,
        channels: int | None = None,
        batch: int | None = None,
    ) -> Statistics:
        """Return the statistics of a floating-point array of any shape, converted to float32.

        Args:
            array: the values.
            threads: number of threads to use.
            samples: the sample axis, or ``None`` if the array is one sample.
            channels: the axis with separate extrema for each channel.
            batch: the index in ``history``; ``None`` for no entry.
        """
        values = np.asarray(array)
        if values.dtype.kind != "f":
            raise TypeError(f"statistics need floating-point values, not {values.dtype}")
        with np.errstate(over="ignore"):
            values = values.astype(np.float32, copy=False)
        if values.size == 0:
            return Statistics()
        kept = None if channels is None else _channels(values, channels, threads)
        if samples is None or values.ndim == 0:
            values = values.reshape(1, -1)
        elif samples:
            values = np.moveaxis(values, samples, 0)
        single = values.size == len(values)  # If a sample is one value, it is both of its extrema.
        found = count(values, 1 if single else len(values), threads)
        finite = found.lows < np.inf
        made = Statistics(
            found.count,
            found.low,
            found.high,
            found.zeros,
            found.nans,
            found.infinities,
            found.exponent,
            found.bins,
            found.sketch,
            found.total,
            int(finite.sum()),
            exact_sum(found.lows[finite]),
            exact_sum(found.highs[finite]),
            kept,
        )
        if single:
            made = replace(made, samples=made.finite, sample_low=found.total, sample_high=found.total)
        if batch is not None and made.finite:
            made.history[batch] = (made.low, made.high)
        return made

    def update(self, array: ArrayLike, threads: int = 1, **axes: int | None) -> None:
        """Add the values of an array; the arguments are those of `of`."""
        vars(self).update(vars(self.merge(Statistics.of(array, threads, **axes))))

    @property
    def finite(self) -> int:
        """Return the number of values that are neither NaN nor infinite."""
        return self.count - self.nans - self.infinities

    def histogram(self, most: int) -> tuple[float, float, tuple[int, ...]] | None:
        """Return the lower end of the first bin, the width of bins, and the number of values in each of at most
        ``most`` bins; ``None`` without finite values. Zeros count in the bin that begins with 0."""
        if not self.finite:
            return None
        bins, exponent = self.bins, self.exponent
        if not bins.any():
            return 0.0, 1.0, (self.zeros,)
        first, last = _occupied(bins, self.zeros)
        while last - first >= most:
            bins, exponent = widen(bins, 1), exponent + 1
            first, last = _occupied(bins, self.zeros)
        counts = bins[first : last + 1].copy()
        if self.zeros:
            counts[HALF_BINS - first] += self.zeros
        width = math.ldexp(1.0, exponent)
        return (first - HALF_BINS) * width, width, tuple(counts.tolist())

    @property
    def largest_magnitude(self) -> float:
        """Return the largest magnitude of a finite value; 0 without one."""
        return max(abs(self.low), abs(self.high)) if self.finite else 0.0

    @property
    def typical_magnitude(self) -> float:
        """Return a magnitude that all but 1 of 10,000 nonzero values do not exceed; it is at most 1/32 too large."""
        magnitudes = self.sketch[: SKETCH // 2] + self.sketch[SKETCH // 2 :]
        reached = np.searchsorted(np.cumsum(magnitudes), nearest_rank(TYPICAL_SHARE, int(magnitudes.sum())))
        return min(sketch_end(int(reached)), self.largest_magnitude)

    @property
    def mean(self) -> float:
        """Return the mean of the finite values, rounded once; 0 without one."""
        return _mean(self.total, self.finite)

    @property
    def mean_extrema(self) -> Range:
        """Return the means over samples of their smallest and largest values, each rounded once."""
        return _mean(self.sample_low, self.samples), _mean(self.sample_high, self.samples)

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics over the data of both; merging is exact, and so associative and commutative."""
        exponent = max(self.exponent, other.exponent)
        history = {**self.history, **other.history}
        for index in self.history.keys() & other.history.keys():
            (low, high), (lower, higher) = self.history[index], other.history[index]
            history[index] = min(low, lower), max(high, higher)
        return Statistics(
            count=self.count + other.count,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            zeros=self.zeros + other.zeros,
            nans=self.nans + other.nans,
            infinities=self.infinities + other.infinities,
            exponent=exponent,
            bins=widen(self.bins, exponent - self.exponent) + widen(other.bins, exponent - other.exponent),
            sketch=self.sketch + other.sketch,
            total=self.total + other.total,
            samples=self.samples + other.samples,
            sample_low=self.sample_low + other.sample_low,
            sample_high=self.sample_high + other.sample_high,
            channels=self._merged_channels(other),
            history=history,
        )

    def _merged_channels(self, other: Statistics) -> ChannelExtrema | None:
        """Return the merged extrema per channel; ``None`` if only one of two nonempty statistics has them."""
        if self.count == 0 or other.count == 0:
            return self.channels or other.channels
        return self.channels and self.channels.merge(other.channels)

    def copy(self) -> Statistics:
        """Return statistics that share no array with these."""
        return self.merge(Statistics())

    def without_counts(self) -> Statistics:
        """Return all except for the contents of the two histograms, which is small enough to be sent as an object."""
        return replace(self, bins=np.zeros(2 * HALF_BINS, np.int64), sketch=np.zeros(SKETCH, np.int64))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Statistics) and self._compared() == other._compared()

    __hash__ = None  # type: ignore[assignment]  # the way of Python's data model

    def _compared(self) -> dict[str, Any]:
        return {**self.to_dict(), "history": None}

    def to_dict(self) -> dict[str, Any]:
        """Return an exact JSON-compatible form: floats are hex strings, occupied bins are [index, count]."""
        return {
            **{name: getattr(self, name) for name in PLAIN_COUNTS},
            **{name: hex(getattr(self, name)) for name in SUMMED_FIELDS},
            "low": self.low.hex(),
            "high": self.high.hex(),
            "bins": _sparse(self.bins),
            "sketch": _sparse(self.sketch),
            "channels": self.channels and self.channels.to_dict(),
            "history": [[index, low.hex(), high.hex()] for index, (low, high) in sorted(self.history.items())],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], complete: bool = True) -> Statistics:
        """Return the inverse of `to_dict`; raise ValueError if ``complete`` and the counts do not add up."""
        made = cls(
            **{name: int(data[name]) for name in PLAIN_COUNTS},
            **{name: int(data[name], 16) for name in SUMMED_FIELDS},
            low=float.fromhex(data["low"]),
            high=float.fromhex(data["high"]),
            bins=_dense(data["bins"], 2 * HALF_BINS),
            sketch=_dense(data["sketch"], SKETCH),
            channels=data["channels"] and ChannelExtrema.from_dict(data["channels"]),
            history={int(index): (float.fromhex(low), float.fromhex(high)) for index, low, high in data["history"]},
        )
        counted = made.finite - made.zeros
        added_up = counted == made.bins.sum() == made.sketch.sum() and made.exponent == exponent_of(
            made.largest_magnitude
        )
        if complete and not added_up:
            raise ValueError("the counts of these statistics do not add up")
        return made


PLAIN_COUNTS = ("count", "zeros", "nans", "infinities", "exponent", "samples")
SUMMED_FIELDS = ("total", "sample_low", "sample_high")


def sketch_end(index: int) -> float:
    """Return the largest magnitude in a bin of the sketch's positive half."""
    bits = min((index + 1) << EXPONENT_BITS, 0x7F800000) - 1
    return math.ldexp((bits & 0x7FFFFF) | (bits >> 23 > 0) << 23, max(bits >> 23, 1) - 150)


def _channels(values: NDArray[np.float32], axis: int, threads: int) -> ChannelExtrema:
    axis %= values.ndim
    outer, inner = math.prod(values.shape[:axis]), math.prod(values.shape[axis + 1 :])
    return ChannelExtrema(axis, *channel_extrema(values, outer, values.shape[axis], inner, threads))


def _mean(total: int, count: int) -> float:
    """Return the mean of values whose sum is in units of 2^-UNIT."""
    return float(Fraction(total, count << UNIT)) if count else 0.0


def _sparse(counts: Int64Array) -> list[list[int]]:
    """Return the counts that are not zero as [index, count]."""
    occupied = np.flatnonzero(counts)
    return np.stack([occupied, counts[occupied]], axis=1).tolist()


def _dense(pairs: list[list[int]], size: int) -> Int64Array:
    """Return the inverse of `_sparse`; raise ValueError for an invalid index or count."""
    counts = np.zeros(size, np.int64)
    if pairs:
        index, found = np.asarray(pairs, np.int64).T
        if index.min() < 0 or index.max() >= size or found.min() < 0:
            raise ValueError(f"a bin is outside 0..{size - 1} or its count is negative")
        np.add.at(counts, index, found)
    return counts
