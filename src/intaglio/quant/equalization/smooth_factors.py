"""SmoothQuant factors, which move a part of the size of large activation channels into the weights.

They follow Xiao et al. 2022 with two additions. A channel counts as at least as large as the median channel, because a
short calibration may underestimate quiet channels. And the strength is chosen by cross-validation on samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from intaglio import numerics

STRENGTHS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Migration strengths that are tried: the share of a channel's size that goes into the weights."""
FOLDS = 8
"""Number of folds of the cross-validation."""
TOKENS = 16
"""Number of tokens that are sampled from each sample."""
SAMPLED_ROW_COUNT = 1024
"""Largest number of tokens from all samples together."""


@dataclass(frozen=True)
class SampledRows:
    """Sampled tokens of a value.

    Attributes:
        values: the tokens, f32[r, c].
        samples: the sample that each token is from, numbered over all batches.
    """

    values: torch.Tensor
    samples: torch.Tensor

    @staticmethod
    def of(value: torch.Tensor, first: int) -> SampledRows:
        """Return tokens of a batch [n, ..., c], evenly spaced in each sample; samples are numbered from ``first``."""
        value = torch.atleast_2d(value)  # a vector is one sample
        tokens = value.reshape(value.shape[0], -1, value.shape[-1])
        step = max(1, tokens.shape[1] // TOKENS)
        chosen = tokens[:, ::step][:, :TOKENS]
        samples = torch.arange(first, first + len(tokens)).repeat_interleave(chosen.shape[1])
        return SampledRows(chosen.reshape(-1, value.shape[-1]).float(), samples)

    def evenly_spaced(self) -> SampledRows:
        """Return at most `SAMPLED_ROW_COUNT` of the tokens, evenly spaced."""
        step = -(-len(self.values) // SAMPLED_ROW_COUNT)
        return SampledRows(self.values[::step], self.samples[::step])

    @staticmethod
    def joined(parts: Sequence[SampledRows]) -> SampledRows:
        """Return the tokens of all parts."""
        return SampledRows(torch.cat([part.values for part in parts]), torch.cat([part.samples for part in parts]))


@dataclass(frozen=True)
class Smoothing:
    """Factors for one value, and what they gain.

    Attributes:
        factors: divisors of the channels.
        strength: migration strength.
        signal: sum of squares of the readers' results.
        before: sum of squares of their errors without factors.
        after: sum of squares of their errors with factors.
    """

    factors: torch.Tensor
    strength: float
    signal: float
    before: float
    after: float


def smoothing(rows: SampledRows, weights: Sequence[torch.Tensor], largest: torch.Tensor) -> Smoothing | None:
    """Return the factors with the best strength; ``None`` if none of them reduces the error.

    Args:
        rows: sampled tokens.
        weights: weights of the readers, f32[o, c].
        largest: largest magnitude of each channel over all data.
    """
    weight, rows = torch.cat(list(weights)), rows.evenly_spaced()
    signal = (rows.values @ weight.t()).double().square().sum().item()
    plain = _error(rows, weight, None)
    errors = {strength: _error(rows, weight, strength) for strength in STRENGTHS}
    strength = min(errors, key=lambda one: errors[one])
    if not errors[strength] < plain:
        return None
    return Smoothing(_factors(largest.double(), weight.double(), strength), strength, signal, plain, errors[strength])


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
        training = training if len(training) else validation
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
