"""Rows of weights in float64, and what rounding takes from their results, in blocks that bound the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from intaglio.quant.annotate.regions import Region
from intaglio.quant.correct.operand_columns import groups_of
from intaglio.quant.qdq.weight_grid import WeightGrid

LARGEST_WEIGHT = 1 << 26
"""Elements of a weight up to which all rows are fitted together, in several copies of float64."""
BLOCK_OF_LARGE = 1 << 24
"""Elements of a block of rows of a larger weight, such as that of a language model's output layer."""


@dataclass(frozen=True)
class WeightRows:
    """Rows of a weight, and their quantized values.

    Attributes:
        weight: the weight, float32.
        grid: the grid of the quantized values.
        quantized: the quantized values, in the shape of the weight.
    """

    weight: np.ndarray
    grid: WeightGrid
    quantized: np.ndarray

    def blocks(self, region: Region) -> list[slice]:
        """Return the blocks of rows in which the weight is fitted: one for each, unless it is large."""
        count, size = len(self.weight), self.weight.size
        step = count if size <= LARGEST_WEIGHT or groups_of(region) > 1 else max(1, BLOCK_OF_LARGE * count // size)
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def part(self, rows: slice) -> WeightRows:
        """Return some rows."""
        if rows == slice(0, len(self.weight)):
            return self
        return WeightRows(self.weight[rows], self.grid.part(rows), self.quantized[rows])

    def joined(self, quantized: np.ndarray, grids: Sequence[WeightGrid]) -> WeightRows:
        """Return this weight with other quantized values, and with the grids of its blocks if they are others."""
        if all(np.may_share_memory(grid.scales, self.grid.scales) for grid in grids):
            return replace(self, quantized=quantized)
        scales = np.concatenate([grid.scales for grid in grids])
        return WeightRows(self.weight, replace(self.grid, scales=scales), quantized)

    def lost(self, region: Region) -> torch.Tensor:
        """Return what rounding takes from the weight, float64 [groups, rows, k]."""
        steps = steps_by_group(region, self.grid, self.weight.shape)
        return by_group(region, self.weight) - by_group(region, self.quantized) * steps

    def signal_and_noise(self, region: Region, errors: Callable[[torch.Tensor], float]) -> tuple[float, float]:
        """Return the sums of squares of the results and of their errors.

        Args:
            region: the region of the layer.
            errors: returns the sum of squares of the results of rows, float64 [groups, rows, k].
        """
        blocks = [self.part(rows) for rows in self.blocks(region)]
        signal = sum(errors(by_group(region, block.weight)) for block in blocks)
        return signal, sum(errors(block.lost(region)) for block in blocks)

    def lost_results(self, region: Region, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what rounding takes from the results for operands, float64 [groups, k] -> [groups, rows]."""
        found = []
        for rows in self.blocks(region):
            lost = self.part(rows).lost(region)
            found.append([(lost @ x[..., None])[..., 0] for x in operands])
        return [torch.cat(parts, 1) for parts in zip(*found, strict=True)]


def steps_by_group(region: Region, grid: WeightGrid, shape: tuple[int, ...], rows: slice = slice(None)) -> torch.Tensor:
    """Return the distances of quantized values of some rows of a weight of this shape, float64 [groups, rows, k], or
    [groups, rows, 1] if each row has one."""
    steps = grid.steps(shape)
    if steps.size not in (1, shape[0]) or any(size != 1 for size in steps.shape[1:]):
        return by_group(region, np.broadcast_to(steps, shape), rows)
    return by_group(region, np.broadcast_to(steps.reshape(-1, 1), (shape[0], 1)), rows)


def by_group(region: Region, weight: np.ndarray, rows: slice = slice(None)) -> torch.Tensor:
    """Return some rows of each group of a weight of any rank as float64 [groups, rows, k]."""
    groups = groups_of(region)
    chosen = weight.reshape(groups, weight.shape[0] // groups, -1)[:, rows]
    return torch.from_numpy(np.ascontiguousarray(chosen, np.float64))
