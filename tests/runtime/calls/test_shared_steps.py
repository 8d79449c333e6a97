"""Steps whose work threads take over from each other: one and two threads give the same bits."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import intaglio
from support.matmul_library import BEST_ISA_PARAMS

CALLS = 12
"""Calls of each model, in which threads take over other pieces."""


class Block(nn.Module):
    """Attention and an MLP over enough tokens that their steps have several pieces for each of two threads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(256), nn.Linear(256, 768), nn.Linear(256, 256)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 64)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Picture(nn.Module):
    """Convolutions with residual operands, taps and few pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 200, 1)
        self.third = nn.Conv2d(200, 512, 3, stride=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(F.relu(x + self.first(x))))


class Mobile(nn.Module):
    """Depthwise convolutions, and one whose input channels are scaled, as after squeeze-and-excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.depthwise = nn.Conv2d(16, 96, 1), nn.Conv2d(96, 96, 3, padding=1, groups=96)
        self.dilated = nn.Conv2d(96, 96, (3, 9), padding=(2, 8), dilation=2, groups=96)
        self.scale, self.down, self.last = nn.Conv2d(96, 96, 1), nn.Conv2d(96, 32, 1), nn.Conv2d(32, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.dilated(F.relu(self.depthwise(self.up(x)))))
        return self.last(self.down(x * torch.sigmoid(self.scale(x.mean((2, 3), keepdim=True)))))


class Product(nn.Module):
    """A product of two activations, and a layer that computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(64, 512), nn.Linear(64, 512), nn.Linear(250, 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = (layer(x).unflatten(-1, (8, 64)).transpose(1, 2) for layer in (self.a, self.b))
        return self.last(a @ b.transpose(2, 3))


CASES = {
    "picture": (Picture, (1, 64, 56, 56), None),
    "batch": (Picture, (13, 64, 56, 56), None),
    "mobile": (Mobile, (1, 16, 112, 112), None),
    "product": (Product, (2, 250, 64), {"last": {"activations": "float"}}),
    "w4a8": (Block, (2, 250, 256), "w4a8"),
    "w8a8_dynamic": (Block, (2, 250, 256), "w8a8_dynamic"),
}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="programs use at most one thread for each core")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
@pytest.mark.parametrize("case", CASES)
def test_two_threads_give_the_bits_of_one(isa, case):
    torch.manual_seed(0)
    model, shape, recipe = CASES[case]
    inputs, options = [torch.randn(shape), torch.randn(shape)], intaglio.CompileOptions(isa=isa)
    quick = intaglio.quantize(model().eval(), inputs, recipe=recipe, options=options, progress=False)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = [quick(x) for x in inputs]
        torch.set_num_threads(2)
        for call in range(CALLS):  # the memory holds results of the other input
            assert torch.equal(quick(inputs[call % 2]), expected[call % 2])
    finally:
        torch.set_num_threads(threads)
