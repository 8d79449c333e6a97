"""A search for mixed precision: what is chosen for a metric or a limit, how it ends, and what is refused.

Sizes are minimized where a choice is checked, because they are the same in every run."""

import json
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.errors import InputError
from intaglio.mixed_precision import search_run, search_start
from support.layered import LAYERED_INPUT as X
from support.layered import LAYERS, WIDTH, layered_network, layers_in_float
from support.recipes import UNCORRECTED

pytestmark = pytest.mark.usefixtures("untimed_searches")

QUANTIZER = stages.Quantizer(intaglio.Recipe.of(UNCORRECTED))
BY_SIZE = {"minimize": "size", "candidates": {"float": None}, "quantizer": QUANTIZER, "progress": False}
MEASURE_SPEED = search_start.measure_speed


def needs(*names):
    """A metric that needs these layers in float."""
    return lambda model: 1.0 if {*names} <= layers_in_float(model) else 0.5


def share_in_float(model):
    return 0.5 + len(layers_in_float(model)) / 8


def relative_error(model, exact):
    want = exact(X)
    return float((model(X) - want).square().sum() / want.square().sum())


def test_a_first_int8_model_that_keeps_the_metric_takes_two_evaluations():
    seen = []
    model = layered_network()
    found = intaglio.search(model, [X], lambda m: float(len(seen.append(type(m)) or "one")))
    assert seen == [type(model), intaglio.QuantizedModel]
    assert found.reached
    assert found.changes == {}
    assert torch.equal(found.model(X), intaglio.quantize(layered_network(), [X])(X))


def test_the_chosen_model_is_timed_beside_the_float_model(monkeypatch):
    monkeypatch.setattr(search_start, "measure_speed", MEASURE_SPEED)
    found = intaglio.search(layered_network(), [X], needs("a"), **BY_SIZE)
    assert found.measured is found.model.measured
    assert found.measured.operators
    assert str(found.measured) in str(found)
    entry = json.loads(found.to_json())["measured"]
    assert entry["speedup"] == found.measured.speedup


@pytest.mark.slow(reason="a search, and its result again; printed changes are quantized below")
@pytest.mark.case("problem 37")
def test_the_recipe_of_a_result_gives_the_same_bits_without_a_search(tmp_path):
    model = layered_network()
    found = intaglio.search(model, [X], needs("b"), **BY_SIZE)
    found.recipe.save(tmp_path / "recipe.toml")
    again = intaglio.quantize(model, X[:2], recipe=tmp_path / "recipe.toml")
    assert layers_in_float(again) == {"b"}
    assert torch.equal(again(X), found.model(X))
    assert torch.equal(stages.compile(found.reference)(X), found.model(X))


def test_the_printed_changes_are_an_argument_of_quantize():
    model = layered_network()
    found = intaglio.search(model, [X], needs("b"), **BY_SIZE)
    given = {}
    exec(found.python, {}, given)
    assert given["recipe"].keys() & {*LAYERS} == {"b"}
    assert layers_in_float(intaglio.quantize(model, [X], **given)) == {"b"}
    assert found.python in str(found)


@pytest.mark.slow(reason="a search that needs two layers; other searches here need one")
def test_a_search_leaves_nothing_in_float_that_the_metric_does_not_need():
    found = intaglio.search(layered_network(), [X], needs("a", "b"), **BY_SIZE)
    assert found.reached
    assert layers_in_float(found.model) == {"a", "b"}


@pytest.mark.slow(reason="two whole searches; the recipe of a result is run again above")
def test_the_same_search_by_size_gives_the_same_result_twice():
    def search():
        return intaglio.search(layered_network(), [X], share_in_float, max_drop=0.2, **BY_SIZE)

    first, second = search(), search()
    assert first.trials == second.trials
    assert first.recipe == second.recipe


@pytest.mark.slow(reason="a search with another recipe")
def test_operators_a_user_leaves_in_float_stay_in_float_in_a_search():
    leaving_c = stages.Quantizer(intaglio.Recipe.of({**UNCORRECTED, "c": None}))
    found = intaglio.search(layered_network(), [X], needs("a"), **{**BY_SIZE, "quantizer": leaving_c})
    assert layers_in_float(found.model) == {"a", "c"}
    assert found.changes.keys() & {*LAYERS} == {"a"}


@pytest.mark.slow(reason="two searches; a size that is not reached warns below")
def test_a_metric_that_is_not_reached_gives_the_best_model_and_a_warning():
    model = layered_network()

    def search():
        return intaglio.search(model, [X], lambda m: len(layers_in_float(m)) / 4, max_drop=0, **BY_SIZE)

    with pytest.warns(UserWarning, match=r"search: no trial reaches the metric 1; the best of \d+ trials has 0\.75"):
        found = search()
    assert not found.reached
    assert "no trial is accepted" in str(found)
    assert len({*LAYERS}.intersection(found.changes)) == 3
    assert found.chosen.metric == max(trial.metric for trial in found.trials)


@pytest.mark.slow(reason="two whole searches; a size that no model has is searched below")
def test_the_metric_is_as_high_as_a_size_allows():
    model = layered_network()
    sizes = [trial.size_mb for trial in intaglio.search(model, [X], needs("a"), **BY_SIZE).trials]
    limit = max(sizes)
    found = intaglio.search(
        model, [X], lambda m: -relative_error(m, model), max_size=limit, quantizer=QUANTIZER, progress=False
    )
    assert found.reached
    assert found.chosen.size_mb <= limit
    assert found.chosen.metric > found.trials[0].metric
    assert found.limits == {"size": limit}


@pytest.mark.slow(reason="a search over larger layers")
def test_four_bits_make_a_model_smaller_than_int8():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)).eval()
    options = {"max_drop": 0.1, "relative": False, "minimize": "size", "progress": False}
    found = intaglio.search(model, [X], lambda m: -relative_error(m, model), **options)
    assert found.reached
    assert found.chosen.size_mb < 0.8 * found.trials[0].size_mb
    assert found.changes["2"].weights_dtype == "s4"


@pytest.mark.slow(reason="a search under another limit; a limit of the size is kept below")
def test_a_latency_limit_is_kept_by_the_measured_time(monkeypatch):
    """Times are given, so that the test does not measure: each layer in float takes one millisecond more."""
    model = layered_network()
    monkeypatch.setattr(search_run, "relative_ms", lambda base, m, call, ms: 1.0 + len(layers_in_float(m)))
    options = {"candidates": {"float": None}, "quantizer": QUANTIZER, "progress": False, "max_drop": None}
    found = intaglio.search(model, [X], lambda m: -relative_error(m, model), max_latency=3.0, **options)
    assert found.reached
    assert found.chosen.latency_ms <= 3.0
    assert all(trial.accepted == (trial.latency_ms <= 3.0) for trial in found.trials)


def test_a_size_that_no_model_has_gives_the_smallest_and_a_warning():
    with pytest.warns(UserWarning, match="no trial keeps the limits"):
        found = intaglio.search(
            layered_network(), [X], lambda m: 1.0, max_size=1e-6, quantizer=QUANTIZER, progress=False
        )
    assert not found.reached
    assert found.chosen.size_mb == min(trial.size_mb for trial in found.trials)


@pytest.mark.slow(reason="a search of all trials; fronts have tests in test_assignment_problem.py")
def test_the_front_has_the_trials_that_no_other_beats():
    found = intaglio.search(layered_network(), [X], lambda m: len(layers_in_float(m)) / 4, max_drop=0.5, **BY_SIZE)
    costs = [trial.size_mb for trial in found.front]
    metrics = [trial.metric for trial in found.front]
    assert costs == sorted(set(costs))
    assert metrics == sorted(set(metrics))
    assert found.chosen in found.front


# ---- ends


def test_an_interrupted_search_returns_the_best_so_far():
    calls = []

    def metric(model):
        calls.append(model)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return len(layers_in_float(model)) / 4

    found = intaglio.search(layered_network(), [X], metric, max_drop=0.1, **BY_SIZE)
    assert found.interrupted
    assert len(found.trials) == 2
    assert found.chosen.metric == max(trial.metric for trial in found.trials)
    assert "interrupted" in str(found)


def test_a_spent_budget_still_gives_the_model_of_quantize():
    found = None
    with pytest.warns(UserWarning, match="no trial reaches the metric"):
        found = intaglio.search(layered_network(), [X], needs("a"), budget=1e-9, **BY_SIZE)
    assert len(found.trials) == 1
    assert layers_in_float(found.model) == set()


def test_evaluations_are_bounded():
    calls = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metric = needs("a", "b")
        intaglio.search(layered_network(), [X], lambda m: calls.append(m) or metric(m), evaluations=3, **BY_SIZE)
    assert len(calls) == 3


# ---- the journal


def test_a_search_continues_from_its_journal_without_new_evaluations(tmp_path):
    calls, model, path = [], layered_network(), tmp_path / "search.jsonl"
    metric = needs("a", "b")

    def search():
        return intaglio.search(model, [X], lambda m: calls.append(m) or metric(m), journal=path, **BY_SIZE)

    first = search()
    count, text = len(calls), path.read_text()
    second = search()
    assert len(calls) == count
    assert path.read_text() == text
    assert {str(trial.assignment) for trial in second.trials} == {str(trial.assignment) for trial in first.trials}
    assert torch.equal(first.model(X), second.model(X))
    assert all(json.loads(line) for line in text.splitlines())


@pytest.mark.slow(reason="two searches; a journal is continued above")
def test_an_incomplete_last_line_of_a_journal_is_left_out(tmp_path):
    path, model = tmp_path / "search.jsonl", layered_network()
    intaglio.search(model, [X], needs("a"), journal=path, **BY_SIZE)
    path.write_text(path.read_text()[:-20])
    found = intaglio.search(model, [X], needs("a"), journal=str(path), **BY_SIZE)
    assert layers_in_float(found.model) == {"a"}
    assert all(json.loads(line) for line in path.read_text().splitlines())


# ---- the metric


def test_the_float_model_is_evaluated_in_eval_mode_and_not_changed():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.9), nn.Linear(WIDTH, WIDTH)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exact = []
    intaglio.search(model, [X], lambda m: exact.append(m(X)) or 1.0)
    assert torch.allclose(exact[0], exact[1], atol=0.1)
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


ODD = {
    "returned None": lambda m: None,
    "returned nan": lambda m: float("nan"),
    "returned 'good'": lambda m: "good",
    "a tensor of shape (3, 2)": lambda m: torch.ones(3, 2),
    "an array of 2 numbers that are not all finite": lambda m: np.array([1.0, np.nan]),
    "raised ZeroDivisionError": lambda m: 1 / 0,
    "returned (1+2j)": lambda m: 1 + 2j,
}


@pytest.mark.parametrize("problem", ODD)
def test_a_function_that_gives_no_number_is_named(problem):
    with pytest.raises(InputError, match=rf"^evaluate: it .*{re.escape(problem)}") as raised:
        intaglio.search(layered_network(), [X], ODD[problem])
    assert "for the float model" in str(raised.value)


@pytest.mark.parametrize("one", [1, True, 1.0, np.float32(1), torch.tensor(1.0), torch.ones(1, 1)], ids=repr)
def test_one_number_is_taken_in_any_form(one):
    assert intaglio.search(layered_network(), [X], lambda m: one).baseline == 1.0


def test_a_failing_metric_function_names_the_trial():
    def odd(m):
        return float("nan") if isinstance(m, intaglio.QuantizedModel) else 1.0

    with pytest.raises(InputError, match="returned nan for the int8 model with nothing changed"):
        intaglio.search(layered_network(), [X], odd)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_drop": -1}, "max_drop"),
        ({"max_drop": float("nan")}, "max_drop"),
        ({"evaluations": 1}, "evaluations"),
        ({"budget": 0}, "budget"),
        ({"max_latency": 0}, "max_latency"),
        ({"max_size": float("inf")}, "max_size"),
        ({"minimize": "macs"}, "minimize"),
        ({"confidence": 1.0}, "confidence"),
    ],
)
def test_an_invalid_objective_is_refused(options, problem):
    with pytest.raises(InputError, match=problem):
        intaglio.search(layered_network(), [X], lambda m: 1.0, **options)


@pytest.mark.parametrize(("relative", "floor"), [(True, -2.2), (False, -2.1)])
def test_max_drop_is_relative_or_absolute(relative, floor):
    found = intaglio.search(layered_network(), [X], lambda m: -2.0, max_drop=0.1, relative=relative)
    assert found.floor == pytest.approx(floor)


def test_all_candidates_and_the_result_have_the_plain_attributes_of_the_float_model():
    model, seen = layered_network(), []
    model.labels = ["cat", "dog"]
    found = intaglio.search(model, [X], lambda m: float(len(seen.append(m.labels) or "x")), progress=False)
    assert seen == [["cat", "dog"]] * 2
    assert found.model.labels == ["cat", "dog"]


def test_no_warning_where_the_metric_is_reached():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        intaglio.search(layered_network(), [X], lambda m: 1.0)


# ---- the result


@pytest.mark.slow(reason="a search, to print it; printed changes are used above")
def test_a_result_is_text_json_a_table_and_a_plot():
    pytest.importorskip("matplotlib").use("agg")
    found = intaglio.search(layered_network(), [X], needs("b"), **BY_SIZE)
    assert str(found).startswith("metric of the float model: 1; accepted from 0.99 on")
    assert repr(found).startswith("SearchResult(metric 1 at ")
    assert json.loads(found.to_json())["changes"]["b"] is None
    assert "<table>" in found._repr_html_()
    axes = found.plot()
    assert axes.get_xlabel() == "megabytes of the saved model"
    assert len(axes.lines[0].get_xdata()) == len(found.front)
