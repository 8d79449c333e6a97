"""Layers read an input of the model in two bytes where one byte alone costs too much in the results, by the data."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.quant.precision.measure_rounding import ValueRecorder
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.recipe import Recipe
from support.lowering import assert_equal_quantized, sqnr
from support.nets import Body
from support.programs import assert_same_bits
from support.sensitive_inputs import IMAGES, NEVER, UNSEEN, converted, edges, equalized, prepared
from support.slow_params import slow_params

TWO_BYTES = Recipe.of({"*": {"two_bytes_below": 25.0}})


def ratio_of(recipe: Recipe) -> float:
    """Return the signal-to-noise ratio on unseen images, with corrections: they fit weights to bright images."""
    model = edges()
    return sqnr(intaglio.quantize(model, [IMAGES], recipe=recipe, progress=False)(UNSEEN), model(UNSEEN).detach())


def test_a_layer_whose_operand_is_too_coarse_in_one_byte_reads_two():
    found = equalized(TWO_BYTES)
    assert list(found.equalization.two_bytes) == ["0#0/conv2d.0"]
    assert not found.equalization.layers
    assert not stages.requantize(converted(found)).islands
    assert ratio_of(TWO_BYTES) > ratio_of(NEVER) + 6


@pytest.mark.parametrize("first", range(0, len(IMAGES), 4))
def test_the_default_decides_alike_for_every_few_images(first):
    """With four images at a time, one byte leaves 17.8 to 20.7 dB of the results: on both sides of 20 dB."""
    found = equalized(Recipe(), IMAGES[first : first + 4])
    assert list(found.equalization.two_bytes) == ["0#0/conv2d.0"]


def test_the_high_byte_holds_integers_and_the_low_byte_what_they_leave():
    module = equalized(TWO_BYTES).annotations.module
    (rounded,) = [node for node in module.graph.nodes if node.target is torch.ops.aten.round.default]
    (rest,) = [user for node in rounded.users for user in node.users if user.target is torch.ops.aten.mul.Scalar]
    values = {}
    ValueRecorder(module, {rounded.name, rest.name}, values.__setitem__).run(IMAGES)
    assert values[rounded.name].unique().numel() <= 256
    assert values[rest.name].abs().max() <= 128


def test_the_report_says_which_layer_and_how_many_decibels():
    coverage = intaglio.quantize(edges(), [IMAGES], recipe=TWO_BYTES, progress=False).coverage
    (note,) = [note for note in coverage.notes if note.startswith("first layers that read their operand in two bytes")]
    assert re.search(r"results of the model: 0 \(\d+\.\d dB\)$", note)
    assert coverage.macs == 1
    assert coverage.islands == 0


@pytest.mark.parametrize(
    "model",
    [
        *slow_params(edges(), reason="the same layers as in two models below, without what is in front or beside them"),
        *slow_params(
            nn.Sequential(nn.ZeroPad2d((0, 1, 2, 0)), *edges()),
            nn.Sequential(nn.Conv2d(3, 3, 3, 2, 1, 1, 3, padding_mode="zeros"), *edges()),
            reason="what is in front of the layer that reads two bytes",
        ),
        Body(lambda m, x: m.first(x.flatten(2).transpose(1, 2)).relu(), first=nn.Linear(3, 8)),
        *slow_params(
            Body(lambda m, x: (m.net(x), x.mean((2, 3))), net=edges()),
            reason="the layer is computed as without a reader",
        ),
    ],
    ids=["convolution", "padding", "depthwise", "linear", "another reader"],
)
def test_kernels_give_the_bits_of_the_integer_graph(model):
    always = Recipe.of({"*": {"two_bytes_below": 200.0}})
    found = equalized(always, model=model.eval())
    reference = converted(found)
    lowered = stages.requantize(reference)
    assert_equal_quantized(reference, lowered, UNSEEN)
    program = stages.compile(reference)
    for images in (UNSEEN, UNSEEN[:1], UNSEEN * 3):
        results = [one if isinstance(one, tuple) else (one,) for one in (program(images), lowered(images))]
        assert_same_bits(*results)


@pytest.mark.slow(reason="compares and explains a model; a layer reads two bytes above")
def test_the_model_can_be_compared_and_explained():
    model = edges()
    int8 = intaglio.quantize(model, [IMAGES], recipe=TWO_BYTES, progress=False)
    rows = {(row.path, row.operator): row for row in intaglio.compare(model, int8, [UNSEEN]).rows}
    assert rows["0", "aten.conv2d.default"].alone > 40
    assert "two bytes" in str(intaglio.explain(int8, "0"))


def test_a_layer_with_most_of_the_multiply_accumulates_reads_one_byte():
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    assert not equalized(Recipe.of({"*": {"two_bytes_below": 200.0}}), model=model).equalization.two_bytes


def test_saved_parameters_give_the_same_model_without_data():
    reference = converted(equalized(TWO_BYTES))
    loaded = Parameters.from_json(reference.parameters.to_json())
    assert loaded == reference.parameters
    again = stages.convert(prepared(TWO_BYTES), loaded)
    assert torch.equal(again(UNSEEN), reference(UNSEEN))
    assert again.model_info.notes == reference.model_info.notes


def test_constant_inputs_read_one_byte():
    assert not equalized(TWO_BYTES, images=torch.zeros_like(IMAGES)).equalization.two_bytes


def test_batches_of_any_size_are_measured_alike():
    found = [stages.equalize(prepared(TWO_BYTES), list(IMAGES.split(size))) for size in (32, 4)]
    assert found[0].equalization.two_bytes == found[1].equalization.two_bytes
