"""Values whose rounding loses most of what readers of floats compute from them stay in float, by the data."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import intaglio
from intaglio import stages
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from support.lowering import assert_equal_quantized, sqnr
from support.nets import Body, randomize
from support.programs import assert_same_bits
from support.slow_params import slow_params_except

IMAGES = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
OTHERS = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(1))
UNSEEN = torch.randn(256, 3, 16, 16, generator=torch.Generator().manual_seed(1))
"""So many that a few peaks more or less do not decide the ratio."""


def body(forward) -> nn.Module:
    """A model around two convolutions and layers for boxes, scores and their positions."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU())
        layers = {"boxes": nn.Conv2d(16, 4, 1), "more": nn.Conv2d(16, 4, 1), "scores": nn.Conv2d(16, 6, 1)}
        layers |= {"position": nn.Conv2d(4, 16, 1), "joined": nn.Conv2d(20, 4, 1)}
        model = randomize(Body(forward, backbone=backbone, **layers)).eval()
        with torch.no_grad():
            model.boxes.weight *= 12
            model.scores.bias -= 3
    return model


def logit(x: Tensor) -> Tensor:
    x = x.clamp(1e-5, 1 - 1e-5)
    return torch.log(x / (1 - x))


def refined(m: nn.Module, x: Tensor) -> Tensor:
    """Boxes that a layer reads, and that a second layer corrects in front of their sigmoid."""
    features = m.backbone(x)
    boxes = m.boxes(features).sigmoid()
    return logit(boxes) + m.more(features + m.position(boxes))


def peaks(m: nn.Module, x: Tensor) -> Tensor:
    """Scores that are not smaller than those around them."""
    scores = m.scores(m.backbone(x)).sigmoid()
    return scores * (F.max_pool2d(scores, 3, 1, 1) == scores).float()


def beside_pixels(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """A pool reads features joined with pixels, and a layer reads features alone."""
    features = m.backbone(x)
    pooled = F.avg_pool2d(torch.cat((features, m.boxes(features).relu() * 64), 1), 2)
    return m.joined(pooled), m.scores(features)


def gated(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    features = F.silu(m.backbone(x))
    features = features + F.silu(m.position(F.silu(m.boxes(features))))
    return m.scores(features).sigmoid(), features


LOSSY = {"refined": refined, "peaks": peaks, "beside pixels": beside_pixels}
LEAST = {"refined": 25, "peaks": 18, "beside pixels": 30}


def prepared(forward, recipe: Recipe | None = None, **options) -> stages.Prepared:
    return stages.prepare(stages.capture(body(forward), (IMAGES,)), Quantizer(recipe or Recipe(), **options))


def results(found: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [result.detach() for result in (found if isinstance(found, tuple) else (found,))]


def ratios(forward, quantized) -> list[float]:
    return [sqnr(*pair) for pair in zip(results(quantized(UNSEEN)), results(body(forward)(UNSEEN)), strict=True)]


def converted(before: stages.Prepared) -> stages.Reference:
    return stages.convert(before, stages.calibrate(before, [IMAGES], progress=False))


def with_data(forward) -> stages.Reference:
    return converted(stages.equalize(prepared(forward), [IMAGES]))


@pytest.mark.parametrize(
    "name", slow_params_except("beside pixels", of=LOSSY, reason="other values that the same rule leaves in float")
)
def test_what_rounding_would_lose_is_computed_in_float(name):
    forward = LOSSY[name]
    before, after = ratios(forward, converted(prepared(forward))), ratios(forward, with_data(forward))
    assert min(after) > LEAST[name]
    assert not min(after) < min(before) + 1  # ratios of infinite results are NaN


def test_rounding_makes_no_peaks():
    exact, before, after = body(peaks), converted(prepared(peaks)), with_data(peaks)
    count, rounded, found = ((model(OTHERS) > 0).sum().item() for model in (exact, before, after))
    assert abs(found - count) < abs(rounded - count) / 4


@pytest.mark.parametrize(
    "name", slow_params_except("beside pixels", of=LOSSY, reason="other values in the same float loops")
)
def test_kernels_give_the_bits_of_the_integer_graph(name):
    reference = with_data(LOSSY[name])
    lowered = stages.requantize(reference)
    assert_equal_quantized(reference, lowered, OTHERS)
    assert_same_bits(tuple(results(stages.compile(reference)(OTHERS))), tuple(results(lowered(OTHERS))))


@pytest.mark.slow(reason="quantizes a model for one note")
def test_the_report_says_which_values_and_how_many_decibels():
    coverage = intaglio.quantize(body(refined), [IMAGES], progress=False).coverage
    (note,) = [note for note in coverage.notes if note.startswith("not rounded for readers of floats")]
    assert re.search(r"aten\.clamp\.default \(0\.0 dB\), aten\.sigmoid\.default \(\d+\.\d dB\)", note)
    reasons = {part.operator: part.reason for part in coverage.loops}
    assert reasons["aten.clamp.default"] == "256 quantized values would leave 0.0 dB of what is computed from it"
    assert coverage.macs_int8 == coverage.macs_total


def test_operators_behind_a_coarse_value_say_so():
    skipped = stages.equalize(prepared(beside_pixels), [IMAGES]).annotations.skipped
    reasons = {skip.origin.operator: skip.reason for skip in skipped}
    assert reasons["aten.cat.default"] == "it computes from a value that 256 quantized values represent too coarsely"


def test_values_that_keep_their_information_stay_quantized():
    before = prepared(gated)
    after = stages.equalize(before, [IMAGES])
    assert not after.equalization.coarse
    assert after.annotations.skipped == before.annotations.skipped


def test_saved_parameters_give_the_same_model_without_data():
    after = stages.equalize(prepared(refined), [IMAGES])
    assert len(after.equalization.coarse) == 2
    reference = converted(after)
    loaded = Parameters.from_json(reference.parameters.to_json())
    assert loaded == reference.parameters
    again = stages.convert(prepared(refined), loaded)
    assert torch.equal(again(OTHERS), reference(OTHERS))
    assert again.model_info.notes == reference.model_info.notes


def test_batches_of_any_size_are_measured_alike():
    found = [stages.equalize(prepared(refined), list(IMAGES.split(size))).equalization.coarse for size in (16, 4)]
    assert found[0] == found[1]


class Masked(nn.Module):
    """Tokens that a layer and readers of floats get."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.first(x).relu()
        return self.second(tokens), torch.tanh(tokens) * attention_mask[:, :, None]


@pytest.mark.slow(reason="equalizes a model with masks twice")
def test_values_of_hidden_tokens_are_not_measured():
    model, mask = randomize(Masked()).eval(), torch.ones(16, 6, dtype=torch.long)
    x = torch.randn(16, 6, 8, generator=torch.Generator().manual_seed(0))
    mask[1::2, 4:] = 0
    x[1::2, 4:] *= 1000
    before = stages.prepare(stages.capture(model, (x, mask)), Quantizer(Recipe()))
    assert not stages.equalize(before, [(x, mask)]).equalization.coarse
    (found,) = stages.equalize(before, [(x, torch.ones_like(mask))]).equalization.coarse.values()
    assert found < 20
