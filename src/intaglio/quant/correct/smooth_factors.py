"""Factors for what a layer norm gives to linear layers: large channels lend some of their size to the weights.

Xiao et al. 2022, with two additions: a channel counts as no smaller than the median one, for what a short calibration
saw of a quiet channel is not all; and the strength is the one that does best on samples that the factors were not made
of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from intaglio import numerics

STRENGTHS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Share of a channel's size that goes into the weights."""
FOLDS = 8
TOKENS = 16
"""Rows of a sample that are looked at."""
SAMPLED_ROW_COUNT = 1024
"""Of all samples."""


@dataclass(frozen=True)
class SampledRows:
    """Some rows float32 [r, c] of a value; ``samples``: which sample each is of, counted over all batches."""

    values: torch.Tensor
    samples: torch.Tensor

    @staticmethod
    def of(value: torch.Tensor, first: int) -> SampledRows:
        """Of a batch [n, ..., c], evenly spread over each sample, which are counted from ``first``."""
        tokens = value.reshape(value.shape[0], -1, value.shape[-1])
        step = max(1, tokens.shape[1] // TOKENS)
        chosen = tokens[:, ::step][:, :TOKENS]
        samples = torch.arange(first, first + len(tokens)).repeat_interleave(chosen.shape[1])
        return SampledRows(chosen.reshape(-1, value.shape[-1]).float(), samples)

    def few(self) -> SampledRows:
        """At most `SAMPLED_ROW_COUNT` of them, evenly spread."""
        step = -(-len(self.values) // SAMPLED_ROW_COUNT)
        return SampledRows(self.values[::step], self.samples[::step])

    @staticmethod
    def joined(parts: Sequence[SampledRows]) -> SampledRows:
        return SampledRows(torch.cat([part.values for part in parts]), torch.cat([part.samples for part in parts]))


@dataclass(frozen=True)
class Smoothing:
    """Factors and their strength; squares of the results, and of their errors without and with factors."""

    factors: torch.Tensor
    strength: float
    signal: float
    before: float
    after: float


def smoothing(rows: SampledRows, weights: Sequence[torch.Tensor], largest: torch.Tensor) -> Smoothing | None:
    """``None`` where no strength does better than none. ``weights``: float32 [o, c] of the readers; ``largest``:
    magnitude of each channel over all data.
    """
    weight, rows = torch.cat(list(weights)), rows.few()
    signal = (rows.values @ weight.t()).double().square().sum().item()
    plain = _error(rows, weight, None)
    errors = {strength: _error(rows, weight, strength) for strength in STRENGTHS}
    strength = min(errors, key=lambda one: errors[one])
    if not errors[strength] < plain:
        return None
    return Smoothing(_factors(largest.double(), weight.double(), strength), strength, signal, plain, errors[strength])


def _factors(largest: torch.Tensor, weight: torch.Tensor, strength: float) -> torch.Tensor:
    """Of mean one, so that the value keeps its size; one where a channel or its weights are always zero."""
    activation = largest.clamp_min(largest.median())
    columns = weight.abs().amax(0)
    found = activation**strength / columns.clamp_min(1e-12) ** (1 - strength)
    found = torch.where((activation > 0) & (columns > 0), found, torch.ones_like(found))
    return found / found.log().mean().exp()


def _error(rows: SampledRows, weight: torch.Tensor, strength: float | None) -> float:
    """Squared error of the results on each fold, quantized by what the other folds say."""
    total, fold = 0.0, rows.samples % FOLDS
    for number in range(FOLDS):
        seen, held = rows.values[fold != number], rows.values[fold == number]
        if not len(held):
            continue
        seen = seen if len(seen) else held
        factors = torch.ones(weight.shape[1])
        if strength is not None:
            factors = _factors(seen.abs().amax(0).double(), weight.double(), strength).float()
        scale, zero = numerics.affine((seen / factors).min().item(), (seen / factors).max().item(), 0, 255)
        levels = numerics.round_clamp(held / factors / scale, 0, 255, zero) - zero
        steps = torch.from_numpy(numerics.symmetric((weight * factors).abs().amax(1).numpy(), 127))[:, None]
        integers = numerics.round_clamp(weight * factors / steps, -127, 127) * steps
        total += (held @ weight.t() - (levels * scale) @ integers.t()).double().square().sum().item()
    return total
