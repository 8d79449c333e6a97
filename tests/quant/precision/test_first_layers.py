"""First layers stay in float where rounding what they read alone costs too much in the results, by the data."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.errors import SelectorError
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.recipe import Recipe
from support.lowering import assert_equal_quantized, sqnr
from support.nets import randomize
from support.programs import assert_same_bits
from support.sensitive_inputs import IMAGES, LIMITED, NEVER, UNSEEN, below, converted, edges, equalized, prepared


def layers_of(found: stages.Prepared) -> list[str]:
    return sorted(found.equalization.layers)


def test_a_layer_whose_rounded_operand_costs_too_much_stays_in_float():
    model = edges()
    before, after = converted(equalized(NEVER)), converted(equalized())
    ratios = [sqnr(reference(UNSEEN), model(UNSEEN).detach()) for reference in (before, after)]
    assert ratios[1] > ratios[0] + 6


@pytest.mark.slow(reason="quantizes for one note; the layer that stays in float is found above")
def test_the_report_says_which_layer_and_how_many_decibels():
    coverage = intaglio.quantize(edges(), [IMAGES], recipe=LIMITED, progress=False).coverage
    (note,) = [note for note in coverage.notes if note.startswith("first layers in float")]
    assert re.search(r"results of the model: 0 \(\d+\.\d dB\)$", note)
    (skip,) = [skip for skip in equalized().annotations.skipped if "convolution" in skip.origin.operator or skip.macs]
    assert re.fullmatch(r"its operand alone, rounded to 256 values, would leave \d+\.\d dB in .*", skip.reason)


def test_kernels_give_the_bits_of_the_integer_graph():
    reference = converted(equalized())
    lowered = stages.requantize(reference)
    assert_equal_quantized(reference, lowered, UNSEEN)
    assert_same_bits((stages.compile(reference)(UNSEEN),), (lowered(UNSEEN),))


def test_images_of_bytes_are_represented_exactly_and_leave_the_layer_quantized():
    pixels = torch.rand(32, 3, 16, 16, generator=torch.Generator().manual_seed(0)).mul(255).round() / 255
    assert not equalized(images=pixels * 0.05).equalization.layers


def test_inputs_that_rounding_hardly_changes_leave_the_layer_quantized():
    assert not equalized(images=torch.randn(32, 3, 16, 16)).equalization.layers


@pytest.mark.slow(reason="equalizes five times; limits that mean nothing are refused below")
def test_the_recipe_chooses_the_limit():
    assert not equalized(NEVER).equalization.layers
    assert layers_of(equalized()) == ["0#0/conv2d.0"]
    assert layers_of(equalized(below(25.0, float_below=0.0))) == []
    strict = below(90.0)
    assert layers_of(equalized(strict)) == ["0#0/conv2d.0"], "the second layer has too many multiply-accumulates"


def test_layers_behind_one_in_float_are_first_layers_too():
    model = edges()
    wide = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Conv2d(8, 128, 3, padding=1))
    wide.append(nn.Conv2d(128, 32, 3)).load_state_dict(
        wide.state_dict() | {"0.weight": model[0].weight[:4], "0.bias": model[0].bias[:4]}
    )
    found = layers_of(equalized(below(90.0), model=randomized_behind(wide)))
    assert found == ["0#0/conv2d.0", "2#0/conv2d.0"]


def randomized_behind(model: nn.Sequential) -> nn.Module:
    first = {name: value.clone() for name, value in model[0].state_dict().items()}
    randomize(model)
    model[0].load_state_dict(first)
    return model.eval()


@pytest.mark.slow(reason="equalizes another model; what stays quantized is tested above")
def test_a_layer_with_most_of_the_multiply_accumulates_stays_quantized():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    model[0].load_state_dict(edges()[0].state_dict())
    assert not equalized(below(90.0), model=model.eval()).equalization.layers


def test_saved_parameters_give_the_same_model_without_data():
    reference = converted(equalized())
    loaded = Parameters.from_json(reference.parameters.to_json())
    assert loaded == reference.parameters
    again = stages.convert(prepared(), loaded)
    assert torch.equal(again(UNSEEN), reference(UNSEEN))
    assert again.model_info.notes == reference.model_info.notes


def test_batches_of_any_size_are_measured_alike():
    found = [stages.equalize(prepared(), list(IMAGES.split(size))).equalization.layers for size in (32, 4)]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["float_below", "two_bytes_below"])
@pytest.mark.parametrize("limit", [-1.0, float("inf"), float("nan")])
def test_limits_that_mean_nothing_are_refused(name, limit):
    with pytest.raises(SelectorError, match=name):
        Recipe.of({"*": {name: limit}})
