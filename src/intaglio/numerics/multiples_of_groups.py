"""Integer multiples that neighbouring weights share: an int8 weight is a value of few bits times the multiple of its
group."""

from __future__ import annotations

from functools import cache

import numpy as np

LARGEST_MULTIPLE = 16
"""Largest multiple that files can hold."""
WEIGHTS_AT_ONCE = 1 << 21
"""Number of weights that are looked up at a time, so that the results stay in cache."""


def smallest_multiples(groups: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return the smallest divisor of each group that brings its values into ``low..high``, or 1 if none does.

    Args:
        groups: s8[c, groups, size].
        low: Smallest value.
        high: Largest value.

    Returns:
        u8[c, groups], from 1 to ``LARGEST_MULTIPLE``.
    """
    divisors, rows = _divisors(low, high), groups.reshape(-1, groups.shape[-1]).view(np.uint8)
    common, step = np.empty(len(rows), np.uint16), max(WEIGHTS_AT_ONCE // max(groups.shape[-1], 1), 1)
    for start in range(0, len(rows), step):
        np.bitwise_and.reduce(divisors.take(rows[start : start + step]), axis=1, out=common[start : start + step])
    lowest = common & -common
    return np.where(common, np.log2(np.maximum(lowest, 1)) + 1, 1).astype(np.uint8).reshape(groups.shape[:-1])


@cache
def _divisors(low: int, high: int) -> np.ndarray:
    """Return u16[256]: for each int8 value, read as uint8, bit ``m - 1`` is set if it is ``m`` times a value in
    ``low..high``."""
    values = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int16)
    found = np.zeros(256, np.uint16)
    for multiple in range(1, LARGEST_MULTIPLE + 1):
        fits = (values % multiple == 0) & (values >= low * multiple) & (values <= high * multiple)
        found |= fits.astype(np.uint16) << (multiple - 1)
    return found
