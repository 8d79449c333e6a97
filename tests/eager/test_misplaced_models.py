"""Prepared and converted models that are given to PyTorch's own tools, or to functions that take something else."""

import inspect
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from intaglio import eager, stages
from intaglio.eager.recording.recorder import Recorder
from intaglio.errors import CaptureError, InputError
from intaglio.quant.recipes.settings import UNSET
from support.nets import Body

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


@cache
def float_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()


@cache
def prepared() -> nn.Module:
    model = eager.prepare(float_model(), X)
    model(X)
    return model


@cache
def converted() -> nn.Module:
    return eager.convert(prepared())


TOOLS: dict[str, Callable[[nn.Module], object]] = {
    "torch.export": lambda model: torch.export.export(model, (X,)),
    "strict torch.export": lambda model: torch.export.export(model, (X,), strict=True),
    "torch.jit.script": torch.jit.script,
    "torch.compile": lambda model: torch.compile(model, backend="eager")(X),
    "make_fx with symbolic sizes": lambda model: make_fx(model, tracing_mode="symbolic")(X),
    "torch.compile of a parent": lambda model: torch.compile(nn.Sequential(model), backend="eager")(X),
}


@pytest.mark.parametrize("made", [prepared, converted], ids=["prepared", "converted"])
@pytest.mark.parametrize("tool", TOOLS)
def test_tools_of_pytorch_that_cannot_read_plain_python_say_what_to_do(tool, made):
    with pytest.raises(InputError, match="is plain Python") as raised:
        TOOLS[tool](made())
    assert "eager.rewrite(converted)" in raised.value.remedy
    torch._dynamo.reset()


def test_models_run_and_show_their_signature_after_a_tool_refused_them():
    assert torch.equal(converted()(X), eager.convert(prepared())(X))
    assert list(inspect.signature(converted().forward).parameters) == ["input"]


def test_a_converted_model_is_not_converted_again():
    with pytest.raises(InputError, match="the model is converted already"):
        eager.convert(converted())


def test_functions_of_stages_name_those_of_eager():
    with pytest.raises(InputError, match=r"takes a Prepared, got a model of intaglio\.eager") as raised:
        stages.calibrate(prepared(), [X])
    assert raised.value.remedy == "call the prepared model with each batch: it collects its statistics itself"
    with pytest.raises(InputError) as raised:
        stages.convert(prepared())
    assert raised.value.remedy == "call eager.convert(prepared)"
    with pytest.raises(InputError, match=r"takes a Lowered, got a model of intaglio\.eager") as raised:
        stages.compile(converted())
    assert raised.value.remedy.endswith("compile(eager.rewrite(converted))")


def test_stages_are_not_models_of_eager():
    reference = eager.rewrite(converted())
    for function in (eager.convert, eager.coverage, eager.parameters, eager.rewrite, eager.assert_int8):
        with pytest.raises(InputError, match="this Reference was not prepared"):
            function(reference)


@pytest.mark.parametrize("example", [None, (), X[:, :2], "text"])
def test_example_inputs_that_the_model_fails_on_are_an_error_of_preparation(example):
    with pytest.raises(CaptureError, match="the float model fails on the example inputs") as raised:
        eager.prepare(float_model(), example)
    assert raised.value.__cause__ is not None


def test_a_defect_is_not_blamed_on_the_model(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("a defect")

    monkeypatch.setattr(Recorder, "record", fails)
    with pytest.raises(CaptureError, match="the float model runs, but recording it fails: RuntimeError: a defect"):
        eager.prepare(float_model(), X)


@torch.library.custom_op("intaglio_tests::once", mutates_args=())
def once(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor, in the first call only."""
    assert not CALLS
    CALLS.append(1)
    return x.clone()


CALLS: list[int] = []


def test_a_recording_that_fails_is_not_blamed_on_the_model(caplog):
    model = Body(lambda m, x: m.linear(once(x)), linear=nn.Linear(4, 4)).eval()
    segment = eager.session_of(eager.prepare(model, X)).segments[0]
    assert "its operators cannot be run again: AssertionError" in segment.refused


def test_recipes_of_eager_are_those_of_quantize():
    assert eager.prepare(float_model(), X, "default")._auto_quant_state.session.quantizer.recipe.default == UNSET
    with pytest.raises(InputError, match=r"^prepare: recipe takes a Recipe, a mapping"):
        eager.prepare(float_model(), X, 5)
