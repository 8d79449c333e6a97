"""Orthogonal matrices that spread large channels over all channels: randomized Hadamard matrices.

A Hadamard matrix has entries of 1 and -1 and orthogonal rows. Sizes are powers of two (Sylvester), or a power of two
times the order of a matrix of Paley's constructions, such as 12, 20, 28, 36, 44, 60 or 108.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch

SEED = 0
"""Seed of the signs and of random matrices, the same for all models, so that a rotation is known by its size."""
ROTATED_ELEMENTS = 1 << 17
"""Number of elements of the blocks of rows that are multiplied at once."""
MOST_SYLVESTER = 64
"""Largest Hadamard matrix by Sylvester that is multiplied at once; larger ones are products of several."""


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix Q, which is determined by its size.

    Attributes:
        size: number of rows and columns.
        keeps_mean: whether the mean of x Q is that of x for each vector x, as layer norms need it.
    """

    size: int
    keeps_mean: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Q for float64 [..., size]."""
        factors = hadamard_factors(self.size)
        if not factors:
            return x @ self._dense
        if not self.keeps_mean:
            return _multiplied(x * self._signs, factors) / math.sqrt(self.size)
        # The first row and column are ones, and the first sign is 1, so that a vector of equal elements stays the same.
        spectrum = _multiplied(x, [factor.t() for factor in factors]) * self._signs
        return _multiplied(spectrum, factors) / self.size

    @cached_property
    def _signs(self) -> torch.Tensor:
        """Return random signs, the first of which is 1."""
        signs = np.random.RandomState(SEED).randint(0, 2, self.size) * 2.0 - 1.0
        signs[0] = 1.0
        return torch.from_numpy(signs)

    @cached_property
    def _dense(self) -> torch.Tensor:
        """Return a random orthogonal matrix that keeps the mean, for sizes without a known Hadamard matrix."""
        bases = []
        for seed in (SEED, SEED + 1):
            columns = np.random.RandomState(seed).standard_normal((self.size, self.size))
            columns[:, 0] = 1.0
            basis = np.linalg.qr(columns)[0]
            bases.append(basis * np.sign(basis[0, 0]))
        return torch.from_numpy(bases[0] @ bases[1].T)


def multiplied_rows(rows: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return products of rows with a matrix as float32, computed in float64 for one block of rows after the other.

    Args:
        rows: [..., size]. Two axes may be in any memory order, which the result has too.
        multiply: returns the products of float64 [count, size].
    """
    given = rows if rows.dim() == 2 else rows.reshape(-1, rows.shape[-1])
    found = torch.empty_like(given, dtype=torch.float32)
    step = max(1, ROTATED_ELEMENTS // max(1, rows.shape[-1]))
    for start in range(0, len(given), step):
        found[start : start + step] = multiply(given[start : start + step].double())
    return found.view(rows.shape)


def block_hadamard(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return blocks of float64 [..., size * count] times the Hadamard matrix of a power of two, as a rotation."""
    return _multiplied(x.unflatten(-1, (-1, size)), hadamard_factors(size)).flatten(-2) / math.sqrt(size)


@cache
def hadamard_factors(size: int) -> tuple[torch.Tensor, ...]:
    """Return matrices, float64, whose Kronecker product is a Hadamard matrix of a size; none if none is known.

    Their first rows and columns are ones.
    """
    power = size & -size
    odd = size // power
    orders = [1] if odd == 1 else [odd * share for share in (4, 8, 16, 32, 64, 128, 256) if share <= power]
    for order in orders:
        if (first := _paley(order)) is not None:
            rest = size // order
            chunks = [MOST_SYLVESTER] * ((rest.bit_length() - 1) // (MOST_SYLVESTER.bit_length() - 1))
            chunks.append(rest // MOST_SYLVESTER ** len(chunks))
            factors = (first, *(_sylvester(chunk) for chunk in chunks))
            return tuple(factor for factor in factors if len(factor) > 1)
    return ()


def _sylvester(size: int) -> torch.Tensor:
    """Return the Hadamard matrix of a power of two."""
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found


def _paley(order: int) -> torch.Tensor | None:
    """Return a Hadamard matrix of order q + 1 or 2 (q + 1) for a prime q, by Paley's constructions, or the one of order
    1; ``None`` without such a prime."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if (order - 1) % 4 == 3 and _is_prime(order - 1):
        return _normalized(_bordered(order - 1, -1.0) + torch.eye(order, dtype=torch.float64))
    q = order // 2 - 1
    if q % 4 == 1 and _is_prime(q):
        off_diagonal = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        diagonal = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return _normalized(
            torch.kron(_bordered(q, 1.0), off_diagonal) + torch.kron(torch.eye(q + 1, dtype=torch.float64), diagonal)
        )
    return None


def _bordered(q: int, sign: float) -> torch.Tensor:
    """Return the conference matrix of a prime q: whether differences of rows and columns are squares modulo q, as 1
    and -1, below a row of ones and beside a column of ``sign``."""
    squares = torch.full((q,), -1.0, dtype=torch.float64)
    squares[torch.arange(1, q) ** 2 % q] = 1.0
    squares[0] = 0.0
    found = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    found[0, 1:], found[1:, 0] = 1.0, sign
    places = torch.arange(q)
    found[1:, 1:] = squares[(places[:, None] - places) % q]
    return found


def _normalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return a Hadamard matrix with the signs of rows and columns changed so that the first ones are ones."""
    matrix = matrix * matrix[:1]
    return matrix * matrix[:, :1]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, math.isqrt(number) + 1))


def _multiplied(x: torch.Tensor, factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [..., size] times the Kronecker product of square matrices."""
    shape, after = x.shape, x.shape[-1]
    for factor in factors:
        after //= len(factor)
        # Products of matrices with single columns would be slower than one product of all rows.
        x = x.reshape(-1, len(factor)) @ factor if after == 1 else factor.t() @ x.reshape(-1, len(factor), after)
    return x.reshape(shape)
