"""Padding changes neither statistics nor corrections, whatever values it has."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

from intaglio.errors import CalibrationError
from intaglio.fxgraph.padding_masks import PaddedAxes, visible_channels, visible_groups
from intaglio.quant.correct.corrections import Corrected
from intaglio.quant.recipes.recipe import Recipe
from intaglio.stages import Prepared, Quantizer, calibrate, capture, convert, correct, equalize, prepare
from support.slow_params import slow_params

LENGTHS = 3 * (7, 3, 5, 3, 6, 7, 2, 4, 7, 7, 5, 3, 6, 7, 2, 4, 5, 6)


class Tagger(nn.Module):
    """Two linear layers with weights of few bits, so that sums of products are exact in any order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4, bias=False)
        for layer in (self.first, self.last):
            layer.weight.data = torch.randint(-8, 9, layer.weight.shape) / 8
        self.first.bias.data = torch.randint(-8, 9, (16,)) / 8

    def run(self, x):
        return self.last(torch.relu(self.first(x)))


class WithAttentionMask(Tagger):
    def forward(self, x, attention_mask):
        return self.run(x) * attention_mask[..., None]


class WithKeyPaddingMask(Tagger):
    def forward(self, x, src_key_padding_mask):
        return self.run(x).masked_fill(src_key_padding_mask[..., None], 0)


class WithJoinedTokens(Tagger):
    def forward(self, x, attention_mask):
        n, length, width = x.shape
        return self.run(x.reshape(n * length, width)).view(n, length, 4) * attention_mask[..., None]


class WithOtherMask(Tagger):
    def forward(self, x, kept):
        return self.run(x) * kept[..., None]


def samples() -> list[torch.Tensor]:
    """Return samples whose channels are correlated, so that GPTQ gains much, however the samples are divided."""
    torch.manual_seed(1)
    return [(torch.randint(-4, 5, (length, 8)) + torch.randint(-12, 13, (length, 1))) / 8 for length in LENGTHS]


def padded(filler: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all samples in one batch of 8 tokens, and a mask that is true for their tokens."""
    x, mask = torch.full((len(LENGTHS), 8, 8), filler), torch.zeros(len(LENGTHS), 8, dtype=torch.bool)
    for place, sample in enumerate(samples()):
        x[place, : len(sample)], mask[place, : len(sample)] = sample, True
    return x, mask


def batches(kind: type[nn.Module], filler: float, alone: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return one padded batch, or one batch for each sample without padding."""
    x, mask = padded(filler)
    found = [(one[None], torch.ones(1, len(one), dtype=torch.bool)) for one in samples()] if alone else [(x, mask)]
    return [(one, ~kept if kind is WithKeyPaddingMask else kept.long()) for one, kept in found]


def prepared_model(kind: type[nn.Module], recipe: Recipe | None = None) -> Prepared:
    free = {0: Dim("n"), 1: Dim("length")}
    captured = capture(kind().eval(), batches(kind, 0.0, alone=False)[0], dynamic_shapes=(free, free))
    return prepare(captured, Quantizer(recipe or Recipe()))


def corrected(kind: type[nn.Module], filler: float, alone: bool, recipe: Recipe | None = None) -> Corrected:
    """Return all corrections of a model."""
    data = batches(kind, filler, alone)
    prepared = equalize(prepared_model(kind, recipe), data)
    ranges = calibrate(prepared, data)
    return convert(prepared, ranges, correct(prepared, ranges, data)).parameters.corrected


KINDS = [WithAttentionMask, WithKeyPaddingMask, WithJoinedTokens]


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_samples_without_padding(kind):
    alone = calibrate(prepared_model(kind), batches(kind, 0.0, alone=True))
    together = calibrate(prepared_model(kind), batches(kind, 1000.0, alone=False))
    assert len(alone.statistics) > 1
    assert together.statistics.keys() == alone.statistics.keys()
    joined = {"samples": 0, "sample_low": 0, "sample_high": 0} if kind is WithJoinedTokens else {}
    for name, statistics in alone.statistics.items():  # without a mask, joined tokens count as samples
        assert replace(together.statistics[name], **joined) == replace(statistics, **joined), name


@pytest.mark.parametrize(
    ("bias", "kind"),
    [
        *(("outputs", kind) for kind in KINDS[1:]),
        ("weights", WithAttentionMask),
        *slow_params(
            ("outputs", WithAttentionMask),
            *(("none", kind) for kind in KINDS),
            *(("weights", kind) for kind in KINDS[1:]),
            reason="each fits a model twice; the quick ones have every mask and every correction",
        ),
    ],
)
def test_corrections_are_those_of_samples_without_padding(kind, bias):
    recipe = Recipe.of({"*": {"bias": bias, "rounding": "gptq"}})
    other, own = corrected(kind, 0.0, True, recipe), corrected(kind, 1000.0, False, recipe)
    assert own.equalization == other.equalization
    assert own.quantized_weights.keys() == other.quantized_weights.keys()
    for name, values in own.quantized_weights.items():
        assert np.array_equal(values, other.quantized_weights[name])
    for name, values in own.biases.items():
        assert np.allclose(values, other.biases[name], atol=1e-6)


class WithConvolution(Tagger):
    """Has a convolution over tokens, whose operand has its channels in front of the tokens."""

    def __init__(self):
        super().__init__()
        self.over_tokens = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x, attention_mask):
        hidden = (x * attention_mask[..., None]).transpose(1, 2)
        return self.run(x + self.over_tokens(hidden).transpose(1, 2)) * attention_mask[..., None]


@pytest.mark.parametrize("rounding", ["gptq", "qronos"])
def test_convolutions_over_tokens_read_padding(rounding):
    recipe = Recipe.of({"*": {"rounding": rounding}})
    own, other = (corrected(WithConvolution, filler, False, recipe) for filler in (0.0, 1000.0))
    (name,) = [name for name in own.quantized_weights if name.startswith("over_tokens")]
    assert np.array_equal(own.quantized_weights[name], other.quantized_weights[name])


@pytest.mark.parametrize("kind", [WithAttentionMask, WithKeyPaddingMask])
def test_padding_may_be_nan(kind):
    corrected(kind, float("nan"), alone=False)


def test_masks_of_other_names_hide_nothing():
    with pytest.raises(CalibrationError, match="NaN"):
        corrected(WithOtherMask, float("nan"), alone=False)


def test_the_length_may_be_fixed_and_equal_to_the_width():
    free = {0: Dim("n")}
    call = batches(WithAttentionMask, 0.0, alone=False)[0]
    captured = capture(WithAttentionMask().eval(), call, dynamic_shapes=(free, free))
    assert captured.signature.inputs[0].type.shape[1:] == (8, 8)
    calibrate(prepare(captured), batches(WithAttentionMask, float("nan"), alone=False))


class Pooled(WithAttentionMask):
    """Convolutions and layers of fewer tokens, with as many channels as there are tokens in front of them."""

    def __init__(self) -> None:
        super().__init__()
        self.windows, self.norm = nn.Conv1d(8, 8, 3), nn.LayerNorm(8)

    def forward(self, x, attention_mask):
        x = self.norm(self.windows(x.transpose(1, 2)).transpose(1, 2))
        return self.run(x), self.run(x.mean(1))


def test_channels_are_not_tokens_of_which_there_are_as_many():
    free = {0: Dim("n")}
    data = batches(WithAttentionMask, 0.0, alone=False)
    captured = capture(Pooled().eval(), data[0], dynamic_shapes=(free, free))
    recipe = Recipe.of({"*": {"equalize": 1.0, "bias": "outputs", "rounding": "gptq"}})
    prepared = equalize(prepare(captured, Quantizer(recipe)), data)
    ranges = calibrate(prepared, data)
    reference = convert(prepared, ranges, correct(prepared, ranges, data))
    for found, exact in zip(reference(*data[0]), Pooled().eval()(*data[0]), strict=True):
        assert (found - exact).square().sum() < 1e-2 * exact.square().sum()


def test_a_mask_that_hides_everything_hides_nothing():
    captured = capture(WithAttentionMask().eval(), batches(WithAttentionMask, 0.0, alone=False)[0])
    ranges = calibrate(prepare(captured), [(torch.ones(2, 8, 8), torch.zeros(2, 8, dtype=torch.long))])
    assert all(statistics.count for statistics in ranges.statistics.values())


@given(
    st.permutations(range(4)),
    st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=3, max_size=3),
    st.integers(0, 1),
)
def test_groups_have_the_visible_tokens(order, mask, channel):
    """Value [3, 5, 2, 4] with its axes in any order: the groups have the values of the visible tokens."""
    kept = torch.tensor(mask)
    value = torch.arange(120.0).view(3, 5, 2, 4)
    moved = value.permute(order)
    axes = PaddedAxes("mask", order.index(0), order.index(1))
    groups = visible_groups(moved, axes, {"mask": kept})
    expected = value[kept]
    found = torch.cat([group.flatten(0, 1) for group in groups]) if groups else value[:0, 0]
    others = [axis for axis in order if axis > 1]
    found = found if others == [2, 3] else found.transpose(1, 2)
    assert torch.equal(found.flatten(1).sort(0).values, expected.flatten(1).sort(0).values)
    assert all(group.shape[0] * group.shape[1] for group in groups)
    if groups:
        by_channel = visible_channels(moved, order.index(2 + channel), axes, {"mask": kept})
        exact = expected.movedim(1 + channel, 0).flatten(1)
        assert torch.equal(by_channel.sort(1).values, exact.sort(1).values)
