"""Sums of squares of exact values, of other values and of their differences."""

from __future__ import annotations

from typing import NamedTuple

import torch

from intaglio.native.statistics import squared_sums

SHORT_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class SumsOfSquares(NamedTuple):
    """Sums of squares, in float64.

    Attributes:
        signal: of the exact values.
        found: of the other values.
        noise: of the differences.
    """

    signal: float
    found: float
    noise: float


def sums_of_squares(exact: torch.Tensor, found: torch.Tensor) -> SumsOfSquares:
    """Return the sums of squares of two tensors of one shape, without positions where the exact value is not finite.

    Sums of values in float32, float16 and bfloat16 are the same for any number of threads.
    """
    exact, found = exact.detach(), found.detach()
    if exact.dtype not in SHORT_FLOATS or found.dtype not in SHORT_FLOATS:
        return _sums_in_double(exact.double(), found.double())
    order = sorted(range(exact.dim()), key=exact.stride, reverse=True)  # reads channels-last values without a copy
    a, b = (one.float().permute(order).contiguous().numpy() for one in (exact, found))
    return SumsOfSquares(*squared_sums(a, b, torch.get_num_threads()).tolist())


def _sums_in_double(exact: torch.Tensor, found: torch.Tensor) -> SumsOfSquares:
    finite = exact.isfinite()
    if not finite.all():
        exact, found = exact[finite], found[finite]
    return SumsOfSquares(*(x.square().sum().item() for x in (exact, found, exact - found)))
