"""Lists and dictionaries that contain themselves are an error that names the argument, wherever they come in."""

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio import eager, stages
from intaglio.argument_checks import nesting_problem
from intaglio.errors import CaptureError, IntaglioError
from support.nets import Body, randomize

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def cyclic(kind: type) -> Any:
    """Return a container with a tensor and itself."""
    if kind is dict:
        found: Any = {"x": X}
        found["more"] = [found]
        return found
    found = kind([X])
    found.append((found,))
    return found


def deep(levels: int) -> list:
    found: list = [X]
    for _ in range(levels):
        found = [found]
    return found


def test_nesting_problems():
    shared = [X]
    for fine in (X, [], [shared, shared, {"a": shared}], {1: {2: (X,)}}, deep(50), "text", None):
        assert nesting_problem(fine) is None
    for kind in (list, dict, deque):
        assert nesting_problem((1, cyclic(kind))) == f"a {kind.__name__} in it contains itself"
    assert nesting_problem(deep(5000)) == "it is nested more than 100 levels deep"


def first(m: nn.Module, x: Any) -> Tensor:
    return m.linear(x["x"] if isinstance(x, dict) else x[0])


def model(body: Any = first) -> nn.Module:
    return randomize(Body(body, linear=nn.Linear(16, 4)))


def prepared() -> nn.Module:
    made = eager.prepare(model(), ([X],))
    made([X])
    return made


ENTRIES = {
    "quantize": lambda given: intaglio.quantize(model(), [(given,)], progress=False),
    "example_inputs": lambda given: intaglio.quantize(model(), [[X]], example_inputs=(given,), progress=False),
    "capture": lambda given: stages.capture(model(), (given,)),
    "dynamic_shapes": lambda given: stages.capture(model(), ([X],), dynamic_shapes=given),
    "captured": lambda given: stages.capture(model(), ([X],))(given),
    "int8 model": lambda given: intaglio.quantize(model(), [([X],)], progress=False)(given),
    "calibrate": lambda given: stages.calibrate(stages.prepare(stages.capture(model(), ([X],))), [(given,)]),
    "a generator of batches": lambda given: stages.calibrate(
        stages.prepare(stages.capture(model(), ([X],))), ((given,) for _ in range(1))
    ),
    "eager.prepare": lambda given: eager.prepare(model(), (given,)),
    "prepared": lambda given: prepared()(given),
    "converted": lambda given: eager.convert(prepared())(given),
}


@pytest.mark.parametrize("kind", [list, dict], ids=["list", "dict"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_arguments_that_contain_themselves_are_an_error(entry, kind):
    with pytest.raises(IntaglioError, match=f"a {kind.__name__} in it contains itself") as raised:
        ENTRIES[entry](cyclic(kind))
    assert raised.value.remedy == "nest lists and dictionaries less deeply, and none in itself"


def test_arguments_nested_without_end_are_an_error():
    with pytest.raises(IntaglioError, match="it is nested more than 100 levels deep"):
        stages.capture(model(), (deep(5000),))


def returns_itself(m: nn.Module, x: Tensor) -> list:
    found = [m.linear(x)]
    found.append(found)
    return found


def test_a_result_that_contains_itself_is_an_error_of_capture():
    with pytest.raises(CaptureError, match="its result: a list in it contains itself"):
        stages.capture(model(returns_itself), X)
    with pytest.raises(IntaglioError, match="result: a list in it contains itself"):
        eager.prepare(model(returns_itself), X)
    parts = intaglio.quantize(model(returns_itself), [X], progress=False)
    assert list(parts.parts) == ["linear"]
    found = parts(X)
    assert found[1] is found


def test_recursion_of_the_model_itself_is_not_blamed_on_arguments():
    def endless(m: nn.Module, x: Tensor) -> Tensor:
        return endless(m, x)

    with pytest.raises(CaptureError, match="the float model fails on the example inputs: RecursionError"):
        eager.prepare(model(endless), X)
