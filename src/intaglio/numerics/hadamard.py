"""Products with Hadamard matrices, which spread large elements of a row over the others."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from intaglio.numerics.rounding import FloatArray

ELEMENTS_AT_ONCE = 1 << 16
"""Elements that are multiplied at once, which a cache of a core holds with their results."""


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
    found = np.empty(given.shape, np.float32)
    blocks, results = given.reshape(-1, size), found.reshape(-1, size)
    count = max(1, ELEMENTS_AT_ONCE // size)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(blocks), count):
            results[start : start + count] = _butterflies(blocks[start : start + count].T).T
        found *= hadamard_scale(size)
    return found


def _butterflies(columns: FloatArray) -> FloatArray:
    """Multiply f32[size, blocks], a block in each column, by the Hadamard matrix of 1 and -1."""
    given, size = np.array(columns, order="C"), len(columns)  # a copy, which is overwritten
    distance, result = 1, np.empty_like(given)
    while distance < size:
        shape = size // (2 * distance), 2, distance, -1
        pairs, found = given.reshape(shape), result.reshape(shape)
        np.add(pairs[:, 0], pairs[:, 1], out=found[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=found[:, 1])
        given, result = result, given
        distance *= 2
    return given
