"""What a model says about its operators and sites."""

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.errors import ArtifactError
from intaglio.lower.facts.operator_facts import ModelFacts, Precision
from support import report_models


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return ModelFacts.from_json(report_models.residual().quantized.text("operators"))


def test_the_text_holds_everything(facts):
    assert ModelFacts.from_json(facts.to_json()) == facts


def test_operators_read_each_other_in_execution_order(facts):
    seen = set()
    for one in facts.operators:
        assert set(one.reads) <= seen
        seen.add(one.node)
    by_node = {one.node: one for one in facts.operators}
    assert [by_node[node].path for node in by_node["add"].reads] == ["blocks.0.conv2.0", "stem.2"]


def test_a_site_says_where_its_scale_comes_from(facts):
    case = report_models.residual()
    site = facts.site("stem.2#0/relu.0")
    with torch.no_grad():
        seen = torch.cat([case.exact.stem(batch) for batch in case.batches])
    assert site.method == "mse"
    assert site.count == seen.numel()
    assert site.factors
    weight = facts.site("stem.0.weight")
    assert (weight.rounding, weight.scales) == ("gptq", 8)
    shared = facts.site("#0/view.0")
    assert shared.leader == "pool#0/adaptive_avg_pool2d.0"
    assert shared.scale == facts.site(shared.leader).scale


def test_weights_of_another_tool_are_named():
    batches = report_models.vectors()
    integers = torch.randint(-127, 128, (16, 16), dtype=torch.int8)
    weight = stages.QuantizedWeight.of(integers, torch.full((16,), 0.001))
    exact = stages.with_weights(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), {"0": weight})
    prepared = stages.prepare(stages.capture(exact, batches[0]))
    reference = stages.convert(prepared, stages.calibrate(prepared, batches, progress=False))
    lowered = stages.requantize(reference)
    found = ModelFacts.from_json(lowered.model_info.texts["operators"])
    assert [found.site(name).rounding for name in ("0.weight", "1.weight")] == ["imported", "nearest"]


@pytest.mark.slow(reason="quantizes a residual network with a recipe of its own")
def test_the_entries_of_the_recipe_that_apply_are_named():
    exact, batches = report_models.residual().exact, report_models.pictures()
    recipe = {"op:aten.conv2d": {"bits": 7}, "blocks.0": {"method": "minmax"}, "fc": None}
    made = intaglio.quantize(exact, batches, recipe=recipe, progress=False)
    by_path = {one.path: one for one in ModelFacts.from_json(made.text("operators")).operators}
    assert by_path["blocks.0.conv1.0"].entries == ("op:aten.conv2d", "blocks.0")
    assert by_path["stem.0"].entries == ("op:aten.conv2d",)
    assert by_path["fc"].precision != Precision.INT8
    assert by_path["fc"].reason == "the recipe leaves it in float"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"operators": [{}], "sites": []}',
        '{"operators": [{"node": 1, "path": "", "operator": ""}], "sites": []}',
        '{"operators": [{"node": "a", "path": "", "operator": "", "precision": "none"}], "sites": []}',
        '{"operators": [{"node": "a", "path": "", "operator": "", "unknown": 1}], "sites": []}',
        '{"operators": [], "sites": [{"name": "a", "scale": ["b"]}]}',
    ],
)
def test_other_texts_are_refused(text):
    with pytest.raises(ArtifactError):
        ModelFacts.from_json(text)
