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


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="programs use at most one thread for each core")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
@pytest.mark.parametrize("recipe", ["w4a8", "w8a8_dynamic", None])
def test_two_threads_give_the_bits_of_one(isa, recipe):
    torch.manual_seed(0)
    model, x = (Picture(), torch.randn(1, 64, 56, 56)) if recipe is None else (Block(), torch.randn(2, 250, 256))
    quick = intaglio.quantize(
        model.eval(), [x], recipe=recipe, options=intaglio.CompileOptions(isa=isa), progress=False
    )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = quick(x)
        torch.set_num_threads(2)
        for _ in range(CALLS):
            assert torch.equal(quick(x), expected)
    finally:
        torch.set_num_threads(threads)
