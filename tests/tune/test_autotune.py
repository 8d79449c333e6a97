"""A target for a user's metric: how operators are found that stay in float for it, and what is refused."""

import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import intaglio
from intaglio import stages
from intaglio.errors import InputError
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.tune import SearchStart
from intaglio.tune.float_search import FloatSearch
from support import nets
from support.lowering import ROUNDED
from support.nets import Body

X = torch.randn(32, 12, generator=torch.Generator().manual_seed(1))
LAYERS = ("a", "b", "c", "d")


def layers() -> nn.Module:
    """Four linear layers with a function between."""

    def body(m: nn.Module, x: Tensor) -> Tensor:
        for name in LAYERS:
            x = torch.tanh(getattr(m, name)(x))
        return x

    return nets.randomize(Body(body, **{name: nn.Linear(12, 12) for name in LAYERS}))


def in_float(model: object) -> set[str]:
    """Layers that a model computes in float; all of them, of the float model."""
    if not isinstance(model, intaglio.QuantizedModel):
        return set(LAYERS)
    return set(re.findall(r"skipped (\w) \(aten\.linear", model.text("sites")))


# ---- the search alone

harms = st.lists(st.integers(0, 5), min_size=1, max_size=12)


def searched(damage: list[int], order: list[int], drop: int, budget: int) -> tuple[FloatSearch, tuple[str, ...]]:
    """Of operators that each take something from a metric of 0 unless they stay in float."""
    names = [str(index) for index in order]

    def metric(left):
        return -float(sum(d for index, d in enumerate(damage) if str(index) not in left))

    search = FloatSearch(metric, -float(drop), budget)
    return search, search.run(names)


@given(harms, st.randoms(), st.integers(0, 20), st.integers(2, 40))
def test_the_search_reaches_the_metric_whenever_some_set_does(damage, random, drop, budget):
    """Leaving everything in float harms least of all; two trials suffice to get there, and no more than allowed run."""
    order = random.sample(range(len(damage)), len(damage))
    search, left = searched(damage, order, drop, budget)
    assert search.trials[left] >= -drop
    assert len(search.trials) <= budget


@given(harms, st.randoms(), st.integers(0, 20))
def test_no_single_operator_of_the_result_can_be_quantized_again(damage, random, drop):
    order = random.sample(range(len(damage)), len(damage))
    _, left = searched(damage, order, drop, budget=10**6)
    kept = [damage[int(name)] for name in left]
    harm = sum(damage) - sum(kept)
    assert harm <= drop
    assert all(harm + own > drop for own in kept)


@pytest.mark.case("problem 37")
@given(st.integers(1, 60), st.data())
def test_one_damaging_operator_takes_few_trials(count, data):
    """About four times the logarithm of its place in the ranking."""
    place = data.draw(st.integers(0, count - 1))
    search, left = searched([int(index == place) for index in range(count)], list(range(count)), 0, budget=10**6)
    assert left == (str(place),)
    assert len(search.trials) <= 3 + 4 * place.bit_length()


def test_the_best_trial_is_taken_if_none_reaches_the_metric():
    metric = {(): 0.2, ("a",): 0.5, ("a", "b"): 0.4}
    search = FloatSearch(metric.__getitem__, 0.9, 10)
    assert search.run(["a", "b"]) == ("a",)
    assert len(search.trials) == 3


# ---- models


def test_a_first_int8_model_that_reaches_the_metric_takes_two_evaluations():
    seen = []
    model = layers()
    tuned = intaglio.autotune(model, [X], lambda m: float(len(seen.append(type(m)) or "one")))
    assert seen == [type(model), intaglio.QuantizedModel]
    assert tuned.reached
    assert tuned.left == ()
    assert torch.equal(tuned.model(X), intaglio.quantize(layers(), [X])(X))


@pytest.mark.case("problem 37")
def test_the_recipe_of_a_result_gives_the_same_bits_without_tuning(tmp_path):
    model = layers()
    tuned = intaglio.autotune(model, [X], lambda m: 1.0 if "b" in in_float(m) else 0.5)
    tuned.recipe.save(tmp_path / "recipe.toml")
    again = intaglio.quantize(model, X[:2], recipe=tmp_path / "recipe.toml")
    assert in_float(again) == {"b"}
    assert torch.equal(again(X), tuned.model(X))
    assert torch.equal(stages.compile(tuned.reference)(X), tuned.model(X))


@pytest.mark.slow(reason="two whole searches; the recipe of a result is run again above")
def test_the_same_search_gives_the_same_result_twice():
    def search():
        return intaglio.autotune(layers(), [X], lambda m: 0.5 + len(in_float(m)) / 8, max_drop=0.2)

    first, second = search(), search()
    assert str(first) == str(second)
    assert first.recipe == second.recipe


def test_operators_a_user_leaves_in_float_stay_in_float():
    """Backend 4.4: a restriction is honoured."""
    leaving_c = stages.Quantizer(intaglio.Recipe.of({"c": None}))
    tuned = intaglio.autotune(layers(), [X], lambda m: 1.0 if "a" in in_float(m) else 0.5, quantizer=leaving_c)
    assert in_float(tuned.model) == {"a", "c"}
    assert tuned.left == ("a",)


def test_a_target_that_is_not_reached_gives_the_best_and_a_warning():
    model = layers()

    def search():
        return intaglio.autotune(model, [X], lambda m: len(in_float(m)) / 4, max_drop=0, evaluations=4)

    with pytest.warns(UserWarning, match=r"autotune: no trial reaches the metric 1; the best of 3 trials has 0\.75"):
        tuned = search()
    assert not tuned.reached
    assert "no trial is accepted" in str(tuned)
    assert len({*LAYERS}.intersection(tuned.left)) == 3
    assert tuned.chosen == max(tuned.trials, key=lambda trial: trial.metric)


def test_a_value_that_becomes_a_site_is_calibrated():
    """A rectifier in float lays open the sum in front of it, which is a site if results are quantized."""
    model = nets.randomize(Body(lambda m, x: m.d(torch.relu(m.c(x) + x)), c=nn.Conv2d(4, 4, 1), d=nn.Conv2d(4, 2, 1)))
    x = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    captured = stages.capture(model, x)
    prepared = stages.prepare(captured, Quantizer(ROUNDED))
    reference = stages.convert(prepared, stages.calibrate(prepared, [x]))
    found = SearchStart(captured, Quantizer(ROUNDED), reference, [x]).reference_leaving(("op:aten.relu",))
    assert set(found.parameters.entries) - set(reference.parameters.entries) == {"#0/add.0"}
    assert intaglio.compare(captured, found, [x]).results[0] > 30


def test_the_float_model_is_evaluated_in_eval_mode_and_not_changed():
    model = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.9), nn.Linear(12, 12)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exact = []
    intaglio.autotune(model, [X], lambda m: exact.append(m(X)) or 1.0)
    assert torch.allclose(exact[0], exact[1], atol=0.1)
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


ODD = {
    "returned None": lambda m: None,
    "returned nan": lambda m: float("nan"),
    "returned 'good'": lambda m: "good",
    "a tensor of shape (3,)": lambda m: torch.ones(3),
    "raised ZeroDivisionError": lambda m: 1 / 0,
    "returned (1+2j)": lambda m: 1 + 2j,
}


@pytest.mark.parametrize("problem", ODD)
def test_a_function_that_gives_no_number_is_named(problem):
    with pytest.raises(InputError, match=rf"^evaluate: it .*{re.escape(problem)}") as raised:
        intaglio.autotune(layers(), [X], ODD[problem])
    assert "for the float model" in str(raised.value)


@pytest.mark.parametrize("one", [1, True, 1.0, np.float32(1), torch.tensor(1.0), torch.ones(1, 1)], ids=repr)
def test_one_number_is_taken_in_any_form(one):
    assert intaglio.autotune(layers(), [X], lambda m: one).baseline == 1.0


def test_a_failing_metric_function_names_the_trial():
    def odd(m):
        return float("nan") if isinstance(m, intaglio.QuantizedModel) else 1.0

    with pytest.raises(InputError, match="returned nan for the int8 model with nothing more in float"):
        intaglio.autotune(layers(), [X], odd)


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"max_drop": -1}, "max_drop"), ({"max_drop": float("nan")}, "max_drop"), ({"evaluations": 1}, "evaluations")],
)
def test_an_invalid_criterion_is_refused(options, problem):
    with pytest.raises(InputError, match=problem):
        intaglio.autotune(layers(), [X], lambda m: 1.0, **options)


def test_a_data_function_is_refused_by_autotune():
    with pytest.raises(InputError, match="data"):
        intaglio.autotune(layers(), lambda m: m(X), lambda m: 1.0, example_inputs=X)


@pytest.mark.parametrize(("relative", "floor"), [(True, -2.2), (False, -2.1)])
def test_max_drop_is_relative_or_absolute(relative, floor):
    tuned = intaglio.autotune(layers(), [X], lambda m: -2.0, max_drop=0.1, relative=relative)
    assert tuned.floor == pytest.approx(floor)


def test_all_candidates_and_the_result_have_the_plain_attributes_of_the_float_model():
    model, seen = layers(), []
    model.labels = ["cat", "dog"]
    tuned = intaglio.autotune(model, [X], lambda m: float(len(seen.append(m.labels) or "x")), progress=False)
    assert seen == [["cat", "dog"]] * 2
    assert tuned.model.labels == ["cat", "dog"]


def test_no_warning_where_the_target_is_reached():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        intaglio.autotune(layers(), [X], lambda m: 1.0)
