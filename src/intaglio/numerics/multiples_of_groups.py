"""Integer multiples that neighbouring weights share: an int8 weight is a value of few bits times the multiple of its
group."""

from __future__ import annotations

import numpy as np

LARGEST_MULTIPLE = 16
"""Largest multiple that files can hold."""


def smallest_multiples(groups: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return the smallest divisor of each group that brings its values into ``low..high``, or 1 if none does.

    Args:
        groups: s16[c, groups, size].
        low: Smallest value.
        high: Largest value.

    Returns:
        s16[c, groups], from 1 to ``LARGEST_MULTIPLE``.
    """
    common, best = np.gcd.reduce(groups, axis=-1), np.ones(groups.shape[:2], np.int16)
    lowest, highest = groups.min(-1), groups.max(-1)
    for multiple in range(LARGEST_MULTIPLE, 0, -1):
        fits = (common % multiple == 0) & (lowest >= low * multiple) & (highest <= high * multiple)
        best = np.where(fits, np.int16(multiple), best)
    return best
