"""From statistics to a range: every method takes ``(statistics, qmin, qmax)`` and gives ``(low, high)`` around zero."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from intaglio import numerics
from intaglio.native.statistics import HALF
from intaglio.quant.statistics import Statistics

F64 = NDArray[np.float64]
Range = tuple[float, float]
Method = Callable[[Statistics, int, int], Range]

COARSE = 3
"""Shrunk ranges first tried are ``2^(-i / COARSE)`` of the full one."""
SMALLEST_OCTAVES = 8
"""... down to 2^-8, where a u8 step is as narrow as a bin."""
REFINEMENTS = (1 / 6, 1 / 12, 1 / 24, 1 / 48)
"""Then each end moves by these octaves, both ways, once each."""


def minmax(statistics: Statistics, qmin: int = 0, qmax: int = 255) -> Range:
    """The smallest and largest finite value, widened to hold 0; (0, 0) when there is none."""
    return min(statistics.low, 0.0), max(statistics.high, 0.0)


def mse(statistics: Statistics, qmin: int = 0, qmax: int = 255) -> Range:
    """The range within min-max that loses least: mean squared distance of values to their quantized selves.

    Searched from coarse to fine over the histogram, both ends together and each alone. Min-max stays where the gain is
    below what a bin's width can hide, and where there are at most two bins, whose shape is unknown.
    """
    full = minmax(statistics)
    histogram = _Histogram.of(statistics)
    if histogram.centres.size <= 2:
        return full
    search = _Search(histogram, full, qmin, qmax)
    start = search.error
    search.run()
    return search.range if start - search.error > histogram.hidden else full


METHODS: dict[str, Method] = {"minmax": minmax, "mse": mse}


@dataclass(frozen=True)
class _Histogram:
    """Occupied bins in units of 2^exponent; the end bins reach no further than the extrema."""

    centres: F64
    counts: F64
    exponent: int

    @classmethod
    def of(cls, statistics: Statistics) -> _Histogram:
        occupied = np.flatnonzero(statistics.bins)
        left = (occupied - HALF).astype(np.float64)
        low, high = (math.ldexp(end, -statistics.exponent) for end in minmax(statistics))
        centres = (np.maximum(left, low) + np.minimum(left + 1, high)) / 2
        return cls(centres, statistics.bins[occupied].astype(np.float64), statistics.exponent)

    @property
    def hidden(self) -> float:
        """Squared distance of a value to its bin's centre, at most, summed over all."""
        return float(self.counts.sum()) / 4

    def error(self, low: float, high: float, qmin: int, qmax: int) -> float:
        """Squared error of the range, summed over all values at their bin's centre; zeros cost nothing.

        What values vary within a bin adds the same to every range and is left out.
        """
        scale, zero_point = numerics.affine(low, high, qmin, qmax)
        step = math.ldexp(scale, -self.exponent)
        levels = np.rint(self.centres / step)
        np.clip(levels, qmin - zero_point, qmax - zero_point, out=levels)
        levels *= step
        levels -= self.centres
        levels *= levels
        levels *= self.counts
        return float(levels.sum())


class _Search:
    """Best range so far: its ends are ``2^-octaves`` of the full range's ends."""

    def __init__(self, histogram: _Histogram, full: Range, qmin: int, qmax: int) -> None:
        self.histogram, self.full, self.qmin, self.qmax = histogram, full, qmin, qmax
        self.octaves = (0.0, 0.0)
        self.error = self._error(self.octaves)

    @property
    def range(self) -> Range:
        return self._range(self.octaves)

    def run(self) -> None:
        coarse = [i / COARSE for i in range(1, SMALLEST_OCTAVES * COARSE + 1)]
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
        error = self._error(octaves)
        if error < self.error:
            self.octaves, self.error = octaves, error

    def _range(self, octaves: tuple[float, float]) -> Range:
        low, high = (end * 2.0**-shrink for end, shrink in zip(self.full, octaves, strict=True))
        return low, high

    def _error(self, octaves: tuple[float, float]) -> float:
        return self.histogram.error(*self._range(octaves), self.qmin, self.qmax)
