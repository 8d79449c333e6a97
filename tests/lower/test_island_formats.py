"""Float islands get operands of the same memory format from the program and from the interpreter, so the same bits."""

import pytest
import torch
from torch import nn

from intaglio import stages
from intaglio.lower import Lowered
from intaglio.patterns import builtin
from intaglio.runtime import QuantizedModel
from support.nets import Body, randomize

X = torch.randn(8, 3, 33, 33, generator=torch.Generator().manual_seed(0))
FORMATS = {
    "contiguous": X,
    "channels last": X.to(memory_format=torch.channels_last),
    "strided": X.repeat_interleave(2, 3)[..., ::2].transpose(2, 3),
}
ISLANDS = {
    "the variance of a result": (lambda m, x: torch.var(m.c(x), (2, 3)), {"patterns": builtin("conv2d")}),
    "a function and the mean": (lambda m, x: torch.erf(m.c(x)).mean((2, 3)), {"patterns": builtin("conv2d")}),
    "a statistic of the input": (lambda m, x: m.c(x) * torch.var(x, (2, 3), keepdim=True).mean(1, keepdim=True), {}),
    "one island after another": (lambda m, x: torch.logcumsumexp(m.c(torch.erf(x).flip(3)), 1).sum((2, 3)), {}),
}


@pytest.mark.parametrize("name", ISLANDS)
def test_program_and_interpreter_have_the_same_bits_behind_islands(name):
    body, options = ISLANDS[name]
    model = randomize(Body(body, c=nn.Conv2d(3, 8, 3, padding=1)))
    program, lowered = _compiled(model, **options)
    assert program.coverage.islands
    for x in FORMATS.values():
        assert torch.equal(program(x), lowered(x))


def _compiled(model: nn.Module, **options: object) -> tuple[QuantizedModel, Lowered]:
    prepared = stages.prepare(stages.capture(model, X), stages.Quantizer(**options))
    lowered = stages.requantize(stages.convert(prepared, stages.calibrate(prepared, [X])))
    return stages.compile(lowered), lowered
