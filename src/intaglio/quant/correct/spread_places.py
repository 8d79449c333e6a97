"""Evenly spread places in a tensor, for samples of its values."""

from __future__ import annotations

import torch

GOLDEN_RATIO = 0.6180339887498949
"""Multiples of it modulo 1 are spread evenly, whatever their number, and do not keep to the columns of an image."""


def spread_places(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Return for each of consecutive numbers a place below ``size``; any run of numbers is spread evenly."""
    return (numbers.double() * GOLDEN_RATIO % 1 * size).long().clamp_max(size - 1)
