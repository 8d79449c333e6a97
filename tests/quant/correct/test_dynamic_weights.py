"""Data decides how weights of few bits are rounded also where activations have per-token scales."""

import pytest
import torch
from torch import nn

import intaglio

MIXING = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.02, 1, 128)[:, None]


def correlated(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(seed)) @ MIXING


@pytest.fixture(scope="module")
def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64)).eval()


def recipe(**settings: object) -> dict[str, dict[str, object]]:
    return {"*": {"activations": "token", "weights_dtype": "s4", "weights": "group:32", **settings}}


def noise(model: nn.Module, float_model: nn.Module) -> float:
    unseen = correlated(500, 99)
    return (model(unseen) - float_model(unseen)).square().sum().item()


@pytest.mark.slow(reason="quantizes a perceptron three times; data lowers the error of int8 weights below")
def test_data_lowers_the_error_of_4_bit_weights(perceptron):
    batches = [correlated(64, seed) for seed in range(8)]
    fitted = intaglio.quantize(perceptron, batches, recipe=recipe(), progress=False)
    nearest = intaglio.quantize(perceptron, batches, recipe=recipe(rounding="nearest"), progress=False)
    without = intaglio.quantize(perceptron, example_inputs=batches[0], recipe=recipe(), progress=False)
    assert "gptq: 2 weights" in fitted.text("corrections")
    assert noise(fitted, perceptron) < 0.6 * noise(nearest, perceptron)
    assert torch.equal(without(batches[1]), nearest(batches[1]))


def test_the_bits_do_not_depend_on_how_data_is_divided(perceptron):
    whole = intaglio.quantize(perceptron, [correlated(64, 1)], recipe=recipe(), progress=False)
    parts = intaglio.quantize(perceptron, list(correlated(64, 1).split(16)), recipe=recipe(), progress=False)
    unseen = correlated(5, 2)
    assert torch.equal(whole(unseen), parts(unseen))


def test_data_lowers_the_error_of_int8_weights_too(perceptron):
    batches = [correlated(64, seed) for seed in range(8)]
    eight = {"weights_dtype": "s8", "weights": "channel"}
    fitted, nearest = (
        intaglio.quantize(perceptron, batches, recipe=recipe(**eight, rounding=rounding), progress=False)
        for rounding in ("gptq", "nearest")
    )
    assert "gptq: 2 weights" in fitted.text("corrections")
    assert nearest.text("corrections") == "no corrections\n"
    errors = [accumulated_error(model, perceptron, batches) for model in (fitted, nearest)]
    assert errors[0] < 0.6 * errors[1]


def accumulated_error(model: nn.Module, float_model: nn.Module, batches: list[torch.Tensor]) -> float:
    """Error of the first layer with the int8 model's weight and operands in float: that of the weight alone."""
    name = next(op.inputs[1] for op in model.graph.ops if op.kind == "linear")
    scales = torch.tensor(model.graph.types[name].qparams.scales)
    weight = torch.from_numpy(model.graph.constants[name].astype("float32")) * scales[:, None]
    x = torch.cat(batches)
    return ((weight - float_model[0].weight) @ x.T).square().sum().item()


def test_biases_of_such_layers_stay_as_they_are():
    batches = [correlated(64, seed) for seed in range(4)]
    without_bias = nn.Sequential(nn.Linear(128, 64, bias=False)).eval()
    fitted = intaglio.quantize(without_bias, batches, recipe=recipe(bias="weights"), progress=False)
    assert "gptq: 1 weights" in fitted.text("corrections")


def test_values_that_are_not_finite_are_left_out(perceptron):
    batch = correlated(64, 1)
    batch[3, 5], batch[7] = float("nan"), float("inf")
    fitted = intaglio.quantize(perceptron, [batch, correlated(64, 2)], recipe=recipe(), progress=False)
    assert noise(fitted, perceptron) < float("inf")
