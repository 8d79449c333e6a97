"""Small models on their way to int8, compiled once, each with the integer graph its results must equal."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from intaglio import stages
from intaglio.lower import Lowered
from intaglio.runtime import QuantizedModel
from support import nets
from support.lowering import quantized, tensors
from support.nets import Body
from support.programs import threads


@cache
def compiled(net: Callable[[], nn.Module]) -> tuple[QuantizedModel, Lowered]:
    model = nets.randomize(net())
    lowered = quantized(model, nets.example(model, 4))[1]
    return stages.compile(lowered), lowered


def built(body: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[QuantizedModel, Lowered]:
    """A model around one convolution ``m.c`` of 3 channels."""
    model = nets.randomize(Body(body, c=nn.Conv2d(3, 3, 3, padding=1)))
    lowered = quantized(model, *args, **kwargs)[1]
    return stages.compile(lowered), lowered


def picture(batch: int = 4, seed: int = 0, size: int = 12) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(tensors(found), tensors(expected), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def assert_program_matches(program: nn.Module, graph: Lowered, inputs: list[Tensor], count: int) -> None:
    with threads(count):
        assert_same(program(*inputs), graph(*inputs))
