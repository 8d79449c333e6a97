"""Metrics with a number for each sample: how sure a search is that a model keeps them."""

import json

import numpy as np
import pytest
import torch

import intaglio
from intaglio import stages
from intaglio.errors import InputError
from intaglio.mixed_precision.metric import Metric
from intaglio.mixed_precision.objective import Objective
from support.layered import LAYERED_INPUT as X
from support.layered import layered_network, layers_in_float
from support.recipes import UNCORRECTED
from support.slow_params import slow_params

pytestmark = pytest.mark.usefixtures("untimed_searches")

QUANTIZER = stages.Quantizer(intaglio.Recipe.of(UNCORRECTED))
ABSOLUTE = {"relative": False, "progress": False}
BY_SIZE = {"minimize": "size", "candidates": {"float": None}, "quantizer": QUANTIZER, **ABSOLUTE}


def hits(wrong, samples=100):
    """1 for each sample, 0 for some of them."""
    return torch.tensor([0] * wrong + [1] * (samples - wrong))


def depending_on(name, wrong):
    """A metric that is perfect in float, and wrong for some samples unless a layer stays in float."""
    return lambda m: hits(0 if not isinstance(m, intaglio.QuantizedModel) or name in layers_in_float(m) else wrong)


def test_the_mean_of_the_samples_is_the_metric():
    found = intaglio.search(layered_network(), [X], depending_on("a", 1), max_drop=0.5, progress=False)
    assert (found.baseline, found.chosen.metric) == (1.0, pytest.approx(0.99))


def test_differences_of_the_same_samples_count():
    exact, other = Metric.of(np.array([5.0, 1.0, 3.0]), "one"), Metric.of(np.array([4.0, 0.0, 2.0]), "other")
    assert other.standard_error(exact) == 0
    assert Metric.of(hits(2).numpy(), "it").standard_error(Metric.of(hits(0), "it")) == pytest.approx(0.01407, abs=1e-5)


@pytest.mark.parametrize(
    ("confidence", "left"), [*slow_params((0.5, set()), reason="another confidence"), (0.95, {"a"})]
)
def test_a_metric_that_may_be_too_high_by_chance_is_refused(confidence, left):
    """The int8 model is wrong for 2 of 100 samples, and ``max_drop`` allows 3."""
    found = intaglio.search(
        layered_network(), [X], depending_on("a", 2), max_drop=0.03, confidence=confidence, **BY_SIZE
    )
    assert layers_in_float(found.model) == left
    assert found.reached


def test_the_margin_grows_with_the_number_of_tries():
    objective = Objective(len)
    assert objective.margin(2.0, 1) == pytest.approx(2 * 1.6449, abs=1e-3)
    assert objective.margin(2.0, 20) == pytest.approx(2 * 2.8070, abs=1e-3)
    assert objective.margin(None, 20) == 0


@pytest.mark.slow(reason="a search, to print it")
def test_the_text_of_a_result_names_confidence_and_standard_errors():
    found = intaglio.search(layered_network(), [X], depending_on("a", 2), max_drop=0.03, **BY_SIZE)
    assert "accepted from 0.97 on with a confidence of 95 %" in str(found)
    assert json.loads(found.to_json())["confidence"] == 0.95
    assert found.trials[0].cells()[0] == "0.98 +-0.01"


@pytest.mark.slow(reason="a search that accepts nothing; the margin of a metric is computed below")
def test_more_samples_are_advised_where_no_model_is_accepted():
    with pytest.warns(UserWarning, match=r"with a standard error of 0.014\. .* more samples in evaluate"):
        intaglio.search(layered_network(), [X], depending_on("none", 2), max_drop=0.03, **BY_SIZE)


def test_another_number_of_samples_is_refused():
    def odd(m):
        return hits(0, 9 if isinstance(m, intaglio.QuantizedModel) else 10)

    with pytest.raises(InputError, match="10 numbers for the float model, but 9"):
        intaglio.search(layered_network(), [X], odd, progress=False)


@pytest.mark.slow(reason="two searches; journals have tests in test_search.py")
def test_a_journal_keeps_the_samples_of_the_float_model(tmp_path):
    options = {"max_drop": 0.03, "journal": tmp_path / "j", "evaluations": 3, **BY_SIZE}
    first = intaglio.search(layered_network(), [X], depending_on("a", 2), **options)
    again = intaglio.search(layered_network(), [X], depending_on("a", 2), **{**options, "evaluations": 20})
    assert again.trials[0].standard_error == first.trials[0].standard_error
    assert layers_in_float(again.model) == {"a"}
