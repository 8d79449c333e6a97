"""Reductions over the columns of images with adjacent channels, whose vectors hold channels, have the same bits."""

import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio import stages
from intaglio.native.cpu import isas
from support.nets import Body, randomize
from support.programs import assert_same_bits
from support.slow_params import slow_params


def body(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A function and sums over columns behind a convolution with float results."""
    x = nn.functional.silu(m.conv(x))
    gate = m.gate(x.mean((2, 3), keepdim=True))
    return m.head(x * torch.sigmoid(gate)).amax((2, 3)), x.mean(3), x.amin(3)


SIZES = [(32, 9), (20, 33), (8, 3)]
IN_TURN = [(*size, isas()[place % len(isas())]) for place, size in enumerate(SIZES)]


@pytest.mark.parametrize(
    ("channels", "width", "isa"),
    [
        *IN_TURN[:1],
        *slow_params(*IN_TURN[1:], reason="other sizes on other sets of instructions"),
        *slow_params(
            *((*size, isa) for size in SIZES for isa in isas() if (*size, isa) not in IN_TURN),
            reason="every size runs on one set of instructions, and sets run in turn",
        ),
    ],
)
def test_results_are_those_of_the_integer_graph(channels, width, isa):
    net = Body(body, conv=nn.Conv2d(3, channels, 3, padding=1), gate=nn.Conv2d(channels, channels, 1))
    net.head = nn.Conv2d(channels, 4, 1)
    model, images = randomize(net).eval(), torch.randn(3, 3, 7, width)
    recipe = intaglio.Recipe.of({"conv": {"operand_bytes": 2, "weight_bytes": 2}})
    prepared = stages.prepare(stages.capture(model, (images,)), stages.Quantizer(recipe))
    equalized = stages.equalize(prepared, [images])
    lowered = stages.requantize(stages.convert(equalized, stages.calibrate(equalized, [images], progress=False)))
    program = stages.compile(lowered, isa=isa)
    assert "reduce_vectors" in program.artifact.program.source
    for batch in (images, images[:1]):
        assert_same_bits(program(batch), lowered(batch))
