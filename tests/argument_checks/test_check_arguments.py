"""Errors of argument checks name function and argument, what is allowed, what was given and a remedy that works."""

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pytest
from torch import nn

import intaglio
from intaglio import stages
from intaglio.argument_checks import check_arguments, check_arguments_except, check_fields, value_text
from intaglio.calibration import AverageMaxCalibrationCallback
from intaglio.errors import InputError
from intaglio.patterns import QuantizerPattern, builtin, op


class Chooser(Protocol):
    def choose(self, value: int) -> int: ...


class Chosen:
    def choose(self, value: int) -> int:
        return value


@check_arguments
def example(
    model: nn.Module,
    *others: str,
    count: int = 1,
    share: float = 0.5,
    deep: bool = False,
    path: str | Path | None = None,
    names: str | Iterable[str] = (),
    table: Mapping[str, int] | None = None,
    pair: tuple[int, int] = (0, 1),
    mode: Literal["fast", "exact"] = "fast",
    chooser: Chooser | None = None,
    kind: type[nn.Module] = nn.Linear,
    rows: Sequence[float] = (),
    call: Callable[..., Any] | None = None,
    anything: Any = None,
) -> None:
    """Check arguments of many types."""


ALLOWED = {
    "count": [0, -3, 2**70, np.int64(3)],
    "share": [1, 0.5, np.float32(0.5), float("nan")],
    "deep": [True, np.bool_(True)],
    "path": ["a", Path("a"), None],
    "names": ["a", ["a"], ("a", "b"), {"a"}, iter(["a"]), np.array(["a", "b"])],
    "table": [{}, {"a": 1}, None],
    "pair": [(1, 2)],
    "mode": ["fast", "exact"],
    "chooser": [Chosen(), None],
    "kind": [nn.Linear],
    "rows": [[1, 2.5], ()],
    "call": [len, Chosen, lambda: 0],
    "anything": [object(), None],
}
REFUSED = {
    "count": (["1", 1.0, True, None, [1]], "count takes an integer, got "),
    "share": (["1", True, None, 1j], "share takes a number, got "),
    "deep": (["yes", 1, None], "deep takes True or False, got "),
    "path": ([5, b"a", ["a"]], "path takes a string, a path or None, got "),
    "names": (
        [5, None, [None], b"a", {"a": 1}.values(), np.array(1.0)],
        "names takes a string or an iterable of strings",
    ),
    "table": ([[], {"a": "b"}, {1: 1}], "table takes a mapping from strings to integers or None, got "),
    "pair": ([(1,), [1, 2], (1, "a")], r"pair takes a tuple \(an integer, an integer\), got "),
    "mode": ([1, None, "slow"], "mode takes 'fast' or 'exact', got "),
    "chooser": ([5, object()], r"chooser takes an object with choose\(\) or None, got "),
    "kind": ([nn.Linear(1, 1), int, 5], "kind takes a subclass of Module, got "),
    "rows": (["12", [None], {1.0}], "rows takes a sequence of numbers, got "),
    "call": ([5, "len"], "call takes a function or None, got "),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_values_that_the_annotation_allows_are_accepted(name):
    for value in ALLOWED[name]:
        example(nn.ReLU(), **{name: value})


@pytest.mark.parametrize("name", REFUSED)
def test_other_values_are_refused_and_leaving_them_out_is_the_remedy(name):
    values, problem = REFUSED[name]
    for value in values:
        with pytest.raises(InputError, match=f"^example: {problem}") as raised:
            example(nn.ReLU(), **{name: value})
        assert (
            raised.value.remedy == "did you mean 'slow'?" or f"leave {name} out for its default" in raised.value.remedy
        )


def test_a_required_argument_cannot_be_left_out():
    with pytest.raises(InputError, match=r"model takes an nn\.Module, got 5, an int") as raised:
        example(5)
    assert raised.value.remedy == "pass an nn.Module"
    with pytest.raises(TypeError, match=r"^example\(\) missing 1 required positional argument: 'model'$"):
        example()


def test_more_positional_arguments_are_checked_too():
    example(nn.ReLU(), "a", "b")
    with pytest.raises(InputError, match=r"others\[1\] takes a string, got None"):
        example(nn.ReLU(), "a", None)


def test_a_misspelt_keyword_is_answered_with_the_nearest_one():
    with pytest.raises(InputError, match="there is no argument 'cuont'") as raised:
        example(nn.ReLU(), cuont=1)
    assert raised.value.remedy == "did you mean 'count'?"
    example(nn.ReLU(), count=1)
    with pytest.raises(InputError, match="there is no argument 'zzz'; its arguments are model, count") as raised:
        example(nn.ReLU(), zzz=1)
    assert raised.value.remedy == "leave zzz out"


def test_a_misspelt_choice_is_answered_with_the_nearest_one():
    with pytest.raises(InputError) as raised:
        example(nn.ReLU(), mode="exakt")
    assert raised.value.remedy == "did you mean 'exact'?"


@pytest.mark.parametrize(("name", "kind"), [("model", nn.ReLU), ("chooser", Chosen)])
def test_a_class_instead_of_its_object_is_named(name, kind):
    arguments = {"model": nn.ReLU(), name: kind}
    with pytest.raises(InputError, match=f"got the class {kind.__name__}") as raised:
        example(**arguments)
    assert raised.value.remedy == f"pass an object of the class: {kind.__name__}(...)"
    example(**{**arguments, name: kind()})


def test_arguments_that_the_function_checks_itself_are_left_to_it():
    @check_arguments_except("stage")
    def own(stage: int, other: int = 0) -> int:
        return other

    assert own("a") == 0
    with pytest.raises(InputError, match="other takes an integer"):
        own("a", other="b")


@check_fields
@dataclass(frozen=True)
class Options:
    """Options of the tests."""

    count: int = 1


def test_constructors_of_dataclasses_are_checked_and_objects_can_be_pickled():
    assert pickle.loads(pickle.dumps(Options(2))) == Options(2)
    with pytest.raises(InputError, match=r"^Options: count takes an integer, got 'a', a str"):
        Options("a")
    with pytest.raises(InputError, match=r"^Options: there is no argument 'cuont'; its arguments are count"):
        Options(cuont=1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        ("a" * 5000, "'" + "a" * 59 + "..."),
        (10**5000, "a number of many digits"),
        ([1, 2, 3, 4], "[1, 2, 3, ...]"),
        ([], "[]"),
        ([[1], []], "[[...], []]"),
        ({"a": None}, "{'a': None}"),
        (nn.ReLU(), "a ReLU"),
        (nn.ReLU, "the class ReLU"),
        (Options(), "an Options"),
    ],
    ids=lambda given: given if isinstance(given, str) and len(given) < 30 else "value",
)
def test_values_have_a_short_text(value, text):
    assert value_text(value) == text


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_no_code_of_a_value_runs_for_its_text():
    assert value_text([Unprintable()]) == "[an Unprintable]"


# ---- public functions


def test_a_string_for_a_recipe_of_a_quantizer_is_an_error():
    with pytest.raises(InputError, match=r"^Quantizer: recipe takes a Recipe, got 'accurate', a str"):
        stages.Quantizer("accurate")
    stages.Quantizer(intaglio.Recipe.given("accurate"))


def test_misspelt_options_of_quantize_and_of_recipes_name_the_nearest():
    with pytest.raises(InputError) as raised:
        intaglio.quantize(nn.ReLU(), [], skp="a")
    assert raised.value.remedy == "did you mean 'skip'?"
    with pytest.raises(InputError) as raised:
        intaglio.Setting(metho="mse")
    assert raised.value.remedy == "did you mean 'method'?"


def test_the_class_of_a_callback_instead_of_an_object_is_named():
    with pytest.raises(InputError, match="calibration takes an object with calibrate") as raised:
        builtin("conv2d", calibration=AverageMaxCalibrationCallback)
    assert raised.value.remedy == "pass an object of the class: AverageMaxCalibrationCallback(...)"
    builtin("conv2d", calibration=AverageMaxCalibrationCallback())


def test_a_pattern_takes_a_pattern_and_not_its_name():
    with pytest.raises(InputError, match=r"^QuantizerPattern: pattern takes a Pattern, got 'conv2d', a str"):
        QuantizerPattern("mine", "conv2d")
    QuantizerPattern("mine", op("conv2d"))
