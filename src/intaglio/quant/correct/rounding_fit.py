"""Quantized weights fitted to the operands of a layer, and their validation on samples that they were not fitted to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from intaglio.ir import QParams
from intaglio.quant.annotate.regions import Region
from intaglio.quant.annotate.sites import Site
from intaglio.quant.correct.second_moments import Moments
from intaglio.quant.correct.validation_split import VALIDATED_ROWS, SplitMoments
from intaglio.quant.correct.weight_blocks import WeightRows, by_group, steps_by_group
from intaglio.quant.correct.weight_rounding import ROUNDINGS, gptq, nearest
from intaglio.quant.qdq.weight_grid import WeightGrid, weight_grid
from intaglio.quant.recipes.choices import Rounding

CHEAP_COLUMNS = 1024
"""Up to this many columns GPTQ takes less time than the moments that it reads."""
KEPT_FACTOR = 1 << 20
"""Largest number of elements of moments whose factor is kept with them, for other layers with the same operand."""
CLEAR_GAIN = 0.75
"""Ratio of the errors with and without a fit on one half of few samples, below which the other half is not tested."""
FACTORS = (0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.15, 1.2)
"""Ratios to the scales chosen from the weights alone; with few bits, the operand decides which of them is best."""


class FittedWeight(NamedTuple):
    """A quantized weight.

    Attributes:
        qparams: its scales.
        grid: the grid of these scales.
        step: the distances of quantized values, float64 [groups, rows, k] or [groups, rows, 1].
        quantized: the quantized values, float64 [groups, rows, k].
        error: the error of the results.
        nearest_error: their error with the given scales and each weight rounded to nearest.
    """

    qparams: QParams
    grid: WeightGrid
    step: torch.Tensor
    quantized: torch.Tensor
    error: float
    nearest_error: float


class FittedRows(NamedTuple):
    """Rows of a weight after `round_weight`, with the sums of squares of their results and of the errors of these.

    Attributes:
        qparams: the scales.
        rows: the quantized rows, and their grid.
        signal: the sum of squares of the results.
        error: the error of the results.
        nearest_error: their error with the given scales and each weight rounded to nearest.
    """

    qparams: QParams
    rows: WeightRows
    signal: float
    error: float
    nearest_error: float


def round_weight(region: Region, given: WeightRows, site: Site, q: QParams, parts: SplitMoments) -> FittedRows:
    """Round a weight by the method of its setting, a large one in blocks of rows that are validated on their own.

    Args:
        region: the region of the layer.
        given: the weight, rounded to nearest.
        site: its quantization point.
        q: its scales, chosen from the weight alone.
        parts: moments of parts of the samples.
    """
    assert region.setting.rounding is not None  # A decided recipe always has a rounding method.
    quantized = np.empty_like(given.quantized)  # Small arrays would keep freed memory between them from the system.
    found = []
    for rows in given.blocks(region):
        block = given.part(rows)
        own = q if len(q.scales) == 1 else replace(q, scale=q.scales[rows], zero_point=q.zeros[rows])
        fit = RoundingFit(region, block.weight, site, own, block.grid, region.setting.rounding)
        chosen = fit.validated(parts)
        quantized[rows] = chosen.quantized.reshape(block.weight.shape).numpy()
        found.append((chosen.qparams, chosen.grid, parts.errors(fit.rows), chosen.error, chosen.nearest_error))
    qparams, grids, *errors = zip(*found, strict=True)
    fitted = qparams[0]
    if len(qparams) > 1 and len(fitted.scales) > 1:
        scales, zeros = (sum((getattr(one, name) for one in qparams), ()) for name in ("scales", "zeros"))
        fitted = replace(q, scale=scales, zero_point=zeros)
    return FittedRows(fitted, given.joined(quantized, grids), *map(sum, errors))


@dataclass(frozen=True)
class RoundingFit:
    """Rounds the weight of a layer.

    Attributes:
        region: the region of the layer.
        weight: the weight, float32.
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

    @cached_property
    def step(self) -> torch.Tensor:
        """Return the distances of quantized values with the given scales, as `steps_by_group` does."""
        return self._steps(self.grid)

    def nearest(self, error: float) -> FittedWeight:
        """Round each weight to the nearest step of the given scales, which has this error."""
        return FittedWeight(self.qparams, self.grid, self.step, self._nearest, error, error)

    def fitted(self, found: Moments, plain: torch.Tensor, rows: slice = slice(None)) -> FittedWeight:
        """Round the weight for these moments, with scales for these moments where the data type asks for it.

        Args:
            found: the moments.
            plain: the errors of rounding each row to nearest, [groups, rows].
            rows: the rows of each group whose quantized values, steps and errors are returned.
        """
        if found.sums.numel() * found.sums.shape[1] > KEPT_FACTOR:
            found = replace(found)  # The factor, which takes as much memory as the moments, is only kept for this call.
        q, grid, step = self.qparams, self.grid, self.step
        if self._has_fitted_scales:
            q = self._rescaled(found, plain)
            grid = weight_grid(self.weight, np.array(q.scales), self.site.record, 0, self.region.record.roles.outputs)
            step = self._steps(grid)
        plain = plain[:, rows]
        known = None if self._has_fitted_scales else plain
        fit = ROUNDINGS[self.method](self.rows[:, rows], step[:, rows], found, grid.low, grid.high, known)
        return FittedWeight(q, grid, step[:, rows], fit.quantized, fit.error.sum().item(), plain.sum().item())

    def validated(self, parts: SplitMoments) -> FittedWeight:
        """Return a fitted weight, or rounded to nearest if fits do not generalize.

        Halves of few samples validate each other, unless the first one shows a clear gain, and the weight is then
        fitted to all; some rows of the weight are enough to validate. Of more samples most are enough to fit to, and
        the weight that was validated is returned.

        Args:
            parts: moments of parts of the samples.
        """
        rounded = self._nearest * self.step
        plain = [part.result_errors(self.rows, rounded) for part in parts.both]
        del rounded  # It takes as much memory as the weight in float64.
        nearest_error = sum(part.sum().item() for part in plain)
        if not all(part.count for part in parts.both):
            return self.nearest(nearest_error)
        cheap = self.method != Rounding.ADAROUND and self.rows.shape[2] <= CHEAP_COLUMNS
        refitted = parts.crossed or cheap
        rows = self._validated_rows() if refitted else slice(None)
        error = unfitted = 0.0
        for own, other in parts.directions:
            fit = self.fitted(parts.both[own], plain[own], rows)
            error += parts.both[other].result_errors(self.rows[:, rows], fit.quantized * fit.step).sum().item()
            unfitted += plain[other][:, rows].sum().item()
            if error < CLEAR_GAIN * unfitted:
                break
        if not error < unfitted:
            return self.nearest(nearest_error)
        if refitted:
            return self.fitted(parts.whole, plain[0] + plain[1])
        return fit._replace(error=fit.error + error, nearest_error=nearest_error)

    @property
    def _has_fitted_scales(self) -> bool:
        """Return whether the scales of all rows are fitted to the moments."""
        return bool(self.site.record.squares) and not self.site.group and len(self.qparams.scales) == len(self.weight)

    def _validated_rows(self) -> slice:
        """Return evenly spread rows of each group, or all of them if there are few or their scales are fitted."""
        every = 1 if self._has_fitted_scales else max(1, self.rows.shape[1] // VALIDATED_ROWS)
        return slice(None, None, every)

    @cached_property
    def _nearest(self) -> torch.Tensor:
        """Return the weight rounded to the nearest step of the given scales."""
        return nearest(self.rows, self.step, self.grid.low, self.grid.high)

    def _steps(self, grid: WeightGrid) -> torch.Tensor:
        return steps_by_group(self.region, grid, self.weight.shape)

    def _rescaled(self, found: Moments, plain: torch.Tensor) -> QParams:
        """Return the scales, one for each output channel, with which GPTQ gives the least error in the results.

        They are used for AdaRound too, which is too slow to run for each ratio. ``plain`` are the errors of rounding
        each row to nearest with the given scales.
        """
        rows, step = self.rows, self.step
        known = plain if found.shift is None else None
        least = gptq(rows, step, found, self.grid.low, self.grid.high, known).error
        best = torch.ones(rows.shape[:2], dtype=torch.float64)
        for factor in FACTORS:
            now = gptq(rows, step * factor, found, self.grid.low, self.grid.high).error
            best, least = torch.where(now < least, factor, best), torch.minimum(now, least)
        scales = (torch.tensor(self.qparams.scales, dtype=torch.float64) * best.reshape(-1)).float()
        return replace(self.qparams, scale=tuple(scales.tolist()))
