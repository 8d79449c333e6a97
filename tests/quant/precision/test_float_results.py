"""Values that are only read as floats are not rounded to 256 quantized values, unless the recipe asks for it."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from intaglio import Recipe, numerics, stages
from intaglio.quant.annotate.regions import Annotations
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.quantizer import Quantizer
from support.lowering import ROUNDED, quantized
from support.nets import Body, randomize
from support.slow_params import slow_params_except

DEFAULT_RECIPE = Recipe()
IMAGES = torch.randn(8, 6, 9, 9, generator=torch.Generator().manual_seed(0))


def convolutions(body, **others: nn.Module) -> nn.Module:
    """A body around two convolutions of 6 channels."""
    return randomize(Body(body, a=nn.Conv2d(6, 6, 3, padding=1), b=nn.Conv2d(6, 6, 3, padding=1), **others))


def annotated(model: nn.Module, recipe: Recipe = DEFAULT_RECIPE) -> Annotations:
    return stages.prepare(stages.capture(model.eval(), (IMAGES,)), Quantizer(recipe)).annotations


def rounded_values(model: nn.Module, recipe: Recipe = DEFAULT_RECIPE) -> list[str]:
    """Operators whose results are quantized."""
    sites = [site for site in annotated(model, recipe).sites if site.role is Role.ACTIVATION]
    return [site.name.rpartition("/")[2].partition(".")[0] for site in sites if "input" not in site.name]


RESULTS = {
    "relu": lambda m, x: F.relu(m.a(x)),
    "relu6": lambda m, x: F.relu6(m.a(x)),
    "clamp": lambda m, x: m.a(x).clamp(-0.5, 0.7),
    "gelu": lambda m, x: F.gelu(m.a(x)),
    "sigmoid": lambda m, x: m.a(x).sigmoid(),
    "silu": lambda m, x: F.silu(m.a(x)),
    "tanh": lambda m, x: m.a(x).tanh(),
    "hardswish": lambda m, x: F.hardswish(m.a(x)),
    "leaky_relu": lambda m, x: F.leaky_relu(m.a(x)),
    "sum with the input": lambda m, x: m.a(x) + x,
    "sum and relu": lambda m, x: F.relu(x + m.a(x)),
    "sum of convolutions": lambda m, x: F.relu(m.a(x) + m.b(x)),
    "gate": lambda m, x: m.a(x) * m.b(x).sigmoid(),
    "flattened": lambda m, x: F.relu(m.a(x)).flatten(1),
    "concatenated": lambda m, x: torch.cat([F.relu(m.a(x)), m.b(x)], 1),
    "function of a function": lambda m, x: F.silu(m.a(x)).exp(),
    "float operator behind": lambda m, x: F.gelu(m.a(x)).softmax(1),
    "island behind": lambda m, x: F.relu(m.a(x)).cumsum(1),
}


@pytest.mark.parametrize(
    "name",
    slow_params_except(
        "relu6",
        "flattened",
        "island behind",
        of=RESULTS,
        reason="other functions and sums, whose results are read in the same ways",
    ),
)
def test_results_read_as_floats_are_rounded_only_if_the_recipe_asks(name):
    model = convolutions(RESULTS[name])
    assert rounded_values(model) == []
    assert rounded_values(model, ROUNDED) != []


def test_a_value_that_a_layer_reads_is_rounded():
    assert rounded_values(convolutions(lambda m, x: m.b(F.relu(m.a(x))))) == ["relu"]


def test_what_only_moves_or_selects_rounded_values_stays_quantized():
    model = convolutions(lambda m, x: F.max_pool2d(F.relu(m.a(x)), 2).flatten(1))
    assert not annotated(model).skipped
    assert rounded_values(model) == ["relu", "max_pool2d", "view"]


def test_results_that_leave_the_model_quantized_are_rounded():
    captured = stages.capture(convolutions(lambda m, x: F.relu(m.a(x))).eval(), (IMAGES,))
    sites = stages.prepare(captured, Quantizer(Recipe(), outputs="int8")).annotations.sites
    assert any(site.name.endswith("relu.0") for site in sites)


def test_one_operator_can_keep_its_rounding():
    model = convolutions(lambda m, x: (F.relu(m.a(x)), F.gelu(m.b(x))))
    assert rounded_values(model, Recipe.of({"op:aten.relu": {"results": "int8"}})) == ["relu"]


def test_kernels_with_float_results_count_as_int8():
    lowered = quantized(convolutions(lambda m, x: F.relu(m.a(x) + x)), IMAGES)[1]
    assert not lowered.skipped
    assert lowered.operators == 3


def test_an_operator_behind_other_float_results_says_why_it_is_float():
    lowered = quantized(convolutions(lambda m, x: m.a(x) * m.b(x).sigmoid()), IMAGES)[1]
    (skip,) = lowered.skipped
    assert skip.origin.operator == "aten.mul.Tensor"
    assert skip.reason == 'results = "float" leaves what is only read as floats in float'


GAINS = {
    "linear relu": (lambda m, x: F.relu(m.c(x)), nn.Linear(9, 64)),
    "convolution gelu": (lambda m, x: F.gelu(m.c(x)), nn.Conv2d(6, 16, 3)),
    "convolution sigmoid": (lambda m, x: m.c(x).sigmoid(), nn.Conv2d(6, 16, 3)),
    "residual sum": (lambda m, x: F.relu(m.c(F.relu(m.b(x))) + m.b(x)), nn.Conv2d(6, 6, 3, padding=1)),
}


@pytest.mark.parametrize(
    "name",
    slow_params_except("convolution sigmoid", of=GAINS, reason="the same gain behind another layer"),
)
def test_results_without_rounding_are_nearer_to_the_float_model(name):
    body, layer = GAINS[name]
    model = convolutions(body, c=layer).eval()
    exact = model(IMAGES)
    results = [quantized(model, IMAGES, recipe=recipe)[1](IMAGES) for recipe in (Recipe(), ROUNDED)]
    float_noise, int8_noise = ((result - exact).square().mean().item() for result in results)
    assert float_noise < 0.95 * int8_noise


BOTH = {
    "behind a function": lambda m, x: (lambda y: (y, m.b(y)))(F.gelu(m.a(x))),
    "behind a sum": lambda m, x: (lambda y: (y, m.b(y)))(F.relu(m.a(x) + x)),
}


@pytest.mark.parametrize("name", BOTH)
def test_a_result_that_a_layer_reads_too_is_rounded_for_the_layer_only(name):
    model = convolutions(BOTH[name])
    assert len(rounded_values(model)) == 1
    reference, lowered = quantized(model, IMAGES)
    for run in (reference, lowered):
        assert run(IMAGES)[0].unique().numel() > 256
    assert quantized(model, IMAGES, recipe=ROUNDED)[1](IMAGES)[0].unique().numel() <= 256


def test_a_16_bit_shortcut_stays_rounded_where_the_model_returns_it():
    model = convolutions(lambda m, x: (lambda y: (y, m.b(F.relu(m.b(y) + y))))(F.relu(m.a(x))))
    sites = annotated(model, Recipe(default=replace(Recipe.named("accurate").default, results="float"))).sites
    assert [site.role for site in sites].count(Role.SHORTCUT) == 1


def note_of(model: nn.Module, recipe: Recipe = DEFAULT_RECIPE) -> list[str]:
    reference = quantized(model, IMAGES, recipe=recipe)[0]
    return [note for note in reference.model_info.notes if note.startswith("rounded to 256 values")]


def test_remaining_roundings_are_reported_with_their_cost():
    model = convolutions(lambda m, x: (F.avg_pool2d(m.a(x), 2), F.max_pool2d(m.b(x), 2))).eval()
    (note,) = note_of(model)
    costs = {name: float(cost) for name, cost in re.findall(r"aten\.(\w+)[\w.]* \(([\d.]+) dB\)", note)}
    assert costs.keys() == {"avg_pool2d", "max_pool2d"}
    q = quantized(model, IMAGES)[0].qparams["#0/avg_pool2d.0"]
    exact = model(IMAGES)[0].detach().numpy()
    rounding = numerics.dequantize(numerics.quantize(exact, q.step, q.zero, q.qmin, q.qmax), q.step, q.zero) - exact
    measured = 10 * np.log10(np.square(exact).sum() / np.square(rounding).sum())
    assert abs(costs["avg_pool2d"] - measured) < 0.5


def test_models_without_such_roundings_report_nothing():
    assert note_of(convolutions(RESULTS["gelu"])) == []
    assert note_of(convolutions(lambda m, x: F.avg_pool2d(m.a(x), 2)), ROUNDED) == []
