"""Rounding of weight columns one after the other: a compiled kernel, and a PyTorch fallback with identical results."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from intaglio import numerics
from intaglio.native import native_library
from intaglio.quant.correct.linalg import Factor


class Columns(NamedTuple):
    """Weights whose columns are rounded, with columns in the order of a factor.

    Attributes:
        weight: the weights, float64 [groups, rows, columns] without gaps.
        steps: the distances of quantized values, in the shape of the weights.
        factor: the factor of the moments.
        quantized: the quantized values, in the shape of the weights, without gaps.
        error: the weights minus their rounded values, float64 [groups, columns, rows].
        totals: sums over the columns that are rounded, float64 [2, groups, rows]: of the squares of what rounding
            misses, times pivots, and of the squares of the errors, times what was added to the moments.
    """

    weight: torch.Tensor
    steps: torch.Tensor
    factor: Factor
    quantized: torch.Tensor
    error: torch.Tensor
    totals: torch.Tensor

    @staticmethod
    def of(weight: torch.Tensor, steps: torch.Tensor, factor: Factor) -> Columns:
        """Return the columns of weights none of which is rounded yet."""
        groups, rows, count = weight.shape
        order = factor.order[:, None].expand(weight.shape)
        steps = steps.gather(2, order) if steps.shape[2] == count else steps
        error, totals = weight.new_empty(groups, count, rows), weight.new_zeros(2, groups, rows)
        quantized = weight.new_empty(weight.shape)
        return Columns(weight.gather(2, order), steps.expand_as(weight), factor, quantized, error, totals)

    def chosen(self) -> torch.Tensor:
        """Return the quantized values with columns in the order of the weights."""
        order = self.factor.order[:, None].expand(self.weight.shape)
        return torch.empty_like(self.quantized).scatter_(2, order, self.quantized)


def round_columns(columns: Columns, start: int, spread: torch.Tensor, low: int, high: int) -> None:
    """Round a block of columns from the last to the first.

    The error of column i is multiplied by element (i, j) of the factor and added to column j before that is rounded.

    Args:
        columns: the columns; quantized values and errors of the block are written, and totals grow.
        start: the first column of the block.
        spread: what the columns behind the block add to it, float64 [groups, width, rows].
        low: the smallest quantized value.
        high: the largest quantized value.
    """
    native = native_library.runtime_if_built()
    if native is None:
        round_columns_torch(columns, start, spread, low, high)
        return
    factor, arrays = columns.factor, (columns.quantized, columns.error, columns.totals)
    lower, spread = factor.triangle(start).contiguous(), spread.contiguous()
    operands = (columns.weight, columns.steps, lower, factor.pivots, factor.added, spread, *arrays)
    sizes = np.array([*columns.weight.shape, start, spread.shape[1], *columns.steps.stride()], np.int64)
    threads = torch.get_num_threads()
    native.intaglio_round_columns(*(one.data_ptr() for one in operands), sizes.ctypes.data, low, high, threads)


def round_columns_torch(columns: Columns, start: int, spread: torch.Tensor, low: int, high: int) -> None:
    """Compute `round_columns` in PyTorch."""
    factor, stop = columns.factor, start + spread.shape[1]
    weight, steps, quantized = (one.mT[:, start:stop] for one in (columns.weight, columns.steps, columns.quantized))
    lower, wanted = factor.triangle(start), weight + spread
    for i in reversed(range(stop - start)):
        quantized[:, i] = numerics.round_clamp(wanted[:, i] / steps[:, i], low, high)
        rounded = quantized[:, i] * steps[:, i]
        error, missed = weight[:, i] - rounded, wanted[:, i] - rounded
        columns.error[:, start + i] = error
        columns.totals[0] += missed * missed * factor.pivots[:, start + i, None]
        columns.totals[1] += error * error * factor.added[:, start + i, None]
        wanted[:, :i] += lower[:, i, :i, None] * error[:, None]
