"""Explanations name the operator that was asked for, and say what the model, the comparison and the profile say."""

import json
import re
from functools import cache

import pytest

import intaglio
from intaglio import stages
from intaglio.errors import InputError
from intaglio.reporting.explanation import ExplainedOperator
from support import nets, report_models


@pytest.fixture(scope="module")
def found() -> intaglio.Report:
    return report_models.residual_report()


def names(explanation) -> list[str]:
    return [one.name for one in explanation.operators]


CONV = "blocks.0.conv2.0 + blocks.0.conv2.1 (aten.conv2d.default)"


@pytest.mark.parametrize(
    "where",
    [
        "blocks.0.conv2.0",
        "blocks.0.conv2.1",  # the batch norm that was folded into it
        CONV,
        "conv2d_2",
        "blocks.0.conv2.0.weight",
        " blocks.0.conv2.0 ",
    ],
)
def test_every_name_of_an_operator_finds_it(found, where):
    assert names(intaglio.explain(found, where)) == [CONV]


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("aten.relu.default", 5),
        ("relu", 5),
        ("op:aten.relu", 5),
        ("blocks.0.conv1", 1),  # all operators inside of the module
        ("blocks", 11),
        ("stem.2#0/relu.0", 1),
    ],
)
def test_a_name_of_several_operators_finds_all(found, where, count):
    assert len(names(intaglio.explain(found, where))) == count


def test_a_line_of_the_source_code_finds_its_operators(found):
    (graph,) = found.data.graphs
    source = graph.by_name[CONV].facts.source
    line = re.search(r"nets\.py:\d+", source)[0]
    same = [one.name for one in graph.operators if f"{line}," in one.facts.source]
    file = nets.__file__
    for where in (line, f"support/{line}", source, source.partition(",")[0], file + line.removeprefix("nets.py")):
        assert names(intaglio.explain(found, where)) == same


def test_an_unknown_name_is_an_error_with_the_nearest_ones(found):
    with pytest.raises(InputError, match=r"no operator has the name .blocks\.0\.conv3.") as raised:
        intaglio.explain(found, "blocks.0.conv3")
    nearest = re.search(r"nearest: (.*)", str(raised.value))[1].split(", ")
    for name in nearest:
        assert intaglio.explain(found, name).operators
    with pytest.raises(InputError, match=r"print model.text\('operators'\) for all names"):
        intaglio.explain(found, "")
    assert "blocks.0.conv2.0" in report_models.residual().quantized.text("operators")


def facts(explanation) -> dict[str, str]:
    (one,) = explanation.operators
    return dict(one.lines)


def test_the_numbers_are_those_of_the_functions_for_them(found):
    case = report_models.residual()
    said = facts(intaglio.explain(found, "blocks.1.conv2.0"))
    row = next(
        one for one in intaglio.compare(case.exact, case.quantized, case.batches).rows if one.path == "blocks.1.conv2.0"
    )
    assert said["Own error"].startswith(f"{row.alone:.1f} dB")
    assert said["Error so far"].startswith(f"{row.so_far:.1f} dB")
    q = case.quantized.graph.types["blocks_1_conv2_0"].qparams
    assert said["Scale"] == f"{q.step:.6g}, zero point {q.zero}"
    step = next(one for one in found.data.graphs[0].profile.parts if one.name == "blocks.1.conv2.0")
    assert said["Time"].startswith(f"{step.microseconds:.1f} µs")
    assert said["Kernel"] == step.kernel
    assert "method mse" in said["From"]
    assert "GPTQ" in said["Weight rounded"]
    assert "factors" in said["Equalization"]


def test_a_saved_model_explains_itself_without_data(tmp_path):
    case = report_models.residual()
    case.quantized.save(tmp_path / "net.int8")
    said = facts(intaglio.explain(intaglio.load(tmp_path / "net.int8"), "stem.0", calls=0))
    assert said["Same kernel"] == "stem.2 (aten.relu.default)"
    assert said["Runs"].startswith("in int8")
    assert said["To leave it in float"] == "skip='stem.0'"
    assert "Own error" not in said


def test_an_operator_in_float_has_its_reason():
    case = report_models.islands()
    said = facts(intaglio.explain(case.quantized, "erf", calls=0))
    assert said["Why not int8"] == "no int8 kernel for this operator"
    assert "PyTorch" in said["Runs"]


@pytest.mark.slow(reason="quantizes a residual network again; an operator in float has its reason above")
def test_the_recipe_that_leaves_an_operator_in_float_is_named():
    case = report_models.residual()
    left = intaglio.quantize(case.exact, case.batches, skip=["fc"], progress=False)
    said = facts(intaglio.explain(left, "fc", calls=0))
    assert said["Why not int8"] == "the recipe leaves it in float"
    assert said["Recipe"].startswith("the entries fc apply")


@cache
def measured(where: str) -> ExplainedOperator:
    case = report_models.residual()
    (one,) = intaglio.explain(case.quantized, where, case.exact, case.batches, calls=0).operators
    return one


@pytest.mark.slow(reason="quantizes a network with each change; test_collected_numbers.py tries changes, too")
def test_changes_are_other_settings():
    titles = [change.title for change in measured("blocks.1.conv2.0").changes]
    assert titles[0] == "In float"
    assert "Ranges by the method minmax" in titles
    assert "Ranges by the method mse" not in titles


@pytest.mark.slow(reason="quantizes a residual network again; that a change gains what it says is tested with reports")
def test_changes_are_measured():
    case, one = report_models.residual(), measured("blocks.1.conv2.0")
    captured = stages.capture(case.exact, case.batches[0])
    left = next(change for change in one.changes if change.title == "In float")
    made = intaglio.quantize(case.exact, case.batches, skip=["blocks.1.conv2.0"], progress=False)
    assert abs(intaglio.compare(captured, made, case.batches).results[0] - left.after) < 1.5
    assert abs(left.macs - made.coverage.macs) < 1e-9
    assert "Its residual sum in 16 bits" in [change.title for change in measured("blocks.0.conv2.0").changes]


def test_both_doors_are_explained():
    case = report_models.define_by_run()
    explanation = intaglio.explain(case.quantized, "first", case.exact, case.batches)
    assert names(explanation) == ["first (aten.linear.default)"]
    assert facts(explanation)["Own error"]
    parts = report_models.parts()
    assert names(intaglio.explain(parts.quantized, "backbone.2", calls=0)) == ["backbone.2 (aten.conv2d.default)"]


def test_an_explanation_is_text_html_and_json(found):
    explanation = intaglio.explain(found, "stem.0")
    text, html = str(explanation), explanation._repr_html_()
    for label, said in explanation.operators[0].lines:
        assert re.search(rf"^  {re.escape(label)} +{re.escape(said)}$", text, re.MULTILINE)
    assert "<td" in html
    assert repr(explanation) == "Explanation('stem.0': 1 operator of Residual)"
    content = json.loads(json.dumps(explanation.to_dict()))
    assert content["operators"][0]["name"] == explanation.operators[0].name
    many = intaglio.explain(found, "blocks")
    assert str(many).startswith("blocks: 11 operators")
    assert CONV in str(many)
    assert "<td" in many._repr_html_()


def test_names_in_html_are_escaped():
    nasty = report_models.nasty_report()
    explanation = intaglio.explain(nasty, f"0 {report_models.NASTY}")
    assert "<img" not in explanation._repr_html_()
