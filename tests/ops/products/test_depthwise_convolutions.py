"""Depthwise convolutions of many geometries, with every way in which their results leave the kernel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from intaglio import stages
from support.int8_models import assert_program_matches
from support.lowering import ROUNDED, assert_equal_quantized, quantized
from support.matmul_library import RUNNABLE_ISAS
from support.nets import randomize

GEOMETRIES = [
    # channels, height and width, taps, stride, padding, dilation
    (16, (5, 1), (3, 3), 1, 1, 1),
    (24, (6, 7), (3, 3), 1, 1, 1),
    (37, (4, 6), (3, 3), 1, (1, 0), 1),
    (40, (9, 8), (3, 3), 2, 1, 1),
    (9, (7, 9), (3, 3), (1, 2), 1, (2, 1)),
    (17, (8, 5), (3, 3), 1, 2, (1, 2)),
    (31, (7, 6), (5, 5), 1, 2, 1),
    (72, (11, 12), (5, 5), 2, 2, 1),
    (20, (6, 9), (2, 5), 1, (1, 2), 1),
    (8, (1, 33), (1, 3), 1, (0, 1), 1),
    (12, (9, 7), (7, 3), (2, 1), (3, 1), 1),
    (21, (9, 9), (7, 7), 1, 3, 1),
    (10, (9, 8), (3, 4), (1, 3), 1, 1),
    (66, (4, 130), (3, 3), 1, 1, 1),
]
TAILS = (F.relu, F.hardswish, F.gelu)
"""Behind a requantization, a table or an activation function, and a loop over floats."""


class Depthwise(nn.Module):
    """A convolution of every geometry with each tail, and with a residual sum where the size stays the same."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, channels, taps, stride, padding, dilation, groups=channels)
            for channels, _, taps, stride, padding, dilation in GEOMETRIES
        )

    def forward(self, *images: Tensor) -> list[Tensor]:
        found = []
        for conv, x in zip(self.convs, images, strict=True):
            y = conv(x)
            found += [tail(y + shift) for shift, tail in enumerate(TAILS)]
            if y.shape == x.shape:
                found.append(F.relu(conv(F.relu(y)) + x))
        return found


def drawn(seed: int, batch: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, channels, *size, generator=generator) for channels, size, *_ in GEOMETRIES]


@pytest.fixture(scope="module")
def graphs():
    return quantized(randomize(Depthwise()), *drawn(0, 2), recipe=ROUNDED)


def test_results_are_those_of_the_reference(graphs):
    assert_equal_quantized(*graphs, *drawn(1, 2))


@pytest.fixture(scope="module")
def programs(graphs):
    return {isa: stages.compile(graphs[1], isa=isa) for isa in RUNNABLE_ISAS}


@given(batch=st.integers(1, 3), seed=st.integers(0, 99), threads=st.integers(1, 4), isa=st.sampled_from(RUNNABLE_ISAS))
def test_programs_match_the_interpreter(graphs, programs, batch, seed, threads, isa):
    assert_program_matches(programs[isa], graphs[1], drawn(seed, batch), threads)
