"""Concatenations of values with ranges too different for one scale stay in float if only floats are read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio import stages
from intaglio.fxgraph.uneven_concatenations import is_uneven
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from support.lowering import ROUNDED, sqnr
from support.nets import Body, randomize
from support.slow_params import slow_params

IMAGES = torch.rand(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
OTHERS = torch.rand(16, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def head(decode) -> nn.Module:
    """A body around a backbone, a layer with 4 boxes and a layer with 6 scores per pixel."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU())
        layers = {"boxes": nn.Conv2d(16, 4, 1), "scores": nn.Conv2d(16, 6, 1), "last": nn.Conv2d(10, 8, 1)}
        layers |= {"narrow": nn.Conv2d(4, 8, 1), "wide": nn.Conv2d(6, 8, 1)}
        return randomize(Body(decode, backbone=backbone, **layers)).eval()


def detections(m: nn.Module, x: Tensor) -> Tensor:
    features = m.backbone(x)
    return torch.cat((m.boxes(features).relu() * 128.0, m.scores(features).sigmoid()), 1).flatten(2)


def levels(m: nn.Module, x: Tensor) -> Tensor:
    """Detections of two levels, as one list."""
    features = m.backbone(x)
    found = []
    for stride, level in ((64.0, features), (128.0, nn.functional.max_pool2d(features, 2))):
        boxes = m.boxes(level).flatten(2).relu() * stride
        found.append(torch.cat((boxes, m.scores(level).flatten(2).sigmoid()), 1))
    return torch.cat(found, 2).transpose(1, 2)


def also_read(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Detections whose parts a layer reads too, so that they are rounded in any case."""
    features = m.backbone(x)
    boxes, scores = m.boxes(features).relu() * 128.0, m.scores(features).sigmoid()
    return torch.cat((boxes, scores), 1), m.narrow(boxes) + m.wide(scores)


def even(m: nn.Module, x: Tensor) -> Tensor:
    features = m.backbone(x)
    return torch.cat((m.boxes(features).sigmoid(), m.scores(features).sigmoid()), 1)


def read_by_a_layer(m: nn.Module, x: Tensor) -> Tensor:
    features = m.backbone(x)
    return m.last(torch.cat((m.boxes(features).relu() * 128.0, m.scores(features).sigmoid()), 1))


def prepared(decode, recipe: Recipe = ROUNDED, **options) -> stages.Prepared:
    return stages.prepare(stages.capture(head(decode), (IMAGES,)), Quantizer(recipe, **options))


def cats_in_float(annotations: stages.Annotations) -> list[str]:
    return [skip.reason for skip in annotations.skipped if skip.origin.operator == "aten.cat.default"]


@pytest.mark.parametrize(
    "decode", [detections, *slow_params(levels, reason="a detector with three levels, joined in the same way")]
)
def test_scores_beside_boxes_in_pixels_keep_their_bits(decode):
    model = head(decode)
    int8 = intaglio.quantize(model, [IMAGES], recipe=ROUNDED, progress=False)
    found, exact = int8(OTHERS), model(OTHERS).detach()
    axis = 1 if decode is detections else 2
    scores = [result.movedim(axis, 0)[4:] for result in (found, exact)]
    assert sqnr(*scores) > 35  # 13 dB with one scale for boxes and scores, and 1 dB behind two levels
    assert sqnr(found, exact) > 35


@pytest.mark.slow(reason="a detector whose values a layer reads; scores keep their bits above")
@pytest.mark.parametrize(
    "results", [*slow_params("int8", reason="rounded results are joined by the same rule"), "float"]
)
def test_values_that_a_layer_reads_too_are_joined_in_float(results):
    """The values are rounded with scales of their own; with one scale they had 5 dB."""
    model = head(also_read)
    int8 = intaglio.quantize(model, [IMAGES], recipe={"*": {"results": results}}, progress=False)
    assert sqnr(int8(OTHERS)[0][:, 4:], model(OTHERS)[0][:, 4:].detach()) > 35


def test_the_report_says_which_concatenation_and_why():
    coverage = intaglio.quantize(head(detections), [IMAGES], recipe=ROUNDED, progress=False).coverage
    (note,) = [note for note in coverage.notes if "aten.cat.default" in note]
    assert "too different for one scale" in note
    reasons = {part.operator: part.reason for part in coverage.loops}
    assert reasons["aten.cat.default"] == "its operands have ranges too different for one scale"
    assert coverage.macs_int8 == coverage.macs_total


@pytest.mark.parametrize("decode", [even, read_by_a_layer])
def test_other_concatenations_stay_quantized(decode):
    before = prepared(decode)
    after = stages.equalize(before, [IMAGES])
    assert cats_in_float(after.annotations) == []
    assert not after.equalization.concatenations


def test_results_that_leave_the_model_quantized_keep_one_scale():
    assert cats_in_float(stages.equalize(prepared(detections, outputs="int8"), [IMAGES]).annotations) == []


def test_saved_parameters_give_the_same_model_without_data():
    before = prepared(levels)
    after = stages.equalize(before, [IMAGES])
    assert len(after.equalization.concatenations) == 2
    reference = stages.convert(after, stages.calibrate(after, [IMAGES], progress=False))
    loaded = Parameters.from_json(reference.parameters.to_json())
    assert loaded == reference.parameters
    again = stages.convert(prepared(levels), loaded)
    assert torch.equal(again(OTHERS), reference(OTHERS))
    assert again.model_info.notes == reference.model_info.notes


@pytest.mark.slow(reason="converts with two recipes; saved parameters are converted below")
def test_parameters_fit_a_recipe_that_leaves_the_concatenation_in_float():
    after = stages.equalize(prepared(detections), [IMAGES])
    reference = stages.convert(after, stages.calibrate(after, [IMAGES], progress=False))
    other = prepared(detections, recipe=Recipe.of({"op:aten.cat": {"quantize": False}}, ROUNDED.default))
    stages.convert(other, reference.parameters)


def test_the_chosen_method_of_sites_is_kept():
    after = stages.equalize(prepared(detections).with_method("minmax"), [IMAGES])
    assert {site.spec.method for site in after.annotations.sites if site.name in after.observers} == {"minmax"}


CASES = {
    "boxes and scores": ([(0, 640), (0, 1)], True),
    "pyramid levels": ([(-3, 3), (-20, 20)], False),
    "less than 4 bits": ([(0, 17), (0, 1)], True),
    "at least 4 bits": ([(0, 15), (0, 1)], False),
    "far from zero": ([(99, 100), (0, 90)], True),
    "signed": ([(-320, 320), (-1, 1)], True),
    "a constant beside values": ([(0, 640), (0.5, 0.5)], False),
    "no finite values": ([(0, 640), (np.inf, -np.inf)], False),
}


@pytest.mark.parametrize("name", CASES)
def test_which_ranges_are_too_different(name):
    operands, uneven = CASES[name]
    assert is_uneven(operands) is uneven
