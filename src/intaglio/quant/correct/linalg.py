"""What GPTQ spreads errors by: a triangular factor of the inverse of an operand's second moments."""

from __future__ import annotations

import torch

DAMPINGS = (0.01, 0.1, 1.0)
"""Shares of the mean diagonal that are added to it, so that it can be inverted; the first that suffices."""
LEAST_DAMPING = 1e-6
"""The same of the largest diagonal element: two operands that are nearly one leave little else in float64."""
SMALL = 128
"""Triangles of at most so many rows are inverted at once."""


def factor_of(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """float64 [groups, k, k] -> the order of its columns, largest first, and the upper Cholesky factor of the damped
    inverse in that order; ``None`` if no damping suffices. Columns that nothing reaches have a moment of one.

    With rows and columns backwards, a Cholesky factor L of the matrix itself gives it: L^-1, backwards again.
    """
    order = matrix.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True, stable=True)
    matrix = taken(taken(matrix, order, 1), order, 2)
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    mean, most = diagonal.mean(1, keepdim=True), diagonal.amax(1, keepdim=True)
    for damping in DAMPINGS:
        added = torch.where(diagonal == 0, torch.ones_like(diagonal), damping * mean + LEAST_DAMPING * most)
        lower, failed = torch.linalg.cholesky_ex((matrix + torch.diag_embed(added)).flip(1, 2))
        if not failed.any():
            return order, _inverse(lower).flip(1, 2)
    return None


def _inverse(lower: torch.Tensor) -> torch.Tensor:
    """Of lower triangles, by halves: nearly all of it is products."""
    size = lower.shape[1]
    if size <= SMALL:
        one = torch.eye(size, dtype=lower.dtype).expand_as(lower)
        return torch.linalg.solve_triangular(lower, one, upper=False)
    half, result = size // 2, torch.zeros_like(lower)
    first = result[:, :half, :half] = _inverse(lower[:, :half, :half])
    last = result[:, half:, half:] = _inverse(lower[:, half:, half:])
    result[:, half:, :half] = -last @ lower[:, half:, :half] @ first
    return result


def taken(matrix: torch.Tensor, order: torch.Tensor, axis: int) -> torch.Tensor:
    """Reordered along an axis, group by group."""
    shape = [order.shape[0], 1, 1]
    shape[axis] = order.shape[1]
    return matrix.gather(axis, order.reshape(shape).expand_as(matrix))
