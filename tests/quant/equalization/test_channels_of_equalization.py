"""Equalization divides the channels that readers multiply, on any axis, and leaves the float function as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import intaglio
from intaglio import stages
from support.lowering import sqnr
from support.nets import Body
from support.slow_params import slow_params, slow_params_except

SIZE = 8
"""Every axis has this size, so that factors fit wrong axes, too."""


def uneven(module: nn.Module) -> nn.Module:
    """Return a layer whose outputs differ a hundredfold."""
    with torch.no_grad():
        module.weight.mul_(torch.logspace(-1, 1, SIZE).reshape(-1, *[1] * (module.weight.dim() - 1)))
    return module


def net(forward: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = {"conv": nn.Conv2d(SIZE, SIZE, 1), "linear": nn.Linear(SIZE, SIZE), "norm": nn.LayerNorm(SIZE)}
        others = {"conv2": nn.Conv2d(SIZE, SIZE, 1), "linear2": nn.Linear(SIZE, SIZE)}
        return Body(forward, **{name: uneven(layer) for name, layer in layers.items()}, **others).eval()


IMAGE, TOKENS, VECTORS = (8, SIZE, SIZE, SIZE), (8, SIZE, SIZE), (8, SIZE)
READERS: dict[str, tuple[tuple[int, ...], Callable[[nn.Module, Tensor], Tensor], bool]] = {
    "a linear layer reads rows of an image": (IMAGE, lambda m, x: m.linear2(F.relu(m.conv(x))), False),
    "a linear layer reads channels of an image": (
        IMAGE,
        lambda m, x: m.linear2(F.relu(m.conv(x)).permute(0, 2, 3, 1)),
        False,
    ),
    "a linear layer reads a pooled image": (
        IMAGE,
        lambda m, x: m.linear2(F.adaptive_avg_pool2d(F.relu(m.conv(x)), 1).flatten(1)),
        True,
    ),
    "a convolution reads an image": (IMAGE, lambda m, x: m.conv2(F.relu(m.conv(x))), True),
    "a convolution reads rows of a linear layer": (IMAGE, lambda m, x: m.conv2(F.relu(m.linear(x))), False),
    "a linear layer reads rows of a linear layer": (IMAGE, lambda m, x: m.linear2(F.relu(m.linear(x))), True),
    "a linear layer reads tokens": (TOKENS, lambda m, x: m.linear2(F.relu(m.linear(x))), True),
    "a linear layer reads positions of tokens": (
        TOKENS,
        lambda m, x: m.linear2(F.relu(m.linear(x)).transpose(1, 2)),
        False,
    ),
    "a linear layer reads vectors": (VECTORS, lambda m, x: m.linear2(F.relu(m.linear(x))), True),
    "a sum reads vectors": (VECTORS, lambda m, x: m.linear2(m.linear2(x) + F.relu(m.linear(x))), False),
    "a sum of an image reads rows": (
        VECTORS,
        lambda m, x: m.conv2(m.conv(x[:, :, None, None].expand(8, SIZE, SIZE, SIZE)) + F.relu(m.linear(x))),
        False,
    ),
}


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    slow_params_except(
        "a linear layer reads vectors",
        "a sum reads vectors",
        "a convolution reads rows of a linear layer",
        "a linear layer reads positions of tokens",
        of=READERS,
        reason="other layers that read the same sizes",
    ),
)
def test_the_float_function_stays_where_sizes_are_equal(name):
    shape, forward, equalizes = READERS[name]
    model, x = net(forward), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    prepared = stages.prepare(stages.capture(model, x))
    draw = torch.Generator().manual_seed(2)
    equalized = stages.equalize(prepared, [torch.randn(shape, generator=draw) for _ in range(128)], samples=1024)
    torch.testing.assert_close(equalized(x), model(x), rtol=1e-4, atol=1e-4 * float(model(x).abs().max()))
    if equalizes:
        assert "equalize: 1 values" in equalized.model_info.texts["corrections"]


@torch.no_grad()
@pytest.mark.parametrize(
    "recipe", [*slow_params("convolutional", reason="both recipes equalize with the same factors"), "transformer"]
)
def test_an_outlier_channel_of_tokens_is_equalized(recipe):
    """One channel of a feed-forward layer that is 200 times the others took all of the 256 quantized values."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
        x = torch.randn(64, 8, 32)
    model[0].weight[5] *= 200
    model[0].bias[5] *= 200
    model[2].weight[:, 5] /= 200
    quantized = intaglio.quantize(model, [x], recipe=recipe, progress=False)
    assert sqnr(quantized(x), model(x)) > 30


@pytest.mark.slow(reason="quantizes a model for one reshape")
def test_reshapes_of_a_fixed_batch_are_equalized_like_others():
    layers = {"linear": uneven(nn.Linear(SIZE, SIZE)), "linear2": nn.Linear(4, SIZE)}
    model = Body(lambda m, x: m.linear2(F.relu(m.linear(x)).view(8, 2, 4)), **layers).eval()
    x = torch.randn(VECTORS, generator=torch.Generator().manual_seed(1))
    quantized = intaglio.quantize(model, [x, x + 1], progress=False)
    assert quantized(x).shape == (8, 2, SIZE)
    assert sqnr(quantized(x), model(x)) > 30


@pytest.mark.slow(reason="quantizes a model for an empty slice")
def test_a_slice_without_elements_is_no_part_of_channels():
    model = Body(lambda m, x: (m.linear(x)[:, :0], m.linear(x)), linear=nn.Linear(SIZE, SIZE)).eval()
    x = torch.randn(VECTORS)
    empty, full = intaglio.quantize(model, [x], progress=False)(x)
    assert empty.shape == (8, 0)
    assert sqnr(full, model(x)[1]) > 30
