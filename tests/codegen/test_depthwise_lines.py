"""Depthwise convolutions of any size, in microkernels and in loops, with the bits of the integer interpreter."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from intaglio import stages
from intaglio.kernels import ISAS
from intaglio.lower import Lowered
from intaglio.plan.kernel_records import DepthwiseKernel
from intaglio.plan.plan_records import CacheSizes
from intaglio.plan.planning import plan_graph
from intaglio.plan.scheduling.target_passes import schedule_plan
from intaglio.quant.recipes.recipe import Recipe
from support.int8_models import assert_same
from support.lowering import quantized
from support.matmul_library import RUNNABLE_ISAS
from support.nets import Body, randomize
from support.slow_params import slow_params

SIZES = [
    # channels, kernel, stride, dilation
    (3, (1, 1), 1, 1),
    (16, (3, 3), 1, 2),
    (17, (3, 3), 2, 2),
    (31, (2, 5), (1, 2), 3),
    (40, (5, 1), 1, (2, 1)),
    (33, (8, 8), 1, 2),
    (18, (9, 8), 1, (1, 2)),  # more than 64 taps
    # input columns that are read once without microkernels
    (24, (3, 3), 1, 1),
    (37, (5, 5), 1, 1),
    (40, (3, 3), 2, 1),
    (20, (5, 5), 2, 1),
    (9, (3, 3), (1, 2), (2, 1)),
    (31, (2, 5), 1, 1),
    (12, (7, 3), (2, 1), 1),
]
TAILS = (F.relu, F.silu, torch.sigmoid, lambda x: x, lambda x: x.clamp(-0.25, 0.5))


def body(m: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the results of all layers, each with its tails."""
    layers = [(layer, x[:, : layer.in_channels], tails) for layer, tails in zip(m.layers, m.tails, strict=True)]
    return [TAILS[tail](layer(part)) for layer, part, tails in layers for tail in tails]


def images(batch: int, height: int, width: int, seed: int) -> Tensor:
    return torch.randn(batch, 40, height, width, generator=torch.Generator().manual_seed(seed))


ONE_TAIL = tuple((place % len(TAILS),) for place in range(len(SIZES)))
ALL_TAILS = (tuple(range(len(TAILS))),) * len(SIZES)


@pytest.fixture(
    scope="module",
    params=[ONE_TAIL, *slow_params((ALL_TAILS,), reason="every size runs with a tail, and every tail with sizes")],
    ids=["one tail", "all tails"],
)
def layers(request) -> Lowered:
    made = [
        nn.Conv2d(count, count, kernel, stride, padding=4, dilation=dilation, groups=count)
        for count, kernel, stride, dilation in SIZES
    ]
    model = randomize(Body(body, layers=nn.ModuleList(made), tails=request.param))
    recipe = Recipe.of({"*": {"results": "int8"}})
    return quantized(model, images(2, 19, 17, 0), recipe=recipe)[1]


@pytest.fixture(scope="module")
def programs(layers) -> dict[str, nn.Module]:
    return {isa: stages.compile(layers, isa=isa) for isa in RUNNABLE_ISAS}


@pytest.mark.slow(reason="a program of every size for each set of instructions; test_program.py has depthwise layers")
@given(isa=st.sampled_from(RUNNABLE_ISAS), batch=st.integers(1, 3), seed=st.integers(0, 1 << 20))
def test_every_size_gives_the_bits_of_the_interpreter(layers, programs, isa, batch, seed):
    x = images(batch, 19, 17, seed) * 2
    assert_same(programs[isa](x), layers(x))


class Narrow(nn.Module):
    """Layers with 8, 16 or 32 channels, whose pixels can share a vector, and one that writes a part of its pixels."""

    def __init__(self, channels: int, kernel: tuple[int, int], stride: int, tail: int) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2)
        self.first = nn.Conv2d(3, channels, 1)
        self.layer = nn.Conv2d(channels, channels, kernel, (stride, 1), padding=padding, groups=channels)
        self.joined = nn.Conv2d(channels, channels, kernel, (stride, 1), padding=padding, groups=channels)
        self.last = nn.Conv2d(2 * channels, 4, 1)
        self.tail = TAILS[tail]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        alone = self.tail(self.layer(x))
        return self.last(torch.cat([self.tail(self.joined(x)), alone + 1], 1)) + alone.mean()


@pytest.mark.parametrize(
    "width",
    [
        *slow_params(12, 17, reason="draws models and compiles each; test_program.py has depthwise layers"),
        *slow_params(16, reason="pixels fill vectors there as in lines of 12"),
    ],
)
@given(data=st.data())
@settings(max_examples=settings.default.max_examples // 10)
def test_pixels_of_few_channels_have_the_bits_of_the_interpreter(width, data):
    channels = data.draw(st.sampled_from([8, 16, 32]))
    kernel = data.draw(st.sampled_from([(3, 3), (5, 5), (1, 3), (3, 1), (7, 7)]))
    model = randomize(Narrow(channels, kernel, data.draw(st.integers(1, 2)), data.draw(st.integers(0, 4))))
    height, seed = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 1 << 20))
    draw = torch.Generator().manual_seed(seed)
    lowered = quantized(model, torch.randn(2, 3, height, width, generator=draw))[1]
    x = torch.randn(data.draw(st.integers(1, 3)), 3, height, width, generator=draw) * 2
    for isa in RUNNABLE_ISAS:
        assert_same(stages.compile(lowered, isa=isa)(x), lowered(x))


def test_pixels_share_a_vector_where_they_fill_it():
    def joined(channels: int, width: int) -> list[int]:
        model = randomize(Narrow(channels, (3, 3), 1, 0))
        lowered = quantized(model, torch.randn(2, 3, 6, width))[1]
        plan = schedule_plan(plan_graph(lowered.graph), ISAS["avx512vnni"], CacheSizes())
        kernels = [kernel for found in plan.kernels.values() for kernel in found if isinstance(kernel, DepthwiseKernel)]
        return sorted(kernel.joined for kernel in kernels)

    assert joined(32, 16) == [1, 2]  # a part of the channels of the concatenation, and a whole image
    assert max(joined(16, 12)) == 4
    assert max(joined(16, 10)) == 1
    assert max(joined(24, 12)) == 1
