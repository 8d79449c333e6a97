"""Division of samples into a part that corrections are fitted to and a part that validates them.

A correction that is fitted to few samples, or to many that are alike, may fit these only. Samples that differ little or
not at all belong to the same part, because otherwise they would validate what was fitted to them. The parts
depend on the contents of samples only, so that every division of the data among processes gives the same parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from intaglio.quant.correct.second_moments import Moments
from intaglio.quant.correct.spread_places import spread_places

CROSSED_SAMPLES = 64
"""Number of samples below which two halves validate each other; otherwise an eighth of the samples validates."""
VALIDATED_ROWS = 256
"""Number of rows of a weight that suffice to decide whether its fit generalizes."""
PROJECTED = 4096
"""Largest number of elements of a sample that are compared."""
INTERVALS = 9
"""Number of intervals between the quartiles. It is odd, so that two samples are in different halves."""
ALIKE = 150
"""Difference of the quartiles, for each root of the number of elements, up to which all samples count as copies. It is
larger than that of samples whose elements differ by one quantized value."""
SPREAD = 8
"""Length of the interval of such samples, as a multiple of that difference."""


@dataclass(frozen=True)
class ValidationSplit:
    """A division of samples by projections of their elements on a line, which is cut into intervals.

    Attributes:
        origin: an end of an interval.
        width: length of an interval.
        parts: an interval in so many holds samples that validate.
    """

    origin: int
    width: int
    parts: int

    @staticmethod
    def of(projections: torch.Tensor, elements: int) -> ValidationSplit:
        """Return the division for the projections of all samples, int64, which have so many elements each."""
        ordered = projections.sort().values
        count = len(ordered)
        low, high = (int(ordered[place]) for place in (count // 4, 3 * count // 4)) if count else (0, 0)
        alike = ALIKE * math.isqrt(min(elements, PROJECTED))
        width = (high - low) // INTERVALS if high - low > alike else SPREAD * alike
        return ValidationSplit(low - width // 2, width, 2 if count < CROSSED_SAMPLES else 8)

    @property
    def crossed(self) -> bool:
        """Return whether both parts are halves, which validate each other."""
        return self.parts == 2

    def validates(self, batch: torch.Tensor) -> torch.Tensor:
        """Return bool[samples], true for the samples of u8[samples, ...] that validate."""
        return self.selects(project(batch))

    def selects(self, projections: torch.Tensor) -> torch.Tensor:
        """Return the same for the projections of samples."""
        return (projections - self.origin) // self.width % self.parts == 0


def project(batch: torch.Tensor) -> torch.Tensor:
    """Return the projections of samples u8[samples, ...] on one line, int64[samples]; they are exact."""
    size = batch[:1].numel()
    count = min(size, PROJECTED)
    places = torch.arange(count)
    if count == PROJECTED:
        places = spread_places(places, size)
    line = torch.randint(-128, 128, (count,), generator=torch.Generator().manual_seed(0))
    index: tuple[Any, ...] = (slice(None), *torch.unravel_index(places, batch.shape[1:]))
    elements = batch[index]
    return (elements.double() @ line.double()).long()


@dataclass(frozen=True)
class SplitMoments:
    """Moments of the samples that corrections are fitted to, and of those that validate them.

    If they are halves, ``crossed``, both validate what is fitted to the other.
    """

    fitted: Moments
    validating: Moments
    crossed: bool

    @property
    def both(self) -> tuple[Moments, Moments]:
        """Return the moments of both parts."""
        return self.fitted, self.validating

    @property
    def directions(self) -> tuple[tuple[int, int], ...]:
        """Return pairs of places in ``both``: of a part to fit to and of the part that validates it."""
        return ((0, 1), (1, 0)) if self.crossed else ((0, 1),)

    def errors(self, rows: torch.Tensor) -> float:
        """Return the sum of ``row M row^T`` over float64 [groups, rows, k], where M are the moments of all samples."""
        return sum(part.errors(rows).sum().item() for part in self.both)

    @cached_property
    def whole(self) -> Moments:
        """Return the moments of all samples."""
        return self.fitted + self.validating


def mean_generalizes(sums: tuple[torch.Tensor, ...], counts: tuple[int, ...], crossed: bool) -> bool:
    """Return whether subtracting the mean of one part of some values from another part reduces their squares.

    Args:
        sums: sums over both parts, one for each channel.
        counts: numbers of values of both parts.
        crossed: whether to subtract the mean of the second part from the first, too.
    """
    if not all(counts):
        return False
    gain = 0.0
    for own, other in ((0, 1), (1, 0)) if crossed else ((0, 1),):
        mean = sums[own] / counts[own]
        gain += (2 * mean * sums[other] - counts[other] * mean.square()).sum().item()
    return gain > 0
