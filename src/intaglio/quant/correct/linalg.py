"""Triangular factor of second moments for GPTQ."""

from __future__ import annotations

from typing import NamedTuple

import torch

DAMPINGS = (0.01, 0.1, 1.0)
"""Shares of the mean diagonal that are added to the diagonal; the first with which a factor exists is used."""
LEAST_DAMPING = 1e-6
"""Share of the largest diagonal element that is always added: two nearly equal operands make M almost singular."""


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


def ordered_factor(matrix: torch.Tensor) -> OrderedFactor | None:
    """Return the factor of second moments, float64 [groups, k, k]; ``None`` if no damping suffices.

    Moments of zero count as one.
    """
    order = matrix.diagonal(dim1=1, dim2=2).argsort(dim=1, stable=True)
    groups = torch.arange(len(matrix))[:, None, None]
    matrix = matrix[groups, order[:, :, None], order[:, None, :]]
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    plain = diagonal.clone()
    mean, most = plain.mean(1, keepdim=True), plain.amax(1, keepdim=True)
    for damping in DAMPINGS:
        added = torch.where(plain == 0, torch.ones_like(plain), damping * mean + LEAST_DAMPING * most)
        diagonal.copy_(plain + added)
        lower, failed = torch.linalg.cholesky_ex(matrix)
        if not failed.any():
            roots = lower.diagonal(dim1=1, dim2=2).clone()
            return OrderedFactor(order, lower.div_(roots[:, None]), roots.square(), added)
    return None
