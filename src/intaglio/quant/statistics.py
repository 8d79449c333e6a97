"""What calibration remembers of one tensor: counts that merge exactly, in any order, in fixed memory.

The histogram is dyadic: bins of width 2^exponent aligned at zero, 4096 on each side. The exponent follows from the
largest magnitude seen, and a bin of twice the width is the sum of two, so one pass over all data, any split of it and
any order give the same state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from intaglio.native.statistics import HALF, dyadic_histogram, extrema

LOWEST_EXPONENT = -160
"""Exponent for the smallest float32 denormal, 2^-149, and for no values other than zero."""


def exponent_of(magnitude: float) -> int:
    """Smallest k with ``magnitude * 2^-k < HALF``, for a finite float32 magnitude; zero has the lowest there is."""
    if magnitude == 0:
        return LOWEST_EXPONENT
    return math.frexp(magnitude)[1] - (HALF.bit_length() - 1)


def widen(bins: NDArray[np.int64], steps: int) -> NDArray[np.int64]:
    """Bins of width w -> bins of width ``2^steps * w``: index ``floor(index / 2)`` from zero, ``steps`` times."""
    if not bins.any():
        return bins
    for _ in range(min(steps, HALF.bit_length())):
        wider = np.zeros_like(bins)
        wider[HALF // 2 : HALF + HALF // 2] = bins.reshape(-1, 2).sum(axis=1)
        bins = wider
    return bins


@dataclass(eq=False)
class Statistics:
    """Mergeable state of one tensor; made empty, then `update`d or `merge`d.

    ``low`` and ``high`` are over finite values (+inf and -inf without one), ``count`` is over all. ``bins`` leaves out
    zeros, NaN and infinities: bin i counts the values in [i - HALF, i - HALF + 1) * 2^exponent.
    """

    count: int = 0
    low: float = math.inf
    high: float = -math.inf
    zeros: int = 0
    nans: int = 0
    infinities: int = 0
    exponent: int = LOWEST_EXPONENT
    bins: NDArray[np.int64] = field(default_factory=lambda: np.zeros(2 * HALF, np.int64), repr=False)

    def update(self, array: ArrayLike, threads: int = 1) -> None:
        """Count the values of a floating-point array of any shape, as float32."""
        values = np.asarray(array)
        if values.dtype.kind != "f":
            raise TypeError(f"statistics are of floating-point values, not {values.dtype}")
        with np.errstate(over="ignore"):
            values = values.astype(np.float32, copy=False)
        seen = extrema(values, threads)
        if seen.count == 0:
            return
        self.count += seen.count
        self.low, self.high = min(self.low, seen.low), max(self.high, seen.high)
        self.zeros += seen.zeros
        self.nans += seen.nans
        self.infinities += seen.infinities
        self._raise_exponent(exponent_of(self.largest))
        dyadic_histogram(values, self.exponent, self.bins, threads)

    @property
    def finite(self) -> int:
        """How many values are neither NaN nor infinite."""
        return self.count - self.nans - self.infinities

    @property
    def largest(self) -> float:
        """Largest magnitude of a finite value; 0 without one."""
        return max(abs(self.low), abs(self.high)) if self.finite else 0.0

    def merge(self, other: Statistics) -> Statistics:
        """The state of both operands' data together; exact, so associative and commutative."""
        exponent = max(self.exponent, other.exponent)
        return Statistics(
            count=self.count + other.count,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            zeros=self.zeros + other.zeros,
            nans=self.nans + other.nans,
            infinities=self.infinities + other.infinities,
            exponent=exponent,
            bins=widen(self.bins, exponent - self.exponent) + widen(other.bins, exponent - other.exponent),
        )

    def copy(self) -> Statistics:
        return self.merge(Statistics())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Statistics) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able and exact: floats as hex strings, only the bins that are not empty, as [index, count]."""
        occupied = np.flatnonzero(self.bins)
        return {
            "count": self.count,
            "low": self.low.hex(),
            "high": self.high.hex(),
            "zeros": self.zeros,
            "nans": self.nans,
            "infinities": self.infinities,
            "exponent": self.exponent,
            "bins": np.stack([occupied, self.bins[occupied]], axis=1).tolist(),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Statistics:
        """The inverse of `to_dict`; ValueError when the counts do not add up."""
        bins = np.zeros(2 * HALF, np.int64)
        if data["bins"]:
            index, counts = np.asarray(data["bins"], np.int64).T
            if index.min() < 0 or index.max() >= bins.size or counts.min() < 0:
                raise ValueError(f"a bin is outside 0..{bins.size - 1} or its count is negative")
            np.add.at(bins, index, counts)
        plain = {name: int(data[name]) for name in ("count", "zeros", "nans", "infinities", "exponent")}
        made = cls(**plain, low=float.fromhex(data["low"]), high=float.fromhex(data["high"]), bins=bins)
        if made.finite - made.zeros != bins.sum() or made.exponent != exponent_of(made.largest):
            raise ValueError("the counts of these statistics do not add up")
        return made

    def _raise_exponent(self, exponent: int) -> None:
        self.bins = widen(self.bins, exponent - self.exponent)
        self.exponent = exponent
