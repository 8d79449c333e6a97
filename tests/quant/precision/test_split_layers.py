"""Layers that read operands with ranges too different for one scale are sums of layers with one operand each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio import stages
from intaglio.quant.precision.split_layers import similar_operands
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from support.lowering import assert_equal_quantized, sqnr
from support.nets import Body, randomize
from support.programs import assert_same_bits
from support.slow_params import slow_params, slow_params_except

IMAGES = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
OTHERS = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def body(forward) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU())
        layers = {"boxes": nn.Conv2d(16, 4, 1), "joined": nn.Conv2d(20, 8, 3, padding=1), "last": nn.Conv2d(8, 5, 1)}
        layers |= {"row": nn.Linear(20, 8), "grouped": nn.Conv2d(20, 8, 1, groups=4)}
        layers |= {"line": nn.Conv1d(20, 8, 3, padding=1), "transposed": nn.ConvTranspose2d(20, 8, 2, 2)}
        model = randomize(Body(forward, backbone=backbone, **layers)).eval()
        with torch.no_grad():
            for layer in (model.joined, model.row, model.line):  # trained layers make use of all of their operands
                layer.weight[:, 16:] /= 100
    return model


def both(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    features = m.backbone(x)
    return features, m.boxes(features).relu() * 100


def maps(m: nn.Module, x: Tensor) -> Tensor:
    return m.last(m.joined(torch.cat(both(m, x), 1)).relu())


def rows(m: nn.Module, x: Tensor) -> Tensor:
    features, boxes = (one.flatten(2).transpose(1, 2) for one in both(m, x))
    return m.row(torch.cat((features, boxes), -1)).relu()


def lines(m: nn.Module, x: Tensor) -> Tensor:
    return m.line(torch.cat([one.flatten(2) for one in both(m, x)], 1)).relu()


def twice(m: nn.Module, x: Tensor) -> Tensor:
    """One layer is called for two sizes, as shared heads are."""
    features, boxes = both(m, x)
    first = m.joined(torch.cat((features, boxes), 1))
    second = m.joined(torch.cat((features[:, :, :4], boxes[:, :, :4]), 1))
    return torch.cat((m.last(first.relu()).flatten(2), m.last(second.relu()).flatten(2)), 2)


def in_groups(m: nn.Module, x: Tensor) -> Tensor:
    return m.grouped(torch.cat(both(m, x), 1))


def transposed(m: nn.Module, x: Tensor) -> Tensor:
    return m.transposed(torch.cat(both(m, x), 1))


def even(m: nn.Module, x: Tensor) -> Tensor:
    features, boxes = both(m, x)
    return m.joined(torch.cat((features, boxes / 100), 1))


SPLIT = {"maps": maps, "rows": rows, "lines": lines, "twice": twice}


def prepared(forward, **options) -> stages.Prepared:
    return stages.prepare(stages.capture(body(forward), (IMAGES,)), Quantizer(**options))


def converted(before: stages.Prepared) -> stages.Reference:
    return stages.convert(before, stages.calibrate(before, [IMAGES], progress=False))


def layers_of(annotations: stages.Annotations) -> list[str]:
    return [region.anchor.name for region in annotations.regions if region.record.multiplies_weight]


@pytest.mark.slow(reason="calibrates three models; kernels of split layers are compared below")
@pytest.mark.parametrize(
    "name",
    slow_params_except("rows", of=SPLIT, reason="operands of other layers that are split in the same way"),
)
def test_operands_with_different_ranges_keep_scales_of_their_own(name):
    forward = SPLIT[name]
    before = prepared(forward)
    after = stages.equalize(before, [IMAGES])
    exact = body(forward)(OTHERS).detach()
    assert sqnr(converted(before)(OTHERS), exact) < 15
    assert sqnr(converted(after)(OTHERS), exact) > 30
    assert len(layers_of(after.annotations)) > len(layers_of(before.annotations))


@pytest.mark.parametrize(
    "forward",
    [
        in_groups,
        *slow_params(
            transposed, reason="another kind of layer, which is left out by the same rule as one of several groups"
        ),
        even,
    ],
)
def test_other_layers_are_not_split(forward):
    before = prepared(forward)
    after = stages.equalize(before, [IMAGES])
    assert not after.equalization.splits
    assert layers_of(after.annotations) == layers_of(before.annotations)


@pytest.mark.parametrize(
    "name",
    slow_params_except("rows", of=SPLIT, reason="the layer that another calls twice, and one of one axis"),
)
def test_kernels_give_the_bits_of_the_integer_graph(name):
    reference = converted(stages.equalize(prepared(SPLIT[name]), [IMAGES]))
    lowered = stages.requantize(reference)
    assert_equal_quantized(reference, lowered, OTHERS)
    assert_same_bits((stages.compile(reference)(OTHERS),), (lowered(OTHERS),))


@pytest.mark.slow(reason="quantizes a model for one note")
def test_the_report_names_the_layer_and_the_ranges():
    coverage = intaglio.quantize(body(maps), [IMAGES], progress=False).coverage
    (note,) = [note for note in coverage.notes if "too different for one scale" in note]
    assert note.startswith("joined (aten.conv2d.default) reads ranges of 0 to ")
    assert coverage.macs_int8 == coverage.macs_total
    assert coverage.islands == 0


@pytest.mark.slow(reason="converts twice; split layers run with the bits of the graph above")
def test_saved_parameters_give_the_same_model_without_data():
    after = stages.equalize(prepared(twice), [IMAGES])
    reference = converted(after)
    loaded = Parameters.from_json(reference.parameters.to_json())
    assert loaded == reference.parameters
    again = stages.convert(prepared(twice), loaded)
    assert torch.equal(again(OTHERS), reference(OTHERS))
    assert again.model_info.notes == reference.model_info.notes


def test_a_layer_that_the_recipe_leaves_in_float_is_not_split():
    recipe = Recipe.of({"joined": {"quantize": False}})
    after = stages.equalize(prepared(maps, recipe=recipe), [IMAGES])
    assert not after.equalization.splits


GROUPS = {
    "two ranges": ([(0, 1), (0, 640), (-1, 1), (0, 100)], [[1, 3], [0, 2]]),
    "three ranges": ([(0, 1), (0, 0.001), (0, 640)], [[2], [0], [1]]),
    "one range": ([(0, 1), (-4, 3)], [[0, 1]]),
    "an operand without values": ([(0, 640), (torch.inf, -torch.inf), (0, 1)], [[0], [1, 2]]),
}


@pytest.mark.parametrize("name", GROUPS)
def test_operands_with_similar_ranges_share_a_layer(name):
    extrema, groups = GROUPS[name]
    assert similar_operands(extrema) == groups
