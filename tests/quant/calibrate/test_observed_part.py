"""Calibration runs only the part of a graph that observers read, and collects the same statistics."""

import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.quant.calibrate.float_run import LEAST_MACS, linear
from intaglio.quant.calibrate.observer import observed_part

X = [torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def prepared_model(last: dict[str, str]) -> stages.Prepared:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5)).eval()
    return stages.prepare(stages.capture(model, X[0]), stages.Quantizer(recipe=intaglio.Recipe.of({"4": last})))


def linear_layers(module: torch.fx.GraphModule) -> int:
    return sum(node.name.startswith("linear") and node.op == "call_function" for node in module.graph.nodes)


def test_layers_behind_the_last_observer_are_left_out():
    prepared = prepared_model({"activations": "token"})
    assert (linear_layers(observed_part(prepared.module)), linear_layers(prepared.module)) == (1, 3)


def test_its_statistics_are_those_of_the_whole_graph():
    prepared, other = (prepared_model({"activations": "token"}) for _ in range(2))
    found = stages.calibrate(prepared, X)
    for x in X:
        other(x)
    assert found.statistics.keys() == other.observers.keys()
    for name, observer in other.observers.items():
        assert str(found.statistics[name]) == str(observer.statistics)
    assert prepared.observer_state.batch == other.observer_state.batch == len(X)


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)


def test_a_model_that_changes_its_buffers_runs_as_a_whole():
    prepared = stages.prepare(stages.capture(Counting().eval(), X[0]))
    stages.calibrate(prepared, X)
    assert [value.item() for value in prepared.state] == [len(X)]


def test_a_graph_without_operators_behind_observers_has_no_smaller_part():
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    assert observed_part(torch.fx.GraphModule(nn.Module(), graph)) is None


def test_large_linear_layers_have_the_results_of_pytorch():
    make = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 32, 512, generator=make), torch.randn(96, 512, generator=make)
    assert x.numel() * len(weight) >= LEAST_MACS
    for operand in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        for bias in (None, torch.randn(96, generator=make)):
            expected = torch.nn.functional.linear(operand, weight, bias)
            torch.testing.assert_close(linear(operand, weight, bias), expected, atol=1e-4, rtol=1e-5)


def test_linear_layers_of_other_data_types_run_in_pytorch():
    x, weight = torch.randn(64, 512, dtype=torch.float64), torch.randn(256, 512, dtype=torch.float64)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
