"""Factors that equalize the channels of a value, and their validation on samples that they were not computed from.

The factor of a channel is its largest magnitude relative to that of all channels, to a power (Nagel et al. 2019).
Equalized channels use the whole range of the quantized values, so that values beyond the calibration data are clipped
in every channel, where without factors only the largest channels are clipped. Few samples underestimate the magnitudes
of most channels, and the clipping then costs more than the finer steps gain. Two things prevent this: magnitudes are
estimated the more cautiously the fewer samples there are, and factors are used only if cross-validation shows a gain.
The columns of the weights that absorb factors are rounded more coarsely, which counts as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from intaglio import numerics
from intaglio.quant.equalization.channel_records import ChannelFactors, ChannelRecord
from intaglio.quant.equalization.reader_errors import ReaderWeight
from intaglio.quant.equalization.sampled_rows import FOLDS

FLOOR = 0.1
"""Smallest factor, unless the median of all channels is smaller: no channel grows more than tenfold or more than most
channels."""
CAUTION = (0, 1, 4, 16, 64)
"""Numbers of samples to add, in which all channels are as large as the largest, before magnitudes are averaged."""
CAUTIOUS = 256
"""Product of the numbers of samples and added samples from which a small gain is trusted."""
SMALL_GAIN = 0.9
"""Ratio of the errors with and without factors, below which cautious ones are used. The ratio of the sums over folds
and the geometric mean of the folds' ratios must be below it, because one fold may dominate the sums."""
WEIGHT_ERRORS = 2.0
"""Weight of errors of rounded weights, beside errors of rounded values, which differ between positions and cancel in
sums and means behind the reader."""
FITTED_WEIGHT_ERRORS = 0.5
"""The same for weights that GPTQ or AdaRound fit to many samples, which reduces their errors."""
MANY_SAMPLES = 128
"""Number of samples from which it does so in most layers."""
LARGE_GAIN = 0.3
"""Ratio of the errors below which it must be in every fold for less cautious factors, as outlier channels make it."""


def equalized_value(
    record: ChannelRecord, readers: Sequence[ReaderWeight], power: float, levels: int = 255, *, fitted: bool = False
) -> ChannelFactors | None:
    """Return the best factors of a value; ``None`` if no factors are better by more than noise.

    Args:
        record: the extrema and some positions of the value.
        readers: the weights of its readers.
        power: setting ``equalize``, from 0 to 1.
        levels: number of steps of the quantized values.
        fitted: whether the weights of the readers are fitted to the samples afterwards.
    """
    samples = record.rows.sample_count
    if samples < 2 or not record.extrema.finite:
        return None
    magnitudes = record.extrema.magnitudes
    weight_errors = FITTED_WEIGHT_ERRORS if fitted and samples >= MANY_SAMPLES else WEIGHT_ERRORS
    plain = _reader_errors(record, readers, power, levels, weight_errors, None)
    used = plain > 0
    best, least = None, math.inf
    for added in CAUTION if used.any() else ():
        share = added / (samples + added)
        errors = _reader_errors(record, readers, power, levels, weight_errors, share)
        ratios = errors[used] / plain[used]
        mean = ratios.clamp_min(1e-30).log().mean().exp().item()
        gain = max(mean, (errors.sum() / plain.sum()).item())
        cautious = samples * added >= CAUTIOUS
        if mean < least and (gain < SMALL_GAIN if cautious else ratios.max() < LARGE_GAIN):
            found = equalizing_factors(magnitudes, power, share)
            best, least = ChannelFactors(found, float(len(readers)), plain.sum().item(), errors.sum().item()), mean
    return best


def equalizing_factors(magnitudes: torch.Tensor, power: float, share: float = 0.0) -> torch.Tensor:
    """Return the factors of channels, float64; 1 for channels that are always zero.

    Args:
        magnitudes: largest magnitude of each channel, f32[channels].
        power: exponent of the relative magnitudes.
        share: weight of the largest magnitude of all channels in the mean with that of each channel.
    """
    top = magnitudes.double().max()
    relative = magnitudes.double() / top.clamp_min(1e-300)
    # The last elements of a vector may be computed by another function than the others, which rounds differently.
    values, places = (relative * (1 - share) + share).unique(return_inverse=True)
    relative = (values**power).cummax(0).values[places]
    used = relative[magnitudes > 0]
    floor = min(FLOOR, used.median().item()) if len(used) else FLOOR
    return torch.where(magnitudes > 0, relative.clamp_min(floor), torch.ones_like(relative))


def _reader_errors(
    record: ChannelRecord,
    readers: Sequence[ReaderWeight],
    power: float,
    levels: int,
    weight_errors: float,
    share: float | None,
) -> torch.Tensor:
    """Return for each fold the squared errors of the readers' results, as shares of the results; float64[folds].

    Without a share the value is not divided by factors.
    """
    squares, errors = _channel_errors(record, levels, power, share)
    magnitudes = record.extrema.magnitudes
    ones = torch.ones(len(magnitudes), dtype=torch.float64)
    factors = ones if share is None else equalizing_factors(magnitudes, power, share)
    found = torch.zeros(FOLDS, dtype=torch.float64)
    for reader in readers:
        gains = reader.gains(len(factors))
        signal = gains @ squares.sum(0)
        if signal > 0:
            found += (errors @ gains + weight_errors * squares @ reader.rounding_gains(factors)) / signal
    return found


def _channel_errors(
    record: ChannelRecord, levels: int, power: float, share: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the squares of each fold and channel, and of their errors with factors and range from the other folds."""
    values, samples = record.rows
    squares = torch.zeros(FOLDS, values.shape[1], dtype=torch.float64)
    errors = torch.zeros_like(squares)
    for fold in range(FOLDS):
        here, others = values[samples % FOLDS == fold], record.extrema.without(fold)
        factors = torch.ones(values.shape[1])
        if share is not None:
            factors = equalizing_factors(others.magnitudes, power, share).float()
        scale, zero = numerics.affine_qparams(*others.range(factors), 0, levels)
        quantized = numerics.round_clamp(here / factors / scale, -zero, levels - zero) * scale
        squares[fold] = here.double().square().sum(0)
        errors[fold] = (quantized * factors - here).double().square().sum(0)
    return squares, errors
