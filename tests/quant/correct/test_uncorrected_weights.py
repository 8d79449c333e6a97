"""Weights that are rounded to nearest without a look at data."""

import numpy as np
import pytest
import torch
from torch import nn

import intaglio
from intaglio import Recipe, stages
from intaglio.quant.correct import correct_weights, second_moments
from intaglio.quant.recipes.recipe import Setting

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
    monkeypatch.setattr(second_moments, "LARGEST_MOMENTS", 35)
    assert np.array_equal(weight_of(reference(rounding="gptq")), nearest)


def test_the_report_names_weights_with_large_moments(monkeypatch):
    monkeypatch.setattr(second_moments, "LARGEST_MOMENTS", 35)
    model = intaglio.quantize(nn.Sequential(nn.Linear(6, 4)).eval(), BATCHES, progress=False)
    line = "0: rounded to nearest, because the moments of its operand take 288 bytes"
    assert line in model.text("corrections")


def test_the_report_names_weights_with_many_elements(monkeypatch):
    monkeypatch.setattr(second_moments, "LARGEST_WEIGHT", 20)
    model = intaglio.quantize(nn.Sequential(nn.Linear(6, 4)).eval(), BATCHES, progress=False)
    assert "0: rounded to nearest, because it has 24 elements" in model.text("corrections")
