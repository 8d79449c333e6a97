"""Data and settings that decide which weights are fitted, predicted time and memory, and the gain of some rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from intaglio.formatting.number_text import size_text
from intaglio.fxgraph.node_info import info
from intaglio.fxgraph.nodes import layer_operands
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.annotate.sites import Site
from intaglio.quant.correct.linalg import COLUMN_BLOCK
from intaglio.quant.correct.operand_columns import groups_of, row_length, weight_count
from intaglio.quant.correct.second_moments import LEAST_FLOAT32, Moments, are_few, are_kept, has_moments
from intaglio.quant.correct.validation_split import VALIDATED_ROWS
from intaglio.quant.correct.weight_blocks import LARGEST_WEIGHT
from intaglio.quant.correct.weight_rounding import ITERATIONS, gptq, nearest
from intaglio.quant.imported_weights.kept_integers import kept_weight
from intaglio.quant.qdq.weight_grid import WeightGrid
from intaglio.quant.recipes.choices import BiasCorrection, Effort, Role, Rounding
from intaglio.quant.recipes.settings import Setting

LARGEST_MOMENTS = 1 << 27
"""Largest number of elements of the moments of one weight, 1 GiB; the correction needs several times as much."""
LARGE_MOMENTS = 1 << 26
"""Elements of moments from which freed memory is returned to the system before a weight is fitted: 8192 x 8192."""
ALLOWED_SECONDS = {Effort.FAST: 0.1, Effort.DEFAULT: 60.0}
"""Predicted seconds of one weight up to which it is fitted to data; any number with `Effort.BEST`."""
WIDE_PRODUCTS, BYTE_PRODUCTS, COLUMN_PRODUCTS = 40e9, 150e9, 0.7e9
"""Multiply-accumulates per second, about those of two cores of a Zen 4 processor: in products of float64 matrices, in
products of bytes, and in spreading the errors of columns that are rounded one by one. They are the same on every
machine, so that models do not depend on it."""
FLOAT32_SPEEDUP = 4
"""Number of float32 products in the time of one in float64."""
VALIDATING_FITS = 1.5
"""Mean number of fits of some rows of a weight to a part of the samples, before all rows are fitted to all of them."""
BYTES_OF_ERRORS = 4
"""Byte products for each weight and position to take its errors: two bytes, for the signal and for the noise."""
PRODUCTS_OF_SHIFT = 4
"""Byte products for each element of the moments and position to compare operands with those of the float model, whose
differences have two bytes."""
SAMPLED_ROWS = 32
"""Number of rows of a weight that are fitted to measure what all would gain."""
COPIES_IN_MEMORY = 6
"""Copies of moments and weights in float64 that are in memory at the same time."""


class FittingCost(NamedTuple):
    """Cost of fitting one weight.

    Attributes:
        seconds: time on two cores.
        size: bytes of memory.
    """

    seconds: float
    size: int

    def __str__(self) -> str:
        return f"{self.seconds:.2g} s and {size_text(self.size)}"


def predicted_cost(region: Region, positions: int) -> FittingCost:
    """Return what fitting the weight of a layer costs.

    Args:
        region: the region of the layer.
        positions: number of positions of the data at which the layer computes its outputs.
    """
    groups, k, count = groups_of(region), row_length(region), weight_count(region)
    few = are_few(positions, k)
    rank = positions if few else k
    factor = groups * k * rank * (rank / 3 if not few else rank + COLUMN_BLOCK)
    spread = count * (2 * rank if few else k / 2)
    validated = min(1, VALIDATED_ROWS * groups * k / max(1, count))
    fits = 0.0 if region.setting.rounding == Rounding.NEAREST else 1 + VALIDATING_FITS * validated
    in_bytes = are_kept(positions, groups, k)
    errors = 0 if in_bytes else 4 * count * rank / (FLOAT32_SPEEDUP if groups == 1 and k >= LEAST_FLOAT32 else 1)
    wide = factor + fits * spread + errors
    if region.setting.rounding == Rounding.QRONOS:
        wide += k * count
    if region.setting.rounding == Rounding.ADAROUND:
        wide += fits * ITERATIONS * 2 * count * k
    seconds = wide / WIDE_PRODUCTS + fits * count * COLUMN_BLOCK / 2 / COLUMN_PRODUCTS
    if not few:
        seconds += groups * k * k * positions / BYTE_PRODUCTS
    if region.setting.rounding == Rounding.QRONOS:
        seconds += PRODUCTS_OF_SHIFT * groups * k * k * positions / BYTE_PRODUCTS
    if in_bytes:
        seconds += BYTES_OF_ERRORS * count * positions / BYTE_PRODUCTS
    at_once = min(count, LARGEST_WEIGHT) if groups == 1 else count
    return FittingCost(seconds, 8 * COPIES_IN_MEMORY * (groups * k * rank + at_once))


def takes_too_much_memory(region: Region, positions: int) -> str | None:
    """Return why fitting a weight to data takes too much memory; ``None`` if it does not."""
    groups, k, count = groups_of(region), row_length(region), weight_count(region)
    moments = groups * k * (positions if are_few(positions, k) else k)
    if region.setting.rounding == Rounding.QRONOS:
        moments += 2 * groups * k * k  # those of the differences from the float model
    if moments > LARGEST_MOMENTS:
        return f"the moments of its operand take {size_text(8 * moments)}"
    return f"it has {count:,} elements in {groups:,} groups" if count > LARGEST_WEIGHT and groups > 1 else None


def takes_much_memory(region: Region) -> bool:
    """Return whether fitting a weight takes so much memory that freed memory is returned to the system first."""
    if region.record.roles.weight is None:
        return False
    moments = groups_of(region) * row_length(region) ** 2
    return moments >= LARGE_MOMENTS or weight_count(region) > LARGEST_WEIGHT


def takes_too_long(region: Region, positions: int) -> str | None:
    """Return why fitting a weight to data takes longer than its effort allows; ``None`` if it does not.

    AdaRound always takes long, and only `Effort.FAST` leaves it out.
    """
    effort = Effort(region.setting.effort or Effort.DEFAULT)
    allowed, cost = ALLOWED_SECONDS.get(effort, math.inf), predicted_cost(region, positions)
    asked_for = region.setting.rounding == Rounding.ADAROUND and effort != Effort.FAST
    if asked_for or cost.seconds <= allowed:
        return None
    return f"it would take about {cost}, and effort = {str(effort)!r} allows {allowed:g} s"


def with_simpler_rounding(region: Region, positions: int) -> Region | None:
    """Return a region with GPTQ instead of Qronos, which takes too much memory or time; ``None`` if it has another
    method, or GPTQ takes too much as well."""
    if region.setting.rounding != Rounding.QRONOS:
        return None
    simpler = replace(region, setting=replace(region.setting, rounding=Rounding.GPTQ))
    if takes_too_much_memory(simpler, positions) or takes_too_long(simpler, positions):
        return None
    return simpler


class SampledGain(NamedTuple):
    """Signal-to-noise ratios of the results in decibels, without and with a fitted weight."""

    before: float
    after: float

    def __str__(self) -> str:
        return f"measured with two samples and {SAMPLED_ROWS} rows, {self.before:.1f} -> {self.after:.1f} dB"


def sampled_rows(region: Region) -> slice:
    """Return `SAMPLED_ROWS` evenly spread rows of each group of a weight, or all of them if there are fewer."""
    every = max(1, weight_count(region) // (groups_of(region) * row_length(region)) // SAMPLED_ROWS)
    return slice(0, every * SAMPLED_ROWS, every)


def sampled_gain(
    rows: torch.Tensor, step: torch.Tensor, grid: WeightGrid, fitted: Moments, other: Moments
) -> SampledGain | None:
    """Return what GPTQ gains for some rows of a weight; ``None`` if the samples do not show it.

    Args:
        rows: the rows, float64 [groups, rows, k].
        step: the distances of their quantized values, [groups, rows, k] or [groups, rows, 1].
        grid: its grid.
        fitted: moments of the samples to fit to.
        other: moments of samples that validate.
    """
    chosen = gptq(rows, step, fitted, grid.low, grid.high).quantized
    signal = other.errors(rows).sum().item()
    plain = other.errors(rows - nearest(rows, step, grid.low, grid.high) * step).sum().item()
    found = other.errors(rows - chosen * step).sum().item()
    if not min(signal, plain, found) > 0:
        return None
    return SampledGain(10 * math.log10(signal / plain), 10 * math.log10(signal / found))


def first_only(masks: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return masks of batches that select the first sample that the given ones select."""
    chosen = [torch.zeros_like(mask) for mask in masks]
    for mask, own in zip(masks, chosen, strict=True):
        if mask.any():
            own[int(mask.int().argmax())] = True
            break
    return chosen


def is_corrected(annotations: Annotations, region: Region) -> bool:
    """Return whether data decides how the weight of a region is rounded, or its bias."""
    setting = region.setting
    if region.record.roles.weight is None:
        return False
    part = info(region.anchor).part
    if (part is not None and part.exact) or kept_weight(region, layer_operands(region.anchor).weight) is not None:
        return False
    if region.dynamic:
        return setting.rounding != Rounding.NEAREST and has_moments(region, None)
    if setting.rounding == Rounding.NEAREST and setting.bias == BiasCorrection.NONE:
        return False
    return has_moments(region, operand_site(annotations, region))


def reads_float_model(setting: Setting) -> bool:
    """Return whether a correction compares an operator with the float model."""
    return setting.bias == BiasCorrection.OUTPUTS or setting.rounding == Rounding.QRONOS


def is_measured(annotations: Annotations, region: Region) -> bool:
    """Return whether a region has an imported weight that is rounded again and whose cost data measures."""
    if region.record.roles.weight is None or region.dynamic:
        return False
    weight = layer_operands(region.anchor).weight
    if info(weight).imported is None or kept_weight(region, weight) is not None:
        return False
    return has_moments(region, operand_site(annotations, region))


def operand_site(annotations: Annotations, region: Region) -> Site:
    """Return the site of the activation that an anchor multiplies by its weight."""
    return annotations.by_value[layer_operands(region.anchor).x.name, Role.ACTIVATION]
