"""Triangular factor of the inverse of second moments for GPTQ, and evenly spread places in a tensor."""

from __future__ import annotations

import torch

DAMPINGS = (0.01, 0.1, 1.0)
"""Shares of the mean diagonal that are added to the diagonal before inversion; the first that suffices is used."""
LEAST_DAMPING = 1e-6
"""Share of the largest diagonal element that is always added: two nearly equal operands make M almost singular."""
BLOCK_SIZE = 128
"""Triangular matrices of at most this size are inverted at once."""
GOLDEN_RATIO = 0.6180339887498949
"""Multiples of it modulo 1 are spread evenly, whatever their number, and do not keep to the columns of an image."""


def inverse_cholesky_factor(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the column order and the upper Cholesky factor of the damped inverse in that order.

    Columns are in the order of decreasing moments; moments of zero count as one. With rows and columns reversed, the
    factor is the inverse of a Cholesky factor of the matrix itself, reversed again.

    Args:
        matrix: second moments, float64 [groups, k, k].

    Returns:
        The order [groups, k] and the factor [groups, k, k]; ``None`` if no damping suffices.
    """
    order = matrix.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True, stable=True)
    matrix = permute(permute(matrix, order, 1), order, 2)
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    mean, most = diagonal.mean(1, keepdim=True), diagonal.amax(1, keepdim=True)
    for damping in DAMPINGS:
        added = torch.where(diagonal == 0, torch.ones_like(diagonal), damping * mean + LEAST_DAMPING * most)
        lower, failed = torch.linalg.cholesky_ex((matrix + torch.diag_embed(added)).flip(1, 2))
        if not failed.any():
            return order, _triangular_inverse(lower).flip(1, 2)
    return None


def _triangular_inverse(lower: torch.Tensor) -> torch.Tensor:
    """Invert lower-triangular matrices by recursive blocking, so that almost all work is GEMM."""
    size = lower.shape[1]
    if size <= BLOCK_SIZE:
        one = torch.eye(size, dtype=lower.dtype).expand_as(lower)
        return torch.linalg.solve_triangular(lower, one, upper=False)
    half, result = size // 2, torch.zeros_like(lower)
    first = result[:, :half, :half] = _triangular_inverse(lower[:, :half, :half])
    last = result[:, half:, half:] = _triangular_inverse(lower[:, half:, half:])
    result[:, half:, :half] = -last @ lower[:, half:, :half] @ first
    return result


def permute(matrix: torch.Tensor, order: torch.Tensor, axis: int) -> torch.Tensor:
    """Reorder a matrix along an axis, group by group."""
    shape = [order.shape[0], 1, 1]
    shape[axis] = order.shape[1]
    return matrix.gather(axis, order.reshape(shape).expand_as(matrix))


def spread_places(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Return for each of consecutive numbers a place below ``size``; any run of numbers is spread evenly."""
    return (numbers.double() * GOLDEN_RATIO % 1 * size).long().clamp_max(size - 1)
