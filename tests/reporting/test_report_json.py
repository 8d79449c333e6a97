"""The JSON of a report holds everything, and files that are something else are refused."""

import json
from dataclasses import replace

import pytest

import intaglio
from intaglio.errors import ArtifactError
from intaglio.reporting.report_json import report_from_json, report_json
from intaglio.runtime.reports.speed import MeasuredSpeed, OperatorSpeed
from support import report_models
from support.slow_params import slow_params


@pytest.mark.parametrize(
    "made",
    [
        *slow_params(report_models.residual, reason="a larger report; one with islands is read again, too"),
        report_models.islands,
        report_models.parts,
    ],
)
def test_a_report_is_the_same_after_reading_it_again(made, tmp_path):
    found = made().report()
    found.save_json(tmp_path / "report.json")
    again = intaglio.Report.load(tmp_path / "report.json")
    assert again.data == found.data
    assert again.to_json() == found.to_json()


def test_times_and_shares_stand_beside_each_operator():
    found = report_models.residual_report()
    content = json.loads(found.to_json())
    assert content == found.to_dict()
    (graph,) = found.data.graphs
    for operator, entry in zip(graph.operators, content["graphs"][0]["operators"], strict=True):
        assert entry["microseconds"] == graph.microseconds(operator)
        assert entry["share"] == graph.share(operator)
        assert entry["of_limit"] == graph.of_limit(operator)


def test_the_times_beside_float_have_the_speedup_and_the_names_of_what_loses():
    slow, fast = OperatorSpeed("a", "a", (2.0,), (1.0,)), OperatorSpeed("b", "b", (1.0,), (2.0,))
    measured = MeasuredSpeed(1, (4.0, 4.0), (6.0, 6.0), (slow, fast))
    data = replace(report_models.residual_report().data, measured=measured)
    entry = json.loads(report_json(data))["measured"]
    assert entry["speedup"] == 1.5
    assert entry["losing"] == ["a"]
    assert report_from_json(report_json(data)).measured == measured


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a report"),
        ("[]", "not a report"),
        ("{}", "not a report"),
        ('{"version": 1}', "not a report"),
        ('{"version": 99}', "version 99"),
        ('{"version": 1, "name": 3}', "not a report"),
    ],
)
def test_other_texts_are_refused(text, said):
    with pytest.raises(ArtifactError, match=said) as raised:
        report_from_json(text)
    assert "write it again with this version: report.save_json(path)" in str(raised.value)


def test_a_field_of_another_type_is_refused():
    content = json.loads(report_json(report_models.residual_report().data))
    content["graphs"][0]["operators"][0]["facts"]["macs"] = "many"
    with pytest.raises(ArtifactError, match="'many' is not a int"):
        report_from_json(json.dumps(content))


@pytest.mark.slow(reason="compares two reports of a residual network")
def test_two_models_can_be_beside_each_other(tmp_path):
    first, second = report_models.residual(), report_models.residual_report()
    found = first.report(against=second, calls=0)
    assert found.other == second.data
    second.save_json(tmp_path / "before.json")
    assert first.report(against=tmp_path / "before.json", calls=0).other == second.data
    both = first.report(against=first.quantized, calls=0)
    assert both.other.comparison == both.data.comparison
