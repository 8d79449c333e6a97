"""Rounding of weight columns one after the other: a compiled kernel, and a PyTorch fallback with identical results."""

from __future__ import annotations

from typing import NamedTuple

import torch

from intaglio import numerics
from intaglio.native import native_library


class Columns(NamedTuple):
    """Columns of weights that are rounded, each float64 [groups, columns, rows] without gaps.

    Attributes:
        weight: the weights.
        steps: the distances of quantized values.
        wanted: the values to round: weights plus what the errors of columns behind them add.
        quantized: the quantized values.
        error: the weights minus their rounded values.
    """

    weight: torch.Tensor
    steps: torch.Tensor
    wanted: torch.Tensor
    quantized: torch.Tensor
    error: torch.Tensor

    @staticmethod
    def of(weight: torch.Tensor, steps: torch.Tensor) -> Columns:
        """Return the columns of weights none of which is rounded yet."""
        weight, steps = weight.contiguous(), steps.contiguous()
        return Columns(weight, steps, weight.clone(), torch.empty_like(weight), torch.empty_like(weight))


def round_columns(columns: Columns, start: int, lower: torch.Tensor, low: int, high: int) -> None:
    """Round columns from the last to the first.

    The error of column i is multiplied by ``lower[:, i, j]`` and added to column j before that column is rounded.

    Args:
        columns: the columns; values, errors and what is wanted of the columns from ``start`` on are replaced.
        start: the first column.
        lower: lower triangles for the columns to round, float64 [groups, width, width].
        low: the smallest quantized value.
        high: the largest quantized value.
    """
    native = native_library.runtime_if_built()
    if native is None:
        round_columns_torch(columns, start, lower, low, high)
        return
    groups, count, rows = columns.weight.shape
    first = start * rows * columns.weight.element_size()
    weight, steps, *changed = (tensor.data_ptr() + first for tensor in columns)
    lower, width = lower.contiguous(), lower.shape[1]
    sizes = (groups, count * rows, width, rows, low, high, torch.get_num_threads())
    native.intaglio_round_columns(weight, steps, lower.data_ptr(), *changed, *sizes)


def round_columns_torch(columns: Columns, start: int, lower: torch.Tensor, low: int, high: int) -> None:
    """Compute `round_columns` in PyTorch."""
    weight, steps, wanted, quantized, error = (tensor[:, start : start + lower.shape[1]] for tensor in columns)
    for i in reversed(range(lower.shape[1])):
        quantized[:, i] = numerics.round_clamp(wanted[:, i] / steps[:, i], low, high)
        error[:, i] = weight[:, i] - quantized[:, i] * steps[:, i]
        wanted[:, :i] += lower[:, i, :i, None] * error[:, i, None]
