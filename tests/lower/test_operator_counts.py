"""Operators in reports are those of the model: each counts once, and casts that capture adds do not count."""

import torch
from torch import Tensor, nn

from intaglio import stages
from intaglio.patterns import builtin
from intaglio.runtime import Coverage
from support.lowering import quantized
from support.nets import Body, randomize


def pooled(m: Body, x: Tensor) -> Tensor:
    return m.l(m.c(x).mean((2, 3)))


def model() -> nn.Module:
    return randomize(Body(pooled, c=nn.Conv2d(3, 8, 3), l=nn.Linear(8, 4)))


IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
MEAN_IN_FLOAT = stages.Quantizer(patterns=[*builtin("conv2d"), *builtin("dense")])


def coverage_of(net: nn.Module, x: Tensor, quantizer: stages.Quantizer | None = None) -> Coverage:
    prepared = stages.prepare(stages.capture(net, x), quantizer)
    return stages.compile(stages.requantize(stages.convert(prepared, stages.calibrate(prepared, [x])))).coverage


def test_a_mean_that_capture_expresses_by_two_operators_counts_once_in_int8():
    found = coverage_of(model(), IMAGES)
    assert (found.operators_int8, found.operators_total) == (3, 3)


def test_a_mean_in_float_counts_once():
    found = coverage_of(model(), IMAGES, MEAN_IN_FLOAT)
    assert (found.operators_int8, found.operators_total) == (2, 3)
    assert [part.operator for part in (*found.floats, *found.loops)] == ["aten.mean.dim"]


def test_casts_that_the_program_computes_are_no_operators():
    found = coverage_of(model().bfloat16(), IMAGES.bfloat16())
    assert (found.operators_int8, found.operators_total) == (3, 3)


def test_casts_to_and_from_float16_are_islands_and_no_part_of_the_layers_beside_them():
    found = coverage_of(model().half(), IMAGES.half())
    assert (found.operators_int8, found.islands, len(found.floats)) == (3, 2, 2)


def test_equal_operators_of_one_line_count_each():
    lowered = quantized(Body(lambda m, x: torch.erf(torch.erf(m.c(x))), c=nn.Conv2d(3, 3, 1)), IMAGES)[1]
    assert [skip.origin.operator for skip in lowered.skipped] == 2 * ["aten.erf.default"]
