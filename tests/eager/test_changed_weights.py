"""Define-by-run: weights that change between calls are noticed, and state that the model changes itself is not."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from intaglio import eager
from intaglio.errors import CalibrationError
from support.eager_models import warnings_of


class Net(nn.Module):
    """A layer, a tensor attribute and a function of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.rand(8) + 0.5)
        self.offset = torch.rand(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) * self.scale + self.offset


def rows() -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def calibrated(model: nn.Module) -> nn.Module:
    prepared = eager.prepare(model, rows())
    prepared(rows())
    return prepared


def near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() < 0.05 * b.norm())


def halved(model: nn.Module) -> None:
    with torch.no_grad():
        model.layer.weight.mul_(0.5)


def copied(model: nn.Module) -> None:
    with torch.inference_mode():
        model.layer.weight.copy_(model.layer.weight / 2)


def assigned_data(model: nn.Module) -> None:
    model.layer.weight.data = model.layer.weight.data / 2


def assigned_parameter(model: nn.Module) -> None:
    model.layer.weight = nn.Parameter(model.layer.weight.detach() / 2)


def optimizer_step(model: nn.Module) -> None:
    for tensor in model.parameters():
        tensor.grad = torch.full_like(tensor, 0.1)
    torch.optim.SGD(model.parameters(), 1.0).step()


def changed_attribute(model: nn.Module) -> None:
    model.offset.sub_(1)


CHANGES = [halved, copied, assigned_data, assigned_parameter, optimizer_step, changed_attribute]


@pytest.mark.parametrize("change", CHANGES)
def test_a_converted_model_computes_with_its_weights_of_now(change: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(0)
    net = Net().eval()
    model = eager.convert(calibrated(net))
    before = net(rows())
    change(net)
    change(model)
    assert near(model(rows()), net(rows()))
    assert not near(net(rows()), before)
    assert near(copy.deepcopy(model)(rows()), net(rows()))


@pytest.mark.parametrize("change", [halved, assigned_data, assigned_parameter])
def test_a_prepared_model_drops_statistics_of_other_weights(change: Callable[[nn.Module], None], caplog) -> None:
    torch.manual_seed(0)
    net = Net().eval()
    prepared = calibrated(net)
    change(net)
    change(prepared)
    assert torch.equal(prepared(rows()), net(rows()))
    (line,) = [line for line in warnings_of(caplog) if "layer.weight" in line]
    assert line == "layer.weight changed; the graphs of the model are built again"
    assert near(eager.convert(prepared)(rows()), net(rows()))


def test_weights_that_change_after_calibration_have_no_statistics() -> None:
    prepared = calibrated(Net().eval())
    halved(prepared)
    with pytest.raises(CalibrationError, match="never called"):
        eager.convert(prepared)


def test_a_copy_of_a_model_with_changed_weights_has_these() -> None:
    net = Net().eval()
    model = eager.convert(calibrated(net))
    with torch.no_grad():
        model.layer.weight.mul_(8)
        net.layer.weight.mul_(8)
    assert near(copy.deepcopy(model)(rows()), net(rows()))


def test_inference_tensors_are_compared_by_their_contents() -> None:
    net = Net().eval()
    model = eager.convert(calibrated(net))
    with torch.inference_mode():
        model.layer.weight = nn.Parameter(model.layer.weight.clone(), requires_grad=False)
        assert model.layer.weight.is_inference()
        assert near(model(rows()), net(rows()))
        model.layer.weight.mul_(0.5)
        net.layer.weight.mul_(0.5)
        assert near(model(rows()), net(rows()))


def test_a_model_of_inference_tensors_is_prepared_with_tensors_that_count_updates() -> None:
    with torch.inference_mode():
        prepared = calibrated(Net().eval())
    assert not any(tensor.is_inference() for tensor in prepared.parameters())


def test_weights_that_cannot_be_quantized_are_logged(caplog) -> None:
    net = Net().eval()
    model = eager.convert(calibrated(net)).double()
    assert torch.equal(model(rows().double()), copy.deepcopy(net).double()(rows().double()))
    assert any("operators from layer run in float now: " in line for line in warnings_of(caplog))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 8)
        self.layer = nn.Linear(8, 8)
        self.layer.weight = self.unused.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_a_weight_with_two_names_is_noticed_under_the_second() -> None:
    net = Tied().eval()
    model = eager.convert(calibrated(net))
    halved(model)
    halved(net)
    assert near(model(rows()), net(rows()))
    assigned_parameter(model)
    assigned_parameter(net)
    assert near(model(rows()), net(rows()))


class Counting(nn.Module):
    """A layer and states that each call changes: in place, by an assignment, and by code that is not intercepted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(16, 8))
        self.register_buffer("unseen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.layer(x) + self.last
        self.last = 0.5 * y
        torch.autograd.graph.increment_version(self.unseen)
        return y


def test_state_that_the_model_changes_itself_is_no_new_weight(caplog) -> None:
    net = Counting().eval()
    prepared = eager.prepare(net, rows())
    for _ in range(4):
        prepared(rows())
    model = eager.convert(prepared)
    for _ in range(4):
        model(rows())
    assert model.calls == prepared.calls + 4
    prepared(rows())
    assert not [line for line in warnings_of(caplog) if "built again" in line]
    assert eager.coverage(model).macs == 1


class Rewriting(nn.Module):
    """Each call gives a layer another weight."""

    def __init__(self, assign: Callable[[nn.Linear, Tensor], None]) -> None:
        super().__init__()
        self.first, self.second, self.assign = nn.Linear(8, 8), nn.Linear(8, 8), assign

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.assign(self.second, y[:8] + 1)
        return self.second(y)


def new_parameter(layer: nn.Linear, weight: Tensor) -> None:
    layer.weight = nn.Parameter(weight)


def new_data(layer: nn.Linear, weight: Tensor) -> None:
    layer.weight.data = weight


@pytest.mark.parametrize("assign", [new_parameter, new_data])
def test_a_layer_whose_weight_each_call_changes_runs_in_float(assign: Callable[..., None]) -> None:
    torch.manual_seed(0)
    net = Rewriting(assign).eval()
    prepared = calibrated(net)
    for k in (1, 2, 3):
        prepared(k * rows())
    model = eager.convert(prepared)
    for k in (1, 2, 3):
        assert near(model(k * rows()), net(k * rows()))
