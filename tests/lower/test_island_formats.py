"""Float islands give the same bits in the program and in the interpreter: strides of operands, and zero points."""

import pytest
import torch
from torch import nn

import intaglio
from intaglio import Recipe, stages
from intaglio.ir import DType
from intaglio.lower import Lowered
from intaglio.patterns import builtin
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.datatypes import DATATYPES, Datatype
from intaglio.runtime import QuantizedModel
from support.nets import Body, randomize
from support.slow_params import slow_params_except

X = torch.randn(8, 3, 33, 33, generator=torch.Generator().manual_seed(0))
FORMATS = {
    "contiguous": X,
    "channels last": X.to(memory_format=torch.channels_last),
    "strided": X.repeat_interleave(2, 3)[..., ::2].transpose(2, 3),
}
ISLANDS = {
    "the variance of a result": (lambda m, x: torch.var(m.c(x), (1, 3)), {"patterns": builtin("conv2d")}),
    "a function and the mean": (lambda m, x: torch.erf(m.c(x)).mean((2, 3)), {"patterns": builtin("conv2d")}),
    "a statistic of the input": (lambda m, x: m.c(x) * torch.var(x, (1, 3), keepdim=True).mean(2, keepdim=True), {}),
    "one island after another": (lambda m, x: torch.logcumsumexp(m.c(torch.erf(x).flip(3)), 1).sum((2, 3)), {}),
}


@pytest.mark.parametrize(
    "name",
    slow_params_except(
        "a statistic of the input",
        "the variance of a result",
        of=ISLANDS,
        reason="another island with the same borders",
    ),
)
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


@pytest.mark.slow(reason="quantizes for a data type without kernels")
def test_zero_points_of_a_datatype_without_kernels_are_kept(monkeypatch):
    affine = Datatype("s8a", (Role.ACTIVATION,), DType.S8, -128, 127, zero_point=True, native=False)
    monkeypatch.setitem(DATATYPES, "s8a", affine)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    model = randomize(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    prepared = stages.prepare(
        stages.capture(model, x), stages.Quantizer(Recipe.of({"*": {"activations_dtype": "s8a"}}))
    )
    reference = stages.convert(prepared, stages.calibrate(prepared, [x]))
    assert any(zero for q in reference.qparams.values() for zero in q.zeros)
    lowered = stages.requantize(reference)
    torch.testing.assert_close(lowered(x), reference(x))
    assert torch.equal(stages.compile(lowered)(x), lowered(x))


class KeptIds(nn.Module):
    """Ids whose number depends on values: both islands select them, from sorted ids that the first island has."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x, ids):
        kept = ids.sort().values.masked_select(ids > 3)
        y = self.a(x * kept.sum())
        return y, torch.searchsorted(y.flatten().sort().values, kept.float()).sum()


@pytest.mark.slow(reason="another model with islands; their results are compared above")
def test_islands_compute_again_what_only_values_of_unknown_size_read():
    model = randomize(KeptIds())
    batch = torch.rand(4, 6), torch.tensor([7, 1, 5, 3, 9])
    found = intaglio.quantize(model, [batch], progress=False)
    assert found.coverage.islands == 2
    y, place = found(*batch)
    assert place == torch.searchsorted(y.flatten().sort().values, torch.tensor([1.0, 5.0, 9.0])).sum()
