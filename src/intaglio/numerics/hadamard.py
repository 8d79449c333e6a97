"""Products with Hadamard matrices, which spread large elements of a row over the others."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from intaglio.numerics.rounding import FloatArray


def hadamard_scale(size: int) -> np.float32:
    """Return the factor that makes a Hadamard matrix of 1 and -1 orthogonal."""
    return np.float32(1 / math.sqrt(size))


def hadamard(x: ArrayLike, size: int) -> FloatArray:
    """Multiply each block of a row of f32[..., C] by the orthogonal Hadamard matrix of Sylvester.

    Neighbours at distances of 1, 2, 4 and so on are replaced by their sum and their difference, in float32 and in this
    order, and the results are multiplied by `hadamard_scale`. The matrix is its own inverse.

    Args:
        x: Values f32[..., C].
        size: Size of the blocks, a power of two that divides C.
    """
    given = np.asarray(x, np.float32)
    found = given.reshape(*given.shape[:-1], given.shape[-1] // size, size)
    distance = 1
    with np.errstate(over="ignore", invalid="ignore"):
        while distance < size:
            pairs = found.reshape(*found.shape[:-1], size // (2 * distance), 2, distance)
            first, second = pairs[..., 0, :], pairs[..., 1, :]
            found = np.stack([first + second, first - second], -2).reshape(found.shape)
            distance *= 2
        scaled: FloatArray = (found * hadamard_scale(size)).reshape(given.shape)
    return scaled
