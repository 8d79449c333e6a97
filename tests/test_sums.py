"""Sums whose second operand has a factor for every channel: annotation, the law, every kernel."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import intaglio
from compare import assert_equal_levels, quantized, tensors
from harness import HERE
from intaglio import numerics
from intaglio.quant import Recipe, Setting
from nets import Body, randomize


def image(channels: int = 20, batch: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(batch, channels, 9, 7, generator=torch.Generator().manual_seed(seed))


def ratio(*shape: int) -> nn.Parameter:
    """`randomize` draws it: both signs, some next to nothing."""
    return nn.Parameter(torch.ones(shape))


def conv(inputs: int = 20, outputs: int = 20, **rest) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **rest)


def pooled(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 1, 1)


PER_TENSOR = Recipe.of({}, Setting(weights="tensor"))
SCALED = {
    "conv": (image(), lambda m, x: torch.addcmul(m.c(x), x, m.r), {"c": conv(), "r": ratio(1, 20, 1, 1)}),
    "conv, relu6": (image(), lambda m, x: F.relu6(torch.addcmul(m.c(x), x, m.r)), {"c": conv(), "r": ratio(20, 1, 1)}),
    "of the conv": (image(), lambda m, x: torch.addcmul(x, m.c(x), m.r).relu(), {"c": conv(), "r": ratio(20, 1, 1)}),
    "wide": (
        image(130), lambda m, x: torch.addcmul(m.c(x), x, m.r).relu(), {"c": conv(130, 130), "r": ratio(1, 130, 1, 1)},
    ),
    "groups": (image(), lambda m, x: torch.addcmul(m.c(x), x, m.r), {"c": conv(groups=4), "r": ratio(1, 20, 1, 1)}),
    "depthwise": (image(), lambda m, x: torch.addcmul(m.c(x), x, m.r), {"c": conv(groups=20), "r": ratio(20, 1, 1)}),
    "transposed": (
        image(), lambda m, x: torch.addcmul(m.c(x), x, m.r).relu(),
        {"c": nn.ConvTranspose2d(20, 20, 3, padding=1), "r": ratio(1, 20, 1, 1)},
    ),
    "linear": (image()[0, 0], lambda m, x: torch.addcmul(m.a(x), x, m.r), {"a": nn.Linear(7, 7), "r": ratio(7)}),
    "tokens": (image()[0], lambda m, x: torch.addcmul(m.a(x), x, m.r), {"a": nn.Linear(7, 7), "r": ratio(7)}),
    "of two sites": (
        image(), lambda m, x: m.d(torch.addcmul(pooled(m.c(x)), pooled(m.d(x)), m.r).relu()),
        {"c": conv(), "d": conv(), "r": ratio(1, 20, 1, 1)},
    ),
    "of two sites of tokens": (
        image()[0], lambda m, x: m.a(torch.addcmul(m.a(x)[:, 1:], m.b(x)[:, :-1], m.r)),
        {"a": nn.Linear(7, 7), "b": nn.Linear(7, 7), "r": ratio(7)},
    ),
}  # fmt: skip
"""Example, forward, modules."""


@pytest.mark.parametrize("recipe", [None, PER_TENSOR], ids=["channel", "tensor"])
@pytest.mark.parametrize("name", SCALED)
def test_a_scaled_sum_is_one_kernel_with_the_bits_of_its_meaning(name, recipe):
    x, body, modules = SCALED[name]
    reference, lowered = quantized(randomize(Body(body, **modules)), x, recipe=recipe)
    assert not lowered.islands, [str(skip) for skip in lowered.skipped]
    assert assert_equal_levels(reference, lowered, x).rate <= 1e-4
    for isa in HERE:
        model = intaglio.compile(lowered, isa=isa)
        for found, expected in zip(tensors(model(x)), tensors(lowered(x)), strict=True):
            assert torch.equal(found, expected), isa


def test_the_factor_is_the_ratio_in_steps_of_the_result():
    ratios = torch.linspace(-2, 3, 20)
    model = Body(lambda m, x: torch.addcmul(m.c(x), x, m.r), c=conv(), r=ratio(1, 20, 1, 1))
    model.r.data.copy_(ratios.reshape(1, 20, 1, 1))
    _, lowered = quantized(model, image())
    (add,) = [op for op in lowered.graph.ops if op.kind == "add"]
    step_b, step_y = (lowered.graph.types[name].levels.step for name in (add.inputs[1], add.output))
    found = lowered.graph.constants[add.inputs[3]]
    assert np.array_equal(found, numerics.multiplier(step_b * ratios.double().numpy(), step_y))


REFUSED = {
    "a factor that is not a constant": lambda m, x: torch.addcmul(m.c(x), x, m.d(x)),
    "value 2": lambda m, x: torch.addcmul(m.c(x), x, m.r, value=2),
    "operands of different shapes": lambda m, x: torch.addcmul(m.c(x), m.c(x).mean((2, 3), keepdim=True), m.r),
    "factors that are not one per channel": lambda m, x: torch.addcmul(m.c(x), x, m.rows),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_products_say_why_they_stay_in_float(reason):
    model = Body(REFUSED[reason], c=conv(), d=conv(), r=ratio(1, 20, 1, 1), rows=ratio(9, 1))
    _, lowered = quantized(randomize(model), image())
    assert any(reason in str(skip) for skip in lowered.skipped), [str(skip) for skip in lowered.skipped]


def test_a_factor_along_columns_does_not_join_a_convolution():
    """Its kernel has the factors of a channel side by side; the sum is a kernel of its own."""
    model = randomize(Body(lambda m, x: m.c(torch.addcmul(m.c(x), m.d(x), m.r)), c=conv(), d=conv(), r=ratio(7)))
    reference, lowered = quantized(model, image())
    assert [op.kind for op in lowered.graph.ops].count("requantize") == 2
    assert_equal_levels(reference, lowered, image())
    assert torch.equal(intaglio.compile(lowered)(image()), lowered(image()))
