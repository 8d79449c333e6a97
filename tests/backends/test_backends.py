"""The protocol of backends: one table, and a toy backend that is a class and a row."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from intaglio import backends, stages
from intaglio.backends.protocol import integer_graph
from intaglio.errors import InputError, UnsupportedError
from intaglio.fxgraph.nodes import operator


@dataclass(frozen=True)
class ToyOptions:
    times: int


class ToyBackend:
    """Runs the integer graph in NumPy, and multiplies what it gives."""

    name = "toy"
    Options = ToyOptions
    remedy = "use another backend"

    def supports(self, op):
        return "it is not for toys" if operator(op) == "aten.tanh.default" else None

    def compile(self, stage, options):
        lowered = integer_graph(stage)
        return lambda *args: lowered(*args) * options.times


def reference_of(model: nn.Module) -> stages.Reference:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    prepared = stages.prepare(stages.capture(model.eval(), x))
    return stages.convert(prepared, stages.calibrate(prepared, [x]))


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(stages, "BACKENDS", (*backends.BACKENDS, ToyBackend()))


@pytest.fixture(scope="module")
def reference():
    return reference_of(nn.Linear(6, 3))


def test_a_backend_is_a_class_and_a_row(toy, reference):
    x = torch.ones(2, 6)
    lowered = stages.requantize(reference)
    for stage in (reference, lowered):
        assert np.array_equal(stages.compile(stage, "toy", times=2)(x), lowered(x) * 2)


def test_an_operator_that_the_backend_lacks_is_refused_before_it_compiles(toy):
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh())
    with pytest.raises(UnsupportedError, match=r"(?s)not for toys.*use another backend") as raised:
        stages.compile(reference_of(model), "toy", times=2)
    assert raised.value.where == "1"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "the toy backend needs times"),
        ({"times": 2, "isa": "avx2"}, "the toy backend has no option isa; its options are times"),
    ],
)
def test_options_are_those_of_the_backend(toy, reference, options, said):
    with pytest.raises(InputError, match=said):
        stages.compile(reference, "toy", **options)


def test_every_backend_of_the_table_has_a_name_of_its_own_and_unknown_names_are_refused(reference):
    assert [backend.name for backend in backends.BACKENDS] == ["native", "inductor", "onnx", "c"]
    with pytest.raises(InputError, match="'tvm' is not a backend; allowed are native, inductor, onnx, c"):
        stages.compile(reference, "tvm")


def test_a_plan_is_the_one_that_compile_prints(reference):
    lowered = stages.requantize(reference)
    assert stages.plan(lowered, isa="portable").text() == stages.compile(lowered, isa="portable").text("plan")


def test_a_plan_compiles_to_the_model_that_its_integer_graph_compiles_to(reference):
    lowered = stages.requantize(reference)
    planned, direct = stages.compile(stages.plan(lowered, isa="portable")), stages.compile(lowered, isa="portable")
    assert planned.artifact.program.isa == "portable"
    for stage in ("integer", "plan", "program"):
        assert planned.text(stage) == direct.text(stage)
    x = torch.randn(2, 6)
    assert torch.equal(planned(x), direct(x))
    assert planned.coverage == direct.coverage


@pytest.mark.parametrize("options", [{"isa": "avx2"}, {"tune": True}])
def test_a_plan_has_its_instruction_set_and_its_schedules(reference, options):
    plan = stages.plan(stages.requantize(reference), isa="portable")
    with pytest.raises(InputError, match="the plan already has an instruction set \\(portable\\)"):
        stages.compile(plan, **options)


def test_a_plan_falls_back_to_a_float_model_where_it_is_asked_to(reference):
    plan, net = stages.plan(stages.requantize(reference), isa="portable"), torch.nn.ReLU()
    assert stages.compile(plan, on_new_shape="fallback", float_model=net).on_new_shape == "fallback"
    with pytest.raises(InputError, match="none was given"):
        stages.compile(plan, on_new_shape="fallback")


def test_only_the_native_backend_takes_a_plan(reference, tmp_path):
    plan = stages.plan(stages.requantize(reference), isa="portable")
    with pytest.raises(InputError, match="takes a Reference, got a Planned"):
        stages.compile(plan, "inductor")
    with pytest.raises(InputError, match="takes a Lowered, got a Planned"):
        stages.compile(plan, "c", folder=tmp_path)


def test_plan_takes_only_a_lowered_graph(reference):
    with pytest.raises(InputError, match="takes a Lowered, got a Reference"):
        stages.plan(reference)


def test_the_c_backend_writes_what_the_model_exports(reference, tmp_path):
    stages.compile(reference).export_c(tmp_path / "model")
    assert stages.compile(reference, "c", folder=tmp_path / "stage") == tmp_path / "stage"
    names = [{path.relative_to(tmp_path / one) for path in (tmp_path / one).rglob("*")} for one in ("model", "stage")]
    assert names[0] == names[1]
    assert all(
        (tmp_path / "model" / n).read_bytes() == (tmp_path / "stage" / n).read_bytes()
        for n in names[0]
        if (tmp_path / "model" / n).is_file()
    )
