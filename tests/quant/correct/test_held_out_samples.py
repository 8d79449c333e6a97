"""Default corrections cost no accuracy on samples that they did not see, however few samples calibration had."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio import Recipe, stages
from intaglio.quant.correct import correct_weights
from support.lowering import sqnr
from support.slow_params import slow_params_except

SAMPLES = (1, 4, 16, 64, 256, 1024)
PLAIN = {"equalize": 0.0, "rounding": "nearest"}
CORRECTIONS = {"equalization": {"rounding": "nearest"}, "GPTQ": {"equalize": 0.0}, "both": {}}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.classifier = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.classifier(x.mean(1))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def convolutions() -> nn.Module:
    layers = (nn.Conv2d(inner, outer, 3, 2, 1) for inner, outer in ((3, 8), (8, 16), (16, 16)))
    rectified = [part for layer in layers for part in (layer, nn.ReLU())]
    return nn.Sequential(*rectified, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


NETWORKS = {"perceptron": (perceptron, (256,)), "cnn": (convolutions, (3, 12, 12)), "encoder": (Encoder, (8, 16))}


@functools.cache
@torch.no_grad()
def decibels(network: str, correction: str | None) -> list[float]:
    """Return the signal-to-noise ratios of 1,000 unseen samples for each number of samples of calibration."""
    make, shape = NETWORKS[network]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().eval()
        seen, unseen = torch.randn(SAMPLES[-1], *shape), torch.randn(1000, *shape)
    captured, recipe = stages.capture(model, seen[:2]), {"*": CORRECTIONS[correction] if correction else PLAIN}
    found = []
    for count in SAMPLES:
        data = seen[:count].split(64)
        prepared = stages.prepare(captured, stages.Quantizer(Recipe.of(recipe)))
        prepared = stages.equalize(prepared, data, samples=count)
        ranges = stages.calibrate(prepared, data, progress=False)
        reference = stages.convert(prepared, ranges, stages.correct(prepared, ranges, data, samples=count))
        found.append(sqnr(reference(unseen), model(unseen)))
    return found


def losses(network: str, correction: str) -> list[float]:
    """Return how many decibels a correction costs for each number of samples."""
    return [a - b for a, b in zip(decibels(network, None), decibels(network, correction), strict=True)]


DEFAULT_ALONE = slow_params_except(
    "both", of=CORRECTIONS, reason="both corrections are the default, and each fits three models more"
)


@pytest.mark.slow(reason="corrects two networks with each number of samples")
@pytest.mark.parametrize("correction", DEFAULT_ALONE)
def test_corrections_cost_at_most_a_fifth_of_a_decibel_on_average(correction):
    """Equalization cost 9 dB of the perceptron on average over the numbers of samples, and 22 dB with four."""
    every = [loss for network in NETWORKS for loss in losses(network, correction)]
    assert sum(every) / len(every) <= 0.2, every


@pytest.mark.parametrize("network", slow_params_except("perceptron", of=NETWORKS, reason="they have more layers"))
@pytest.mark.parametrize("correction", DEFAULT_ALONE)
def test_no_number_of_samples_costs_more_than_a_decibel(network, correction):
    assert max(losses(network, correction)) <= 1


class QueryAndKey(nn.Module):
    """Two layers that read one value."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x):
        return self.query(x) * self.key(x)


def test_layers_that_read_one_value_share_its_moments(monkeypatch):
    torch.manual_seed(0)
    model, data = QueryAndKey().eval(), [torch.randn(80, 16)]
    calls, moments = [], correct_weights.moments
    monkeypatch.setattr(correct_weights, "moments", lambda *args: calls.append(args) or moments(*args))
    shared = intaglio.quantize(model, data, progress=False)
    count = len(calls)
    monkeypatch.setattr(correct_weights._WeightCorrector, "_shared", lambda self, region, x, name, compute: compute())
    alone = intaglio.quantize(model, data, progress=False)
    assert len(calls) - count == 2 * count
    assert shared.text("integer") == alone.text("integer")
    assert shared.fingerprint() == alone.fingerprint()
