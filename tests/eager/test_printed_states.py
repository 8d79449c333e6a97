"""Define-by-run: document 000's model, the state each module prints, the order of what is intercepted."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from intaglio import Recipe, Setting, eager
from intaglio.quant.calibrate.tensor_statistics import Statistics
from support import nets


class Child(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)
        self.child = Child()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.child(x)
        return x


X = torch.linspace(-0.5, 1, 32).reshape(2, 1, 4, 4)
PREPARED = """\
AutoQuantizationState(
  (seen_op_infos): {
    0: (type): torch.Tensor.add
       (input_tensor_infos): [
         QTensorInfo(id=1, inf_dtype=torch.quint8),
         QTensorInfo(id=1, inf_dtype=torch.quint8),
       ],
       (output_tensor_infos): [
         QTensorInfo(id=2, inf_dtype=torch.quint8),
       ],
  }
  (tensor_id_to_observer): ModuleDict(
    (2): Observer(child#0/add.0, count=0)
  )
)"""
CONVERTED = """\
AutoQuantizationState(
  (seen_op_infos): {
    0: (type): Conv2d (conv)
       (input_tensor_infos): [
         QTensorInfo(id=0, inf_dtype=torch.float32),
       ],
       (output_tensor_infos): [
         QTensorInfo(id=1, inf_dtype=torch.quint8),
       ],
       (before): quantize 0
       (instead): conv2d in int8 of conv
       (after): nothing
  }
  (tensor_id_to_qparams): {
    (0): q(scale=0.00588235, zp=85)
    (1): q(scale=0.00294118, zp=85)
  }
)"""


def prepared() -> nn.Module:
    model = nets.randomize(Parent())
    with torch.no_grad():
        model.conv.weight.fill_(0.5)
        model.conv.bias.zero_()
    return eager.prepare(model, X, Recipe.of({}, Setting(method="minmax", results="int8")))


@pytest.mark.case("frontends A5")
def test_parent_and_child_each_have_a_state():
    """A5: as document 000 prints it; user code that goes over modules does not meet it."""
    model = prepared()
    assert isinstance(model._auto_quant_state, eager.AutoQuantizationState)
    assert isinstance(model.child._auto_quant_state, eager.AutoQuantizationState)
    assert not hasattr(model.conv, "_auto_quant_state")
    assert [name for name, _ in model.named_modules()] == ["", "conv", "child"]
    assert str(model.child._auto_quant_state) == PREPARED
    assert [info.type for info in model._auto_quant_state.seen_op_infos.values()] == ["Conv2d"]
    assert [info.type for info in model.child._auto_quant_state.seen_op_infos.values()] == ["torch.Tensor.add"]


@pytest.mark.slow(reason="prepares a model once more")
@pytest.mark.case("document 000")
def test_states_are_submodules_if_asked_for():
    model = eager.prepare(nets.randomize(Parent()), X, Recipe.of({}, Setting(method="minmax")), as_children=True)
    plain = eager.prepare(nets.randomize(Parent()), X, Recipe.of({}, Setting(method="minmax")))
    names = ["", "conv", "child", "child._auto_quant_state", "_auto_quant_state"]
    for one, other in ((model, plain), (eager.convert(called(model)), eager.convert(called(plain)))):
        assert [name for name, _ in one.named_modules()] == names
        assert dict(one.named_modules())["child._auto_quant_state"] is one.child._auto_quant_state
        assert "(_auto_quant_state): AutoQuantizationState(\n    (seen_op_infos)" in str(one)
        assert list(one.state_dict()) == list(other.state_dict())
        for kept in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert [name for name, _ in kept.named_modules()] == names
            assert kept._auto_quant_state.session.model is kept
            assert torch.equal(kept(X), one(X))
            kept.load_state_dict(other.state_dict())
            assert torch.equal(kept(X), other(X))


def called(model: nn.Module) -> nn.Module:
    model(X)
    return model


def test_containers_keep_their_state_as_an_attribute():
    model = eager.prepare(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(2, 8), as_children=True)
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU]
    assert "Linear" in str(model._auto_quant_state)


def test_the_text_of_a_converted_module_shows_how_each_operator_is_executed():
    model = prepared()
    model(X)
    converted = eager.convert(model)
    assert str(converted._auto_quant_state) == CONVERTED
    (add,) = converted.child._auto_quant_state.seen_op_infos.values()
    assert (add.before, add.instead, add.after) == ("nothing", "add in int8 of child::add", "dequantize 2")
    assert not converted._auto_quant_state.tensor_id_to_observer
    assert type(converted(X)) is torch.Tensor
    assert converted(X).dtype == torch.float32


@pytest.mark.case("frontends A5")
def test_calls_are_intercepted_in_the_order_of_the_document():
    """A5: of a prepared model and a converted one alike."""
    model = prepared()
    model(X)
    for each in (model, eager.convert(model)):
        with eager.calls() as log:
            each(X)
        assert [str(call) for call in log] == [
            "model start",
            "conv start",
            "conv end",
            "child start",
            "child::add start",
            "child::add end",
            "child end",
            "model end",
        ]
        each(X)
        assert len(log) == 8


@pytest.mark.case("frontends A6")
def test_observers_are_empty_after_prepare():
    """A6: recording the example does not count; an observer of nothing would give scale 1 and zero point 0."""
    model = prepared()
    states = (model._auto_quant_state, model.child._auto_quant_state)
    observers = [observer for state in states for observer in state.tensor_id_to_observer.values()]
    assert len(observers) == 3
    assert all(observer.statistics == Statistics() for observer in observers)
    model(X)
    assert [observer.statistics.count for observer in observers] == [32, 32, 32]


def test_operators_without_a_region_are_float_and_dropout_passes_values_on():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.drop = nn.Conv2d(1, 1, 1), nn.Dropout()

        def forward(self, x: Tensor) -> Tensor:
            return torch.special.zeta(self.drop(self.conv(x)) + 3, torch.tensor(1.5))

    model = eager.prepare(Net(), X)
    model(X)
    infos = eager.convert(model)._auto_quant_state.seen_op_infos.values()
    told = {info.type: (info.before, info.instead) for info in infos}
    assert told["Dropout"] == ("nothing", "passed through")
    assert told["torch.special.zeta"][1] == "in float"
    assert {name for name, info in told.items() if "int8" in info[1]} >= {"Conv2d"}


def test_tensors_of_all_recordings_have_distinct_ids():
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum().item() > 0 else self.b(x)

    model = eager.prepare(Branch(), torch.ones(2, 4))
    model(-torch.ones(2, 4))
    infos = [info for info in model._auto_quant_state.seen_op_infos.values() if info.type == "Linear"]
    assert [info.path for info in infos] == ["a", "b"]
    a, b = ({tensor.id for tensor in info.input_tensor_infos + info.output_tensor_infos} for info in infos)
    assert a.isdisjoint(b)
