"""SmoothQuant factors, which move a part of the size of large activation channels into the weights.

They follow Xiao et al. 2022 with two additions. A channel counts as at least as large as the median channel, because a
short calibration may underestimate quiet channels. And the strength is chosen by cross-validation on samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from intaglio import numerics
from intaglio.quant.equalization.channel_records import ChannelFactors, FoldExtrema
from intaglio.quant.equalization.sampled_rows import FOLDS, SampledRows

STRENGTHS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Migration strengths that are tried: the share of a channel's size that goes into the weights."""
LEAST_GAIN = 0.9
"""Ratio of the errors with and without factors, below which factors are used; smaller gains may be noise."""


def smoothing(extrema: FoldExtrema, rows: SampledRows, weights: Sequence[torch.Tensor]) -> ChannelFactors | None:
    """Return the factors with the best strength; ``None`` if none of them reduces the error by more than noise.

    Args:
        extrema: extrema of the channels over all data.
        rows: some tokens of each sample.
        weights: weights of the readers, f32[o, c].
    """
    if rows.sample_count < 2:
        return None
    weight = torch.cat(list(weights))
    signal = (rows.values @ weight.t()).double().square().sum().item()
    plain = _error(rows, weight, None)
    errors = {strength: _error(rows, weight, strength) for strength in STRENGTHS}
    strength = min(errors, key=lambda one: errors[one])
    if not errors[strength] < LEAST_GAIN * plain:
        return None
    return ChannelFactors(
        _factors(extrema.magnitudes.double(), weight.double(), strength), signal, plain, errors[strength]
    )


def _factors(largest: torch.Tensor, weight: torch.Tensor, strength: float) -> torch.Tensor:
    """Return factors with a geometric mean of one, so that the value keeps its size.

    Before normalization, channels that are always zero or have zero weights get a factor of one.
    """
    activation = largest.clamp_min(largest.median())
    columns = weight.abs().amax(0)
    found = activation**strength / columns.clamp_min(1e-12) ** (1 - strength)
    found = torch.where((activation > 0) & (columns > 0), found, torch.ones_like(found))
    return found / found.log().mean().exp()


def _error(rows: SampledRows, weight: torch.Tensor, strength: float | None) -> float:
    """Return the squared error of the results by cross-validation.

    Each fold is quantized with factors and ranges computed from the other folds.
    """
    total, fold = 0.0, rows.samples % FOLDS
    for number in range(FOLDS):
        training, validation = rows.values[fold != number], rows.values[fold == number]
        if not len(validation):
            continue
        factors = torch.ones(weight.shape[1])
        if strength is not None:
            factors = _factors(training.abs().amax(0).double(), weight.double(), strength).float()
        scale, zero = numerics.affine_qparams(
            (training / factors).min().item(), (training / factors).max().item(), 0, 255
        )
        quantized = numerics.round_clamp(validation / factors / scale, 0, 255, zero) - zero
        steps = torch.from_numpy(numerics.symmetric_scale((weight * factors).abs().amax(1).numpy(), 127))[:, None]
        integers = numerics.round_clamp(weight * factors / steps, -127, 127) * steps
        total += (validation @ weight.t() - (quantized * scale) @ integers.t()).double().square().sum().item()
    return total
