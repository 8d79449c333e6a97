"""Define-by-run on modules with hooks, computed weights and stored activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import intaglio
from intaglio import eager, stages
from support.eager_models import assert_near, converted_on
from support.lowering import sqnr
from support.slow_params import slow_params

CALLS = [(torch.randn(32, 16, generator=torch.Generator().manual_seed(seed)),) for seed in range(3)]


def net(first: nn.Module | None = None) -> nn.Sequential:
    """Return layers at two depths."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(first or nn.Linear(16, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 4))).eval()


def double(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output * 2


def double_with_keywords(module: nn.Module, inputs: tuple[Tensor, ...], keywords: dict, output: Tensor) -> Tensor:
    return output * 2


def shift(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (inputs[0] + 1,)


HOOKS = {
    "leaf": lambda model: model[0].register_forward_hook(double),
    "leaf with keywords": lambda model: model[0].register_forward_hook(double_with_keywords, with_kwargs=True),
    "before a leaf": lambda model: model[1][1].register_forward_pre_hook(shift),
    "container": lambda model: model[1].register_forward_hook(double),
    "model": lambda model: model.register_forward_hook(double),
    "before the model": lambda model: model.register_forward_pre_hook(shift),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=list(HOOKS))
def test_a_hook_is_applied_once(register):
    model = net()
    register(model)
    assert_near(converted_on(model, CALLS), model, CALLS)


def only_layers(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that does nothing for modules without a weight."""
    return lambda module, *arguments: hook(module, *arguments) if hasattr(module, "weight") else None


HOOKS_OF_ALL = {
    "layers": lambda: register_module_forward_hook(only_layers(double)),
    "layers, always": lambda: register_module_forward_hook(only_layers(double), always_call=True),
    "layers with keywords": lambda: register_module_forward_hook(only_layers(double_with_keywords), with_kwargs=True),
    "before layers": lambda: register_module_forward_pre_hook(only_layers(shift)),
    "every module": lambda: register_module_forward_hook(double),
}


@pytest.mark.parametrize(
    ("register", "nested"),
    [
        ("layers", False),
        ("before layers", False),
        ("every module", True),
        *slow_params(
            *((name, False) for name in HOOKS_OF_ALL if name not in ("layers", "before layers")),
            reason="hooks with other settings, and of modules that every module contains",
        ),
        *slow_params(
            *((name, True) for name in HOOKS_OF_ALL if name != "every module"),
            reason="layers in modules of modules, which a hook of every module sees as well",
        ),
    ],
)
def test_a_hook_of_all_modules_is_applied_once(register, nested):
    float_model = net(nn.Sequential(nn.Linear(16, 16), nn.Dropout())) if nested else net()
    handle = HOOKS_OF_ALL[register]()
    try:
        assert_near(converted_on(float_model, CALLS), float_model, CALLS)
    finally:
        handle.remove()


def test_a_hook_of_all_modules_sees_the_modules_of_the_model_only():
    model, seen = net(), []
    handle = register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        prepared = eager.prepare(model, *CALLS[0])
        prepared(*CALLS[0])
        converted = eager.convert(prepared)
        converted(*CALLS[0])
        captured = stages.capture(model, *CALLS[0])
        captured(*CALLS[0])
        stages.convert(stages.prepare(captured), stages.calibrate(stages.prepare(captured), [CALLS[0]]))(*CALLS[0])
    finally:
        handle.remove()
    assert set(seen) == {nn.Linear, nn.ReLU, nn.Sequential}


@pytest.mark.slow(reason="a layer of a transformer with two hooks; hooks of leaves are applied above")
def test_hooks_inside_a_module_that_is_one_operator_are_applied():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    layer.linear1.register_forward_hook(double)
    layer.norm2.register_forward_pre_hook(shift)
    assert_near(converted_on(net(layer), CALLS), net(layer), CALLS)


def test_a_hook_runs_once_per_call():
    model, count = net(), []
    model[0].register_forward_hook(lambda *_: count.append(1))
    prepared = eager.prepare(model, *CALLS[0])
    assert len(count) == 1  # the example
    prepared(*CALLS[0])
    converted = eager.convert(prepared)
    assert len(count) == 2
    converted(*CALLS[1])
    assert len(count) == 3


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "wrapped",
    [
        *slow_params(spectral_norm, reason="weights that another function computes"),
        weight_norm,
        *slow_params(parametrizations.spectral_norm, reason="weights that another function computes"),
        parametrizations.weight_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    ],
    ids=["spectral_norm", "weight_norm", "parametrized spectral_norm", "parametrized weight_norm", "pruned"],
)
def test_weights_that_a_hook_or_a_parametrization_computes(wrapped):
    model = net(wrapped(nn.Linear(16, 16)))
    assert_near(converted_on(model, CALLS), model, CALLS)


class Remembering(nn.Module):
    """A model that keeps an activation, as those that show attention maps do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = net(), []

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        self.last = [y]
        return y


@pytest.mark.parametrize("quantize", [intaglio.quantize, lambda model, data: converted_on(model, CALLS)])
def test_an_activation_with_gradients_that_the_model_keeps(quantize):
    model = Remembering().eval()
    model(*CALLS[0])
    assert model.last[0].grad_fn is not None
    quantized = quantize(model, [CALLS[0][0]])
    assert sqnr(quantized(*CALLS[1]), model(*CALLS[1]).detach()) > 20
    assert model.last[0].grad_fn is not None
