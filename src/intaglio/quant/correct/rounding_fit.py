"""Quantized weights fitted to the operands of a layer, and their validation on samples that they were not fitted to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from intaglio.fxgraph.nodes import call_of
from intaglio.ir import QParams
from intaglio.quant.annotate.regions import Region
from intaglio.quant.annotate.sites import Site
from intaglio.quant.correct.second_moments import Moments
from intaglio.quant.correct.validation_split import SplitMoments
from intaglio.quant.correct.weight_rounding import ROUNDINGS, gptq, loss, nearest
from intaglio.quant.qdq.weight_grid import WeightGrid, weight_grid
from intaglio.quant.recipes.choices import Rounding

CHEAP_COLUMNS = 1024
"""Up to this many columns GPTQ takes less time than the moments that it reads."""
FACTORS = (0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.15, 1.2)
"""Ratios to the scales chosen from the weights alone; with few bits, the operand decides which of them is best."""


class FittedWeight(NamedTuple):
    """A quantized weight: ``quantized`` and ``step`` are float64 [groups, rows, k]."""

    qparams: QParams
    grid: WeightGrid
    step: torch.Tensor
    quantized: torch.Tensor


@dataclass(frozen=True)
class RoundingFit:
    """Rounds the weight of a layer.

    Attributes:
        region: the region of the layer.
        weight: the weight, float64.
        site: its quantization point.
        qparams: its scales, chosen from the weight alone.
        grid: the grid of these scales.
        method: a key of `ROUNDINGS`.
    """

    region: Region
    weight: np.ndarray
    site: Site
    qparams: QParams
    grid: WeightGrid
    method: str

    @cached_property
    def rows(self) -> torch.Tensor:
        """Return the weight as float64 [groups, rows, k]."""
        return by_group(self.region, self.weight)

    def nearest(self, found: Moments) -> FittedWeight:
        """Round each weight to the nearest step of the given scales."""
        step = self._steps(self.grid)
        quantized = nearest(self.rows, step, found, self.grid.low, self.grid.high)
        return FittedWeight(self.qparams, self.grid, step, quantized)

    def fitted(self, found: Moments) -> FittedWeight:
        """Round the weight for these moments, with scales for these moments where the data type asks for it."""
        q, grid, record = self.qparams, self.grid, self.site.record
        if record.squares and not self.site.group and len(q.scales) == len(self.weight):
            q = self._rescaled(found)
            grid = weight_grid(self.weight, np.array(q.scales), record, 0, self.region.record.roles.outputs)
        step = self._steps(grid)
        return FittedWeight(q, grid, step, ROUNDINGS[self.method](self.rows, step, found, grid.low, grid.high))

    def validated(self, found: Moments, parts: SplitMoments) -> FittedWeight:
        """Return a fitted weight, or rounded to nearest if fits do not generalize.

        Halves of few samples validate each other, and the weight is then fitted to all. Of more samples most are enough
        to fit to, and the weight that was validated is returned.

        Args:
            found: moments of all samples.
            parts: moments of parts of them.
        """
        if not all(part.count for part in parts.both):
            return self.nearest(found)
        error = plain = 0.0
        for own, other in parts.directions:
            fit, unfitted = self.fitted(own), self.nearest(own)
            error += loss(fit.quantized, self.rows, fit.step, other.matrix).sum().item()
            plain += loss(unfitted.quantized, self.rows, unfitted.step, other.matrix).sum().item()
        if not error < plain:
            return self.nearest(found)
        cheap = self.method == Rounding.GPTQ and self.rows.shape[2] <= CHEAP_COLUMNS
        return self.fitted(found) if parts.crossed or cheap else fit

    def _steps(self, grid: WeightGrid) -> torch.Tensor:
        return by_group(self.region, np.broadcast_to(grid.steps, self.weight.shape))

    def _rescaled(self, found: Moments) -> QParams:
        """Return the scales, one for each output channel, with which GPTQ gives the least error in the results.

        They are used for AdaRound too, which is too slow to run for each ratio.
        """
        rows, step, matrix = self.rows, self._steps(self.grid), found.matrix

        def error(factor: float) -> torch.Tensor:
            quantized = gptq(rows, step * factor, found, self.grid.low, self.grid.high)
            return loss(quantized, rows, step * factor, matrix)

        least, best = error(1.0), torch.ones(rows.shape[:2], dtype=torch.float64)
        for factor in FACTORS:
            now = error(factor)
            best, least = torch.where(now < least, factor, best), torch.minimum(now, least)
        scales = (torch.tensor(self.qparams.scales, dtype=torch.float64) * best.reshape(-1)).float()
        return replace(self.qparams, scale=tuple(scales.tolist()))


def by_group(region: Region, weight: np.ndarray) -> torch.Tensor:
    """Reshape a weight of any rank to float64 [groups, rows, k]."""
    groups = int(call_of(region.anchor, region.record).arguments.get("groups", 1))
    return torch.from_numpy(np.ascontiguousarray(weight, np.float64)).reshape(groups, weight.shape[0] // groups, -1)
