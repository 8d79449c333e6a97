"""Count values outside of the range of their quantization parameters. `native/base/clipping.h` is the C++ counterpart.

A value is outside if rounding moves it by more than half a quantized value, because the nearest one is beyond the
bounds. Parameters of a range are stored in float32, which may move its ends by a few millionths of its width; an
element there is not outside. NaN is outside. Values that mask others out, such as -1e9 or -inf in attention masks,
are not counted: ranges leave them out on purpose.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from intaglio.numerics.rounding import reciprocal

LARGEST_MASK = -9984.0
"""Largest value that counts as a mask; half-precision models write -10000."""
ROUNDING = 2.0**-22
"""Largest error of an end of a range in units of the scale, in widths of the range: scale, reciprocal and product are
each off by at most 2 ** -24."""
MASK_RANGES = 8
"""Distance of masks below the lower end of the range, in widths of the range."""


class ClipBounds(NamedTuple):
    """Bounds in units of the scale: values from ``least`` to ``most`` are in range, and those up to ``masked`` are
    masks."""

    least: float
    most: float
    masked: float


def clip_bounds(scale: float, zero_point: int, low: int, high: int) -> ClipBounds:
    """Return the bounds on ``float32(x) * (1 / scale)`` for quantized values from ``low`` to ``high``."""
    half = 0.5 + ROUNDING * (high - low)
    least, most = low - zero_point - half, high - zero_point + half
    mask = float(np.float32(LARGEST_MASK) * reciprocal(scale))
    return ClipBounds(least, most, min(mask, least - MASK_RANGES * (high - low)))


def count_clipped(x: ArrayLike, scale: float, zero_point: int, low: int, high: int) -> int:
    """Return the number of values outside of the range.

    Args:
        x: Values, any shape.
        scale: Distance between neighbouring quantized values.
        zero_point: Quantized value of 0.
        low: Smallest quantized value.
        high: Largest quantized value.
    """
    bounds = clip_bounds(scale, zero_point, low, high)
    with np.errstate(over="ignore", invalid="ignore"):
        steps = np.asarray(x, np.float32) * reciprocal(scale)
        known = ((steps >= bounds.least) & (steps <= bounds.most)) | (steps <= np.float32(bounds.masked))
    return int(np.size(known) - np.count_nonzero(known))
