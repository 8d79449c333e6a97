"""Depthwise convolutions that no microkernel computes: any size, with the bits of the integer interpreter."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from intaglio import stages
from intaglio.lower import Lowered
from intaglio.quant.recipes.recipe import Recipe
from support.int8_models import assert_same
from support.lowering import quantized
from support.matmul_library import RUNNABLE_ISAS
from support.nets import Body, randomize

SIZES = [
    # channels, kernel, stride, dilation
    (3, (1, 1), 1, 1),
    (16, (3, 3), 1, 2),
    (17, (3, 3), 2, 2),
    (31, (2, 5), (1, 2), 3),
    (40, (5, 1), 1, (2, 1)),
    (33, (8, 8), 1, 2),
    (18, (9, 8), 1, (1, 2)),  # more than 64 taps
]
TAILS = (F.relu, F.silu, torch.sigmoid, lambda x: x, lambda x: x.clamp(-0.25, 0.5))


def body(m: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the results of all layers with all tails."""
    sliced = [x[:, : layer.in_channels] for layer in m.layers]
    return [tail(layer(part)) for layer, part in zip(m.layers, sliced, strict=True) for tail in TAILS]


def images(batch: int, height: int, width: int, seed: int) -> Tensor:
    return torch.randn(batch, 40, height, width, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def layers() -> Lowered:
    made = [
        nn.Conv2d(count, count, kernel, stride, padding=4, dilation=dilation, groups=count)
        for count, kernel, stride, dilation in SIZES
    ]
    model = randomize(Body(body, layers=nn.ModuleList(made)))
    recipe = Recipe.of({"*": {"results": "int8"}})
    return quantized(model, images(2, 19, 17, 0), recipe=recipe)[1]


@pytest.fixture(scope="module")
def programs(layers) -> dict[str, nn.Module]:
    return {isa: stages.compile(layers, isa=isa) for isa in RUNNABLE_ISAS}


@given(isa=st.sampled_from(RUNNABLE_ISAS), batch=st.integers(1, 3), seed=st.integers(0, 1 << 20))
def test_every_size_gives_the_bits_of_the_interpreter(layers, programs, isa, batch, seed):
    x = images(batch, 19, 17, seed) * 2
    assert_same(programs[isa](x), layers(x))
