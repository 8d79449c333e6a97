"""Quantized weights fitted to the operands of a layer, and validation of fits to few positions.

A correction that is fitted to few samples may fit these only. Then it is fitted to each half of the samples and used if
it reduces the error on the other half.
"""

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
from intaglio.quant.correct.weight_rounding import ROUNDINGS, gptq, loss, nearest
from intaglio.quant.qdq.weight_grid import WeightGrid, weight_grid

VALIDATED_SAMPLES = 16
"""Number of samples below which corrections are validated, and as well with fewer positions than columns."""
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

    def validated(self, found: Moments, halves: tuple[Moments, ...]) -> FittedWeight:
        """Return the weight fitted to ``found``, or rounded to nearest if fits to ``halves`` do not generalize."""
        return self.fitted(found) if not halves or self._generalizes(halves) else self.nearest(found)

    def _generalizes(self, halves: tuple[Moments, ...]) -> bool:
        """Return whether a fit to each half has less error on the other half than rounding to nearest."""
        if not all(half.count for half in halves):
            return False
        error = plain = 0.0
        for own, other in (halves, halves[::-1]):
            fit, unfitted = self.fitted(own), self.nearest(own)
            error += loss(fit.quantized, self.rows, fit.step, other.matrix).sum().item()
            plain += loss(unfitted.quantized, self.rows, unfitted.step, other.matrix).sum().item()
        return error < plain

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


def may_overfit(found: Moments) -> bool:
    """Return whether a correction may fit only the samples that these moments are from."""
    return found.samples < VALIDATED_SAMPLES or found.count < found.products.shape[1]


def in_first_half(batch: torch.Tensor) -> torch.Tensor:
    """Return bool[samples] that is true for about half of the samples of u8[samples, ...].

    They are chosen by their contents, so that every division of the data among processes gives the same halves.
    """
    return batch.flatten(1).sum(1) % 2 == 0


def rest_of(found: Moments, half: Moments) -> Moments:
    """Return the moments of the positions that are not in ``half``."""
    counts = (found.count - half.count, found.samples - half.samples)
    return Moments(found.products - half.products, found.sums - half.sums, *counts)


def mean_generalizes(sums: tuple[torch.Tensor, ...], counts: tuple[int, ...]) -> bool:
    """Return whether subtracting the mean of each half of some values from the other half reduces their squares.

    Args:
        sums: sums over both halves, one for each channel.
        counts: numbers of values of both halves.
    """
    if not all(counts):
        return False
    gain = 0.0
    for own, other in ((0, 1), (1, 0)):
        mean = sums[own] / counts[own]
        gain += (2 * mean * sums[other] - counts[other] * mean.square()).sum().item()
    return gain > 0
