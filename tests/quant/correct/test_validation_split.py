"""Corrections are fitted to a part of the samples, and used if they help on another part that has no copies of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import intaglio
from intaglio import stages
from intaglio.quant.correct.validation_split import ValidationSplit, mean_generalizes, project
from support.lowering import sqnr

COLUMNS = 256


def correlated(count: int, seed: int) -> Tensor:
    """Samples [count, 256] whose elements are correlated, as activations are."""
    draw = torch.Generator().manual_seed(7)
    mixing = torch.randn(COLUMNS, COLUMNS, generator=draw) * torch.linspace(0.05, 1, COLUMNS)
    return torch.randn(count, COLUMNS, generator=draw.manual_seed(seed)) @ mixing


@torch.no_grad()
def loss_of_gptq(data: Tensor, dtype: str) -> float:
    """Return how many decibels GPTQ loses against rounding to nearest on unseen samples."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(COLUMNS, 32).eval()
    unseen, found = correlated(1000, 99), []
    for rounding in ("nearest", "gptq"):
        recipe = intaglio.Recipe.of({"*": {"rounding": rounding, "weights_dtype": dtype, "equalize": 0.0}})
        prepared = stages.prepare(stages.capture(model, data), stages.Quantizer(recipe))
        ranges = stages.calibrate(prepared, [data], progress=False)
        reference = stages.convert(prepared, ranges, stages.correct(prepared, ranges, [data]))
        found.append(sqnr(reference(unseen), model(unseen)))
    return found[0] - found[1]


@pytest.mark.parametrize("dtype", ["s8", "s4"])
@pytest.mark.parametrize("distinct", [1, 2, 5, 20, 60])
@pytest.mark.parametrize("noise", [0.0, 0.003])
def test_copies_of_few_samples_are_not_fitted(distinct, noise, dtype):
    """300 samples are more than the 256 columns, so that nothing was validated: 20 samples lost 2.5 dB in 4 bits."""
    data = correlated(distinct, 1).repeat(-(-300 // distinct), 1)[:300]
    data = data + noise * data.std() * torch.randn(data.shape, generator=torch.Generator().manual_seed(3))
    assert loss_of_gptq(data, dtype) < 0.1


def test_enough_distinct_samples_are_fitted():
    assert loss_of_gptq(correlated(1000, 1), "s4") < -0.5


@given(st.integers(2, 200), st.integers(0, 2**31), st.integers(1, 20))
def test_copies_belong_to_the_same_part_in_any_order_and_division(count, seed, size):
    draw = torch.Generator().manual_seed(seed)
    batch = torch.randint(0, 256, (count, 6), dtype=torch.uint8, generator=draw)
    batch = torch.cat([batch, batch[torch.randint(0, count, (count,), generator=draw)]])
    split = ValidationSplit.of(project(batch), batch.shape[1])
    part = split.validates(batch)
    order = torch.randperm(2 * count, generator=draw)
    assert split == ValidationSplit.of(torch.cat([project(some) for some in batch[order].split(size)]), 6)
    assert torch.equal(torch.cat([split.validates(some) for some in batch[order].split(size)]), part[order])
    for values in batch.unique(dim=0):
        assert len(part[(batch == values).all(1)].unique()) == 1


@pytest.mark.parametrize("count", [64, 256, 1000])
def test_about_an_eighth_of_many_samples_validates(count):
    batch = torch.randint(0, 256, (count, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    split = ValidationSplit.of(project(batch), batch.shape[1])
    assert not split.crossed
    assert count / 20 < split.validates(batch).sum() < count / 4


@pytest.mark.parametrize("count", [2, 3, 8, 63])
def test_few_samples_are_halved(count):
    divided = []
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        batch = torch.randint(0, 256, (count, 5000), dtype=torch.uint8, generator=draw)
        split = ValidationSplit.of(project(batch), 5000)
        assert split.crossed
        divided.append(0 < split.validates(batch).sum() < count)
    assert sum(divided) >= 19


def test_a_mean_that_is_noise_does_not_generalize():
    assert mean_generalizes((torch.tensor([10.0]), torch.tensor([12.0])), (5, 5), crossed=True)
    assert not mean_generalizes((torch.tensor([10.0]), torch.tensor([-12.0])), (5, 5), crossed=True)
    assert not mean_generalizes((torch.tensor([10.0]), torch.tensor([0.0])), (5, 0), crossed=False)


def test_the_mean_of_a_few_values_that_validate_is_not_subtracted_from_the_others():
    sums, counts = (torch.tensor([10.0]), torch.tensor([30.0])), (100, 10)
    assert mean_generalizes(sums, counts, crossed=False)
    assert not mean_generalizes(sums, counts, crossed=True)
