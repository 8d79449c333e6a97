"""Factors of channels are used where they help on samples that they were not computed from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

import intaglio
from intaglio import stages
from intaglio.quant.equalization.channel_records import ChannelFactors, ChannelRecord, FoldExtrema
from intaglio.quant.equalization.equalization_factors import equalized_value, equalizing_factors
from intaglio.quant.equalization.reader_errors import ReaderWeight
from intaglio.quant.equalization.sampled_rows import FOLDS, SampledRows
from intaglio.quant.equalization.smooth_factors import smoothing
from support.lowering import sqnr
from support.slow_params import slow_params

MAGNITUDES = hnp.arrays("float32", st.integers(1, 20), elements=st.floats(0, 1000, width=32))


def correlated(count: int, seed: int) -> Tensor:
    """Samples [count, 64] whose elements are correlated, as activations are."""
    draw = torch.Generator().manual_seed(7)
    mixing = torch.randn(64, 64, generator=draw) * torch.linspace(0.05, 1, 64)
    return torch.randn(count, 64, generator=draw.manual_seed(seed)) @ mixing


@torch.no_grad()
@pytest.mark.parametrize(
    "samples",
    [
        1,
        *slow_params(2, reason="numbers of samples between the others"),
        4,
        *slow_params(16, reason="numbers of samples between the others"),
        64,
        *slow_params(256, reason="numbers of samples between the others"),
    ],
)
@pytest.mark.parametrize("seed", [0, *slow_params(1, reason="another network at random")])
def test_equalization_loses_nothing_on_unseen_samples(samples, seed):
    """It lost 23 dB of an MLP with four samples, 13 dB with 64 and 2 dB with 1024: unseen values were clipped."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).eval()
    data, unseen, found = correlated(samples, 1), correlated(1000, 2), []
    for equalize in (0.0, 0.75):
        recipe = intaglio.Recipe.of({"*": {"equalize": equalize, "rounding": "nearest"}})
        prepared = stages.prepare(stages.capture(model, data), stages.Quantizer(recipe))
        prepared = stages.equalize(prepared, [data])
        reference = stages.convert(prepared, stages.calibrate(prepared, [data], progress=False))
        found.append(sqnr(reference(unseen), model(unseen)))
    assert found[1] >= found[0] - 0.2


def record(samples: int, sizes: Tensor, seed: int = 0) -> ChannelRecord:
    """Return what is recorded of vectors whose channels have these sizes."""
    rows = torch.randn(samples, len(sizes), generator=torch.Generator().manual_seed(seed)) * sizes
    extrema = FoldExtrema(torch.zeros(FOLDS, len(sizes)), torch.zeros(FOLDS, len(sizes)))
    extrema.widen(rows, 0, -1)
    return ChannelRecord(extrema, SampledRows.of(rows, 0, -1, 1))


def factors(samples: int, sizes: Tensor) -> ChannelFactors | None:
    """Return the factors of such vectors, which are read by a weight that makes all channels as large."""
    reader = ReaderWeight((1 / sizes.double()).reshape(-1, 1, 1, 1), torch.arange(len(sizes)))
    return equalized_value(record(samples, sizes), [reader], 0.75)


def test_many_samples_of_uneven_channels_are_equalized():
    found = factors(256, torch.logspace(-2, 0, 32))
    assert found is not None
    assert found.after < 0.3 * found.before
    assert found.factors.max() == 1
    assert 0.02 < found.factors.min() < 0.2


@pytest.mark.parametrize("samples", [2, 8, 64, 256])
def test_channels_of_the_same_size_are_not_equalized(samples):
    assert factors(samples, torch.ones(256)) is None


def test_one_sample_is_not_enough():
    assert factors(1, torch.logspace(-2, 0, 32)) is None


@pytest.mark.parametrize("samples", [5, 30])
def test_few_samples_suffice_for_an_outlier_channel(samples):
    sizes = torch.ones(32)
    sizes[5] = 300
    found = factors(samples, sizes)
    assert found is not None
    assert found.factors[5] == 1
    assert found.factors.min() < 0.3
    assert found.after < 0.3 * found.before


def test_the_fewer_samples_there_are_the_closer_are_the_factors_to_one():
    sizes = torch.linspace(0.05, 1, 64)
    many, few = (factors(samples, sizes) for samples in (256, 16))
    assert many is not None
    assert few is not None
    assert few.factors.min() > 2 * many.factors.min()


def test_values_that_are_not_finite_have_no_factors():
    found = record(64, torch.logspace(-2, 0, 32))
    found.extrema.high[0, 3] = torch.inf
    assert equalized_value(found, [ReaderWeight.of_addition(32)], 0.75) is None


@given(MAGNITUDES, st.floats(0, 1), st.floats(0, 1))
def test_factors_are_at_most_one_and_grow_with_magnitudes(magnitudes, power, share):
    magnitudes = torch.from_numpy(magnitudes)
    factors = equalizing_factors(magnitudes, power, share)
    assert (factors > 0).all()
    assert factors.max() == 1
    used = magnitudes > 0
    assert (factors[~used] == 1).all()
    assert (factors[used][magnitudes[used].argsort()].diff() >= 0).all()


def test_equal_channels_have_equal_factors_whatever_their_places():
    magnitudes = torch.full((17,), 0.95)
    magnitudes[0] = 878.10266
    assert len(equalizing_factors(magnitudes, 0.7529949538411709, 0.14690043140458633).unique()) == 2


@given(MAGNITUDES)
def test_full_caution_changes_nothing(magnitudes):
    assert (equalizing_factors(torch.from_numpy(magnitudes), 0.75, 1.0) == 1).all()


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 1000))
def test_positions_are_sampled_from_every_sample(positions, count, first):
    batch = torch.arange(3)[:, None, None] * 1000 + torch.arange(positions)[:, None] + torch.zeros(5)
    rows = SampledRows.of(batch, first, -1, count)
    assert len(rows.values) == 3 * min(count, positions)
    assert torch.equal(rows.samples - first, (rows.values[:, 0] / 1000).long())


def test_readers_whose_results_are_zero_smooth_nothing():
    """The mean of a uniform distribution over numbers around zero, as the box heads of D-FINE begin."""
    steps = torch.tensor([*(3 ** (place / 15) - 1 for place in range(16)), 4.0])
    numbers = torch.cat([-steps.flip(0)[:-1], steps])
    rows = SampledRows(torch.full((384, 33), 1 / 33), torch.arange(384) // 64)
    extrema = FoldExtrema(torch.zeros(FOLDS, 33), torch.full((FOLDS, 33), 1 / 33))
    assert smoothing(extrema, rows, [numbers[None]]) is None
