"""Weights that are rounded to nearest without a look at data."""

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import intaglio
from intaglio import Recipe, stages
from intaglio.quant.correct import correct_weights, effort, weight_blocks
from intaglio.quant.recipes.choices import Effort
from intaglio.quant.recipes.recipe import Setting
from support.slow_params import slow_params

MIXING = torch.randn(6, 6, generator=torch.Generator().manual_seed(2))
BATCHES = [torch.randn(32, 6, generator=torch.Generator().manual_seed(i)) @ MIXING for i in range(2)]


def reference(**setting):
    torch.manual_seed(0)
    quantizer = stages.Quantizer(Recipe(default=Setting(equalize=0.0, **setting)))
    prepared = stages.prepare(stages.capture(nn.Linear(6, 4).eval(), BATCHES[0]), quantizer)
    ranges = stages.calibrate(prepared, BATCHES)
    return stages.convert(prepared, ranges, stages.correct(prepared, ranges, BATCHES))


def weight_of(found):
    return next(b.numpy() for b in found.module.buffers() if b.dtype is torch.int8)


def test_a_recipe_without_corrections_computes_no_moments(monkeypatch):
    monkeypatch.setattr(correct_weights, "moments", lambda *args: pytest.fail("moments are computed"))
    reference(rounding="nearest", bias="none")


def test_weights_with_large_moments_are_rounded_to_nearest(monkeypatch):
    corrected, nearest = weight_of(reference(rounding="gptq")), weight_of(reference(rounding="nearest"))
    assert not np.array_equal(corrected, nearest)
    monkeypatch.setattr(effort, "LARGEST_MOMENTS", 35)
    assert np.array_equal(weight_of(reference(rounding="gptq")), nearest)


def test_the_report_names_weights_with_large_moments(monkeypatch):
    monkeypatch.setattr(effort, "LARGEST_MOMENTS", 35)
    model = intaglio.quantize(nn.Sequential(nn.Linear(6, 4)).eval(), BATCHES, progress=False)
    line = "0: rounded to nearest, because the moments of its operand take 288 bytes"
    assert line in model.text("corrections")


@pytest.mark.parametrize("limit", ["memory", "time"])
def test_weights_that_take_too_much_of_qronos_are_rounded_by_gptq(monkeypatch, limit):
    by_gptq = weight_of(reference(rounding="gptq"))
    if limit == "memory":
        monkeypatch.setattr(effort, "LARGEST_MOMENTS", 36)
    else:
        monkeypatch.setattr(effort, "PRODUCTS_OF_SHIFT", 1e12)
    assert np.array_equal(weight_of(reference(rounding="qronos")), by_gptq)
    model = intaglio.quantize(
        nn.Sequential(nn.Linear(6, 4)).eval(), BATCHES, recipe={"*": {"rounding": "qronos"}}, progress=False
    )
    assert "0: rounded by GPTQ, because " in model.text("corrections")
    assert "gptq: 1 weights" in model.text("corrections")


def test_the_report_names_weights_in_groups_with_many_elements(monkeypatch):
    monkeypatch.setattr(effort, "LARGEST_WEIGHT", 20)
    images = [torch.randn(4, 6, 2, 2) for _ in range(4)]
    model = intaglio.quantize(nn.Sequential(nn.Conv2d(6, 8, 1, groups=2)).eval(), images, progress=False)
    assert "0: rounded to nearest, because it has 24 elements in 2 groups" in model.text("corrections")


SETTINGS = {
    "channel": {},
    "tensor": {"weights": "tensor"},
    "s4": {"weights_dtype": "s4"},
    "s4 in groups": {"weights_dtype": "s4", "weights": "group:4"},
}


QUICK = [("channel", "gptq"), ("tensor", "nearest"), ("s4", "qronos"), ("s4 in groups", "gptq")]


@pytest.mark.parametrize(
    ("weights", "rounding"),
    [
        *QUICK,
        *slow_params(
            *(pair for pair in itertools.product(SETTINGS, ("gptq", "qronos", "nearest")) if pair not in QUICK),
            reason="the same kinds of weights and of rounding in other pairs",
        ),
    ],
)
def test_large_weights_are_rounded_in_blocks_as_in_one(monkeypatch, rounding, weights):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 40), nn.GELU(), nn.Linear(40, 2)).eval()
    mixed = torch.randn(8, 8)
    data = [torch.randn(64, 9, 8) @ mixed for _ in range(4)]

    def quantized():
        recipe = {"*": {"rounding": rounding, "bias": "weights", **SETTINGS[weights]}}
        done = intaglio.quantize(model, data, recipe=recipe, progress=False)
        return done(data[0]), [line for line in done.text("corrections").splitlines() if "groups" not in line]

    whole, report = quantized()
    monkeypatch.setattr(weight_blocks, "LARGEST_WEIGHT", 100)
    monkeypatch.setattr(weight_blocks, "BLOCK_OF_LARGE", 56)  # 7 rows of the 40
    blocks, same_report = quantized()
    assert torch.equal(blocks, whole)
    assert same_report == report


def test_weights_that_would_take_too_long_are_rounded_to_nearest_with_what_they_would_gain(monkeypatch):
    corrected, nearest = weight_of(reference(rounding="gptq")), weight_of(reference(rounding="nearest"))
    monkeypatch.setitem(effort.ALLOWED_SECONDS, Effort.FAST, 0.0)
    assert np.array_equal(weight_of(reference(rounding="gptq", effort="fast")), nearest)
    assert np.array_equal(weight_of(reference(rounding="gptq", effort="best")), corrected)
    recipe = {"*": {"effort": "fast"}}
    model = intaglio.quantize(nn.Sequential(nn.Linear(6, 4)).eval(), BATCHES, recipe=recipe, progress=False)
    pattern = r"0: rounded to nearest, because it would take about \S+ s and \S+ \w+, and effort = 'fast' allows 0 s"
    assert re.search(rf"{pattern}; measured with two samples and 32 rows, \S+ -> \S+ dB", model.text("corrections"))


@pytest.mark.parametrize("level", list(Effort))
def test_adaround_is_left_out_with_little_effort_only(level, monkeypatch):
    monkeypatch.setitem(effort.ALLOWED_SECONDS, Effort.FAST, 0.0)
    monkeypatch.setitem(effort.ALLOWED_SECONDS, Effort.DEFAULT, 0.0)
    prepared = stages.prepare(
        stages.capture(nn.Linear(6, 4).eval(), BATCHES[0]),
        stages.Quantizer(Recipe(default=Setting(rounding="adaround", effort=level))),
    )
    (region,) = prepared.annotations.regions
    assert (effort.takes_too_long(region, 64) is not None) == (level == Effort.FAST)


@given(
    outputs=st.integers(1, 3000), inputs=st.integers(1, 3000), positions=st.integers(1, 10**6), more=st.integers(1, 9)
)
def test_more_positions_cost_more_time_and_a_weight_with_more_rows_too(outputs, inputs, positions, more):
    def cost(rows, count):
        layer = nn.Linear(inputs, rows, device="meta")
        return effort.predicted_cost(SimpleNamespace(layer=layer, setting=Setting(rounding="gptq")), count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(effort, "groups_of", lambda region: 1)
        patch.setattr(effort, "row_length", lambda region: region.layer.in_features)
        patch.setattr(effort, "weight_count", lambda region: region.layer.weight.numel())
        some, rows = cost(outputs, positions), cost(outputs * more, positions)
        assert 0 < some.seconds <= rows.seconds
        assert 0 < some.size <= rows.size
        if not effort.are_few(positions, inputs):
            assert some.seconds <= cost(outputs, positions * more).seconds
