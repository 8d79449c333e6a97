"""Sizes of layers that Winograd's method can compute, as native/layers/winograd.cpp has them."""

from __future__ import annotations

MOST_INPUTS = 1024
"""Input channels up to which 32-bit sums cannot overflow."""
POSITIONS, TOGETHER = 16, 6
"""Products of a square of 2 by 2 results for each input and output channel; squares whose sums are in registers."""
MOST_SQUARES = 96
"""Maximum number of squares whose inputs are transformed at a time."""
TRANSFORMED = 1 << 17
"""Maximum number of sums of inputs in memory at a time."""


def most_squares(inputs: int) -> int:
    """Return the largest number of squares of 2 by 2 results in a line of a layer with so many input channels."""
    return min(MOST_SQUARES, TRANSFORMED // (POSITIONS * inputs)) // TOGETHER * TOGETHER
