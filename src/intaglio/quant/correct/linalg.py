"""Triangular factors of second moments for GPTQ, from the moments or from the few operands that they are sums over."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

DAMPINGS = (0.01, 0.1, 1.0)
"""Shares of the mean diagonal that are added to the diagonal; the first with which a factor exists is used."""
LEAST_DAMPING = 1e-6
"""Share of the largest diagonal element that is always added: two nearly equal operands make M almost singular."""
DAMPING_OF_A_POSITION = 0.3
"""Least damping, times the number of columns and divided by that of the positions that the moments are from. Moments of
few positions are noisy, and GPTQ would fit weights to their noise. A ridge in proportion to columns / positions shrinks
what it changes, towards rounding to nearest."""
COLUMN_BLOCK = 64
"""Number of columns in a block, whose part of the factor is computed at once; ``kWidth`` of weight_columns.cpp."""


Spread = Callable[[int, int], torch.Tensor]
"""Returns what the errors of the columns from ``stop`` on add to those from ``start`` to ``stop``, as [groups, columns,
rows]. The arguments are (start, stop), from the last columns to the first."""


class OrderedFactor(NamedTuple):
    """A factorization ``L D L^T`` of damped moments whose columns are in the order of increasing moments.

    Attributes:
        order: the columns, [groups, k].
        lower: L, lower triangular with a diagonal of ones, float64 [groups, k, k].
        pivots: the diagonal of D, float64 [groups, k].
        added: what was added to the diagonal of the moments, float64 [groups, k].
    """

    order: torch.Tensor
    lower: torch.Tensor
    pivots: torch.Tensor
    added: torch.Tensor

    def triangle(self, start: int) -> torch.Tensor:
        """Return the part of L for the block of columns from ``start`` on, [groups, columns, columns]."""
        here = slice(start, start + COLUMN_BLOCK)
        return self.lower[:, here, here]

    def spreading(self, error: torch.Tensor) -> Spread:
        """Return a function for these errors, float64 [groups, k, rows], which are filled from the last column on."""
        return lambda start, stop: self.lower[:, stop:, start:stop].mT @ error[:, stop:]

    def solve(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows, float64 [groups, rows, k], times the inverse of the damped moments."""
        order = self.order[:, None].expand(rows.shape)
        found = torch.linalg.solve_triangular(self.lower.mT, rows.gather(2, order), upper=True, left=False)
        found /= self.pivots[:, None]
        found = torch.linalg.solve_triangular(self.lower, found, upper=False, left=False)
        return torch.empty_like(rows).scatter_(2, order, found)


class OperandFactor(NamedTuple):
    """The same factorization of moments ``X X^T`` of few operands X.

    Element (j, i) of L is ``x_j t_i / d_i`` for j > i. Here x_j is row j of X, and t_i is ``C x_i``, where C is the
    inverse of ``1 + sum of x^T x / added`` over the columns before i. So all elements of L are products of two matrices
    with as many columns as there are operands.

    Attributes:
        order: the columns, [groups, k].
        operands: X in this order, float64 [groups, k, count].
        scaled: ``t_i / d_i``, float64 [groups, k, count].
        triangles: the parts of L for `COLUMN_BLOCK` columns each.
        pivots: the diagonal of D, float64 [groups, k].
        added: what was added to the diagonal of the moments, float64 [groups, k].
    """

    order: torch.Tensor
    operands: torch.Tensor
    scaled: torch.Tensor
    triangles: list[torch.Tensor]
    pivots: torch.Tensor
    added: torch.Tensor

    def triangle(self, start: int) -> torch.Tensor:
        """Return the part of L for the block of columns from ``start`` on, [groups, columns, columns]."""
        return self.triangles[start // COLUMN_BLOCK]

    def spreading(self, error: torch.Tensor) -> Spread:
        """Return a function for these errors, float64 [groups, k, rows], which are filled from the last column on."""
        results = error.new_zeros(len(error), self.operands.shape[2], error.shape[2])
        behind = error.shape[1]

        def spread(start: int, stop: int) -> torch.Tensor:
            nonlocal behind
            results.baddbmm_(self.operands[:, stop:behind].mT, error[:, stop:behind])
            behind = stop
            return self.scaled[:, start:stop] @ results

        return spread

    def solve(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows, float64 [groups, rows, k], times the inverse of the damped moments."""
        order = self.order[:, None].expand(rows.shape)
        # (A + X X^T)^-1 = A^-1 - A^-1 X (1 + X^T A^-1 X)^-1 X^T A^-1
        scaled = rows.gather(2, order) / self.added[:, None]
        weighted = self.operands / self.added[..., None]
        inner = torch.eye(self.operands.shape[2], dtype=rows.dtype) + self.operands.mT @ weighted
        found = scaled - torch.linalg.solve(inner, scaled @ self.operands, left=False) @ weighted.mT
        return torch.empty_like(rows).scatter_(2, order, found)


Factor = OrderedFactor | OperandFactor


def ordered_factor(matrix: torch.Tensor, count: int) -> OrderedFactor | None:
    """Return the factor of second moments, float64 [groups, k, k]; ``None`` if no damping suffices.

    Moments of zero count as one.

    Args:
        matrix: the moments.
        count: number of positions that they are sums over.
    """
    order = matrix.diagonal(dim1=1, dim2=2).argsort(dim=1, stable=True)
    groups, failed = torch.arange(len(matrix))[:, None, None], torch.empty(len(matrix), dtype=torch.int32)
    plain = matrix.diagonal(dim1=1, dim2=2).gather(1, order)
    for damping in _dampings(plain.shape[1], count):
        added = _added(plain, damping)
        # LAPACK factors a matrix in column-major order in place; a symmetric one has the same elements in both orders.
        lower = matrix[groups, order[:, :, None], order[:, None, :]].mT
        lower.diagonal(dim1=1, dim2=2).copy_(plain + added)
        torch.linalg.cholesky_ex(lower, out=(lower, failed))
        if not failed.any():
            pivots = _unit_diagonal(lower)
            return OrderedFactor(order, lower, pivots, added)
    return None


def operand_factor(operands: torch.Tensor) -> OperandFactor | None:
    """Return the factor of ``X X^T`` for X float64 [groups, k, count]; ``None`` if no damping suffices."""
    plain = operands.square().sum(2)
    order = plain.argsort(dim=1, stable=True)
    operands, plain = operands.gather(1, order[..., None].expand_as(operands)), plain.gather(1, order)
    for damping in _dampings(*operands.shape[1:]):
        added = _added(plain, damping)
        scaled, pivots, triangles = torch.empty_like(operands), torch.empty_like(plain), []
        inverse = torch.eye(operands.shape[2], dtype=operands.dtype).repeat(len(operands), 1, 1)
        for start in range(0, operands.shape[1], COLUMN_BLOCK):
            here = slice(start, start + COLUMN_BLOCK)
            part = operands[:, here]
            products = part @ inverse
            lower, failed = torch.linalg.cholesky_ex(products @ part.mT + torch.diag_embed(added[:, here]))
            if failed.any():
                break
            pivots[:, here] = _unit_diagonal(lower)
            eliminated = torch.linalg.solve_triangular(lower, products, upper=False, unitriangular=True)
            scaled[:, here] = eliminated / pivots[:, here, None]
            inverse.baddbmm_(eliminated.mT, scaled[:, here], alpha=-1)
            triangles.append(lower)
        else:
            return OperandFactor(order, operands, scaled, triangles, pivots, added)
    return None


def _dampings(k: int, count: int) -> list[float]:
    """Return the shares of the mean diagonal to try, for k columns of moments of so many positions."""
    least = DAMPING_OF_A_POSITION * k / max(count, 1)
    return sorted({max(damping, least) for damping in DAMPINGS})


def _added(plain: torch.Tensor, damping: float) -> torch.Tensor:
    """Return what is added to the diagonal of moments, [groups, k]."""
    mean, most = plain.mean(1, keepdim=True), plain.amax(1, keepdim=True)
    return torch.where(plain == 0, torch.ones_like(plain), damping * mean + LEAST_DAMPING * most)


def _unit_diagonal(lower: torch.Tensor) -> torch.Tensor:
    """Divide the columns of a Cholesky factor by its diagonal in place, and return the squares of the diagonal."""
    roots = lower.diagonal(dim1=1, dim2=2).clone()
    lower.div_(roots[:, None])
    return roots.square()
