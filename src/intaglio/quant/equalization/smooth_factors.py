"""SmoothQuant factors, which move a part of the size of large activation channels into the weights.

They follow Xiao et al. 2022 with two additions. A channel counts as at least as large as the median channel, because a
short calibration may underestimate quiet channels. And the strength is chosen by cross-validation on samples.

Weights of fewer than 8 bits lose more than activations do. For them the factors of AWQ (Lin et al. 2023) are tried too,
which make the weights of large channels larger, and leave the sizes of the weights out of account.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from intaglio import numerics
from intaglio.quant.equalization.channel_records import ChannelFactors, FoldExtrema
from intaglio.quant.equalization.sampled_rows import FOLDS, SampledRows

STRENGTHS = tuple((share, 1 - share) for share in (0.5, 0.6, 0.7, 0.8, 0.9))
"""Migration strengths that are tried: exponents of the size of a channel, and of the size of its weights."""
FEW_BITS_STRENGTHS = (*STRENGTHS, *((share, 0.0) for share in (0.1, 0.2, 0.3, 0.4, 0.5)))
"""The same for weights of fewer than 8 bits."""
OUTPUT_COUNT = 256
"""Number of outputs of the readers that suffice to compare strengths."""
LEAST_GAIN = 0.9
"""Ratio of the errors with and without factors, below which factors are used; smaller gains may be noise."""


class LayerRounding(NamedTuple):
    """Rounding of a value, and of the weights of the layers that read it.

    Attributes:
        per_token: whether each position of the value has a scale of its own.
        largest: largest quantized value of the weights.
        group: number of neighbouring weights with a scale of their own; 0 for one scale per output.
    """

    per_token: bool = False
    largest: int = 127
    group: int = 0

    @property
    def strengths(self) -> tuple[tuple[float, float], ...]:
        """Return the migration strengths to try."""
        return STRENGTHS if self.largest >= 127 else FEW_BITS_STRENGTHS


STATIC_INT8 = LayerRounding()
"""Calibrated ranges of values and int8 weights with a scale per output."""


def smoothing(
    extrema: FoldExtrema, rows: SampledRows, weights: Sequence[torch.Tensor], rounding: LayerRounding = STATIC_INT8
) -> ChannelFactors | None:
    """Return the factors with the best strength; ``None`` if none of them reduces the error by more than noise, or if
    the results of the readers are zero.

    Each fold of the samples is quantized with factors and ranges computed from the other folds.

    Args:
        extrema: extrema of the channels over all data.
        rows: some tokens of each sample.
        weights: weights of the readers, f32[o, c].
        rounding: how the readers round the value and their weights.
    """
    if rows.sample_count < 2:
        return None
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))  # one may be as large as a vocabulary
    columns, outputs = torch.maximum(-weight.amin(0), weight.amax(0)).double(), _spread_outputs(weight)
    folds = _folds(rows, outputs)
    signal = sum(fold.exact.double().square().sum().item() for fold in folds)
    if not signal > 0:
        return None
    ones = torch.ones(len(columns))
    plain_weight = _rounded(outputs, ones, rounding)
    plain = sum(_error(fold, plain_weight, ones, rounding) for fold in folds)
    errors = {}
    for strength in rounding.strengths:
        factors = [_factors(fold.largest, columns, strength).float() for fold in folds]
        errors[strength] = sum(
            _error(fold, _rounded(outputs, of_fold, rounding), of_fold, rounding)
            for fold, of_fold in zip(folds, factors, strict=True)
        )
    strength = min(errors, key=lambda one: errors[one])
    if not errors[strength] < LEAST_GAIN * plain:
        return None
    return ChannelFactors(_factors(extrema.magnitudes.double(), columns, strength), signal, plain, errors[strength])


class _Fold(NamedTuple):
    """A fold of cross-validation.

    Attributes:
        low: smallest value of each channel in the samples of the other folds, f32[c].
        high: largest value of each of these channels, f32[c].
        validation: positions of the samples of this fold, f32[s, c].
        exact: the results of the readers for them, f32[s, o].
    """

    low: torch.Tensor
    high: torch.Tensor
    validation: torch.Tensor
    exact: torch.Tensor

    @property
    def largest(self) -> torch.Tensor:
        """Return the largest magnitude of each channel in the samples of the other folds, f64[c]."""
        return torch.maximum(-self.low, self.high).double()


def _spread_outputs(weight: torch.Tensor) -> torch.Tensor:
    """Return `OUTPUT_COUNT` rows that are spread over a weight, or all of its rows if there are fewer."""
    count = min(OUTPUT_COUNT, len(weight))
    return weight[torch.arange(count) * len(weight) // count]


def _folds(rows: SampledRows, weight: torch.Tensor) -> list[_Fold]:
    """Return the folds that have samples."""
    found, fold = [], rows.samples % FOLDS
    for number in range(FOLDS):
        training, validation = rows.values[fold != number], rows.values[fold == number]
        if len(validation):
            found.append(_Fold(*training.aminmax(dim=0), validation, validation @ weight.t()))
    return found


def _factors(largest: torch.Tensor, columns: torch.Tensor, strength: tuple[float, float]) -> torch.Tensor:
    """Return factors with a geometric mean of one, so that the value keeps its size.

    Before normalization, channels that are always zero or have zero weights get a factor of one.

    Args:
        largest: largest magnitude of each channel.
        columns: largest magnitude of the weights of each channel.
        strength: exponents of a channel's size and of that of its weights.
    """
    activation = largest.clamp_min(largest.median())
    found = activation ** strength[0] / columns.clamp_min(1e-12) ** strength[1]
    found = torch.where((activation > 0) & (columns > 0), found, torch.ones_like(found))
    return found / found.log().mean().exp()


def _rounded(weight: torch.Tensor, factors: torch.Tensor, rounding: LayerRounding) -> torch.Tensor:
    """Return a weight f32[o, c] whose columns are multiplied by factors, rounded with a scale per output or group."""
    largest, group = rounding.largest, rounding.group or weight.shape[1]
    scaled = functional.pad(weight * factors, (0, -weight.shape[1] % group)).reshape(len(weight), -1, group)
    steps = torch.from_numpy(numerics.symmetric_scale(scaled.abs().amax(2).numpy(), largest))[:, :, None]
    return (numerics.round_clamp(scaled / steps, -largest, largest) * steps).flatten(1)[:, : weight.shape[1]]


def _error(fold: _Fold, weight: torch.Tensor, factors: torch.Tensor, rounding: LayerRounding) -> float:
    """Return the squared error of the results of a fold that is quantized with factors and the range of the others.

    Args:
        fold: the fold.
        weight: the rounded weight, with columns multiplied by the factors.
        factors: divisors of the channels.
        rounding: how the value is rounded.
    """
    divided = fold.validation / factors
    if rounding.per_token:
        scales = numerics.symmetric_scale(divided.abs().amax(1).numpy(), numerics.ROW_STEPS)
        steps = torch.from_numpy(scales)[:, None]
        rounded = numerics.round_clamp(divided / steps, -numerics.ROW_STEPS, numerics.ROW_STEPS) * steps
    else:
        low, high = (fold.low / factors).min().item(), (fold.high / factors).max().item()
        scale, zero = numerics.affine_qparams(low, high, 0, 255)
        rounded = (numerics.round_clamp(divided / scale, 0, 255, zero) - zero) * scale
    return (fold.exact - rounded @ weight.t()).double().square().sum().item()
