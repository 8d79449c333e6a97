"""A small network of four linear layers, and which of them a model computes in float."""

import re

import torch
from torch import Tensor, nn

import intaglio
from support import nets
from support.nets import Body

LAYERS = ("a", "b", "c", "d")
WIDTH = 64
"""Wide enough for the sizes of files to depend on weights more than on their descriptions."""
LAYERED_INPUT = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))


def layered_network() -> nn.Module:
    """Four linear layers with a function between."""

    def body(m: nn.Module, x: Tensor) -> Tensor:
        for name in LAYERS:
            x = torch.tanh(getattr(m, name)(x))
        return x

    return nets.randomize(Body(body, **{name: nn.Linear(WIDTH, WIDTH) for name in LAYERS}))


def layers_in_float(model: object) -> set[str]:
    """Layers that a model computes in float; all of them, of the float model."""
    if not isinstance(model, intaglio.QuantizedModel):
        return set(LAYERS)
    return set(re.findall(r"skipped (\w) \(aten\.linear", model.text("sites")))
