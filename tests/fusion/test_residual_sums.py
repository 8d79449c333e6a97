"""Sums behind a convolution: a factor for every channel of the shortcut, and shortcuts of 16 bits."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import intaglio
from intaglio import numerics, stages
from intaglio.errors import SelectorError
from intaglio.ops import check_graph
from intaglio.quant.recipes.recipe import Recipe, Setting
from support.lowering import ROUNDED, assert_equal_quantized, largest_differences, quantized, sqnr, tensors
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.slow_params import slow_params_except


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
        image(130),
        lambda m, x: torch.addcmul(m.c(x), x, m.r).relu(),
        {"c": conv(130, 130), "r": ratio(1, 130, 1, 1)},
    ),
    "groups": (image(), lambda m, x: torch.addcmul(m.c(x), x, m.r), {"c": conv(groups=4), "r": ratio(1, 20, 1, 1)}),
    "depthwise": (image(), lambda m, x: torch.addcmul(m.c(x), x, m.r), {"c": conv(groups=20), "r": ratio(20, 1, 1)}),
    "transposed": (
        image(),
        lambda m, x: torch.addcmul(m.c(x), x, m.r).relu(),
        {"c": nn.ConvTranspose2d(20, 20, 3, padding=1), "r": ratio(1, 20, 1, 1)},
    ),
    "linear": (image()[0, 0], lambda m, x: torch.addcmul(m.a(x), x, m.r), {"a": nn.Linear(7, 7), "r": ratio(7)}),
    "tokens": (image()[0], lambda m, x: torch.addcmul(m.a(x), x, m.r), {"a": nn.Linear(7, 7), "r": ratio(7)}),
    "of two sites": (
        image(),
        lambda m, x: m.d(torch.addcmul(pooled(m.c(x)), pooled(m.d(x)), m.r).relu()),
        {"c": conv(), "d": conv(), "r": ratio(1, 20, 1, 1)},
    ),
    "of two sites of tokens": (
        image()[0],
        lambda m, x: m.a(torch.addcmul(m.a(x)[:, 1:], m.b(x)[:, :-1], m.r)),
        {"a": nn.Linear(7, 7), "b": nn.Linear(7, 7), "r": ratio(7)},
    ),
}
"""Example, forward, modules."""


@pytest.mark.parametrize("recipe", [None, PER_TENSOR], ids=["channel", "tensor"])
@pytest.mark.parametrize(
    "name",
    slow_params_except("of two sites of tokens", of=SCALED, reason="other layers of the same sums"),
)
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_a_scaled_sum_is_one_bit_identical_kernel(name, recipe, isa):
    x, body, modules = SCALED[name]
    reference, lowered = quantized(randomize(Body(body, **modules)), x, recipe=recipe)
    assert not lowered.islands, [str(skip) for skip in lowered.skipped]
    assert assert_equal_quantized(reference, lowered, x).rate <= 1e-4
    model = stages.compile(lowered, isa=isa)
    for found, expected in zip(tensors(model(x)), tensors(lowered(x)), strict=True):
        assert torch.equal(found, expected), isa


def test_the_factor_is_the_ratio_of_input_and_output_scales():
    ratios = torch.linspace(-2, 3, 20)
    model = Body(lambda m, x: torch.addcmul(m.c(x), x, m.r), c=conv(), r=ratio(1, 20, 1, 1))
    model.r.data.copy_(ratios.reshape(1, 20, 1, 1))
    _, lowered = quantized(model, image(), recipe=ROUNDED)
    (add,) = [op for op in lowered.graph.ops if op.kind == "add"]
    step_b, step_y = (lowered.graph.types[name].qparams.step for name in (add.inputs[1], add.output))
    found = lowered.graph.constants[add.inputs[3]]
    assert np.array_equal(found, numerics.multiplier(step_b * ratios.double().numpy(), step_y))


REFUSED = {
    "the factor is not a constant": lambda m, x: torch.addcmul(m.c(x), x, m.d(x)),
    "value is 2": lambda m, x: torch.addcmul(m.c(x), x, m.r, value=2),
    "the operands have different shapes": lambda m, x: torch.addcmul(m.c(x), m.c(x).mean((2, 3), keepdim=True), m.r),
    "the factors are not one per channel": lambda m, x: torch.addcmul(m.c(x), x, m.rows),
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
    assert_equal_quantized(reference, lowered, image())
    assert torch.equal(stages.compile(lowered)(image()), lowered(image()))


# ---- shortcuts of 16 bits

ACCURATE = Recipe.named("accurate")


def test_a_16_bit_value_is_never_halfway_between_two_8_bit_values():
    """Quantized again in float32 it has the quantized value it was split into, whatever the scale."""
    for scale in (1e-30, 0.001, 0.1, 1 / 3, 0.7, 3.0, 1e30):
        for zero_point in (0, 1, 128, 255):
            wide = numerics.widen_to_16bit(scale, zero_point)
            values = np.arange(numerics.QUANT_STEPS * 255 + 255)
            real = numerics.dequantize(values, *wide)
            level, rest = numerics.split_16bit(values)
            assert np.array_equal(numerics.quantize(real, np.float32(scale), zero_point, 0, 255), level)
            assert np.array_equal(numerics.join_16bit(level, rest), values)
            assert numerics.dequantize(wide.zero_point, *wide) == 0


SHORTCUTS = {
    "identity": (lambda m, x: (lambda y: m.d((m.d(y) + y).relu()))(m.c(x).relu()), {"c": conv(), "d": conv()}, 1),
    "below zero": (lambda m, x: (lambda y: m.d(m.d(y) + y))(m.c(x)), {"c": conv(), "d": conv()}, 1),
    "two in a row": (
        lambda m, x: (lambda y: (lambda z: m.d(m.d(z) + z))((m.d(y) + y).relu()))(m.c(x).relu()),
        {"c": conv(), "d": conv()},
        1,
    ),
    "read by a sum only": (lambda m, x: m.d((m.d(x) + m.c(x)).clamp(-0.3, 0.7)), {"c": conv(), "d": conv()}, 1),
    "scaled": (
        lambda m, x: (lambda y: m.d(torch.addcmul(m.d(y), y, m.r).relu()))(m.c(x).relu()),
        {"c": conv(), "d": conv(), "r": ratio(1, 20, 1, 1)},
        1,
    ),
    "every second pixel": (
        lambda m, x: (lambda y: m.f((m.e(y) + F.pad(y[:, :, ::2, ::2], (0, 0, 0, 0, 2, 3))).relu()))(m.c(x).relu()),
        {"c": conv(), "e": conv(20, 25, stride=2), "f": conv(25)},
        3,
    ),
    "depthwise": (
        lambda m, x: (lambda y: m.d((m.g(y) + y).relu()))(F.relu6(m.g(x))),
        {"d": conv(), "g": conv(groups=20)},
        1,
    ),
    "tokens": (
        lambda m, x: (lambda y: m.b(m.a(y) + y))(m.a(x).relu()),
        {"a": nn.Linear(7, 7), "b": nn.Linear(7, 7)},
        1,
    ),
}
"""Forward, modules, values of 16 bits."""


@pytest.mark.parametrize(
    "name",
    slow_params_except("below zero", of=SHORTCUTS, reason="other layers of the same sums"),
)
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_kernels_with_16_bit_shortcuts_are_bit_identical(name, isa):
    body, modules, count = SHORTCUTS[name]
    reference, lowered = quantized(randomize(Body(body, **modules)), image(), recipe=ACCURATE)
    assert not lowered.islands
    assert not reference.model_info.notes
    assert sum(site.role == "shortcut" for site in reference.annotations.sites) >= count
    sums = [op for op in lowered.graph.ops if op.kind == "add"]
    assert all(len(op.inputs) == 5 for op in sums)
    differences = largest_differences(reference, lowered, image(seed=1))
    assert max(differences.worst.values()) <= 1
    assert differences.rate < 3e-3  # a rest is a 255th of a quantized value
    check_graph(lowered.graph)
    model = stages.compile(lowered, isa=isa)
    for batch in (1, 3):
        assert torch.equal(model(image(batch=batch)), lowered(image(batch=batch))), isa


def test_a_shortcut_of_16_bits_loses_less():
    body, modules, _ = SHORTCUTS["two in a row"]
    model = randomize(Body(body, **modules))
    found = [quantized(model, image(), recipe=recipe)[0](image()) for recipe in (None, ACCURATE)]
    assert sqnr(found[1], model(image())) > sqnr(found[0], model(image()))


def test_a_note_names_the_operator_without_16_bit_values():
    """A maximum is no move: quantized values and rests would have to go together."""

    def body(m, x):
        return (lambda y: m.d(m.d(y) + y))(F.max_pool2d(m.c(x), 2))

    reference, lowered = quantized(randomize(Body(body, c=conv(), d=conv())), image(), recipe=ACCURATE)
    (note,) = reference.model_info.notes
    assert "8 bits, because max_pool2d computes it" in note
    (add,) = [op for op in lowered.graph.ops if op.kind == "add"]
    assert len(add.inputs) == 4
    assert torch.equal(stages.compile(lowered)(image()), lowered(image()))


def test_the_recipe_of_the_sum_selects_its_type():
    body, modules, _ = SHORTCUTS["two in a row"]
    recipe = Recipe.of({"op:aten.relu": {"shortcut": 16}})
    _, lowered = quantized(randomize(Body(body, **modules)), image(), recipe=recipe)
    assert [len(op.inputs) for op in lowered.graph.ops if op.kind == "add"] == [5, 4]


@pytest.mark.slow(reason="compiles a model to compare recipes by name")
def test_recipes_have_names(tmp_path):
    body, modules, _ = SHORTCUTS["identity"]
    model = randomize(Body(body, **modules))
    by_name = intaglio.quantize(model, [image()], recipe="accurate")
    by_name.save(tmp_path / "model.intaglio")
    loaded, same = intaglio.load(tmp_path / "model.intaglio"), intaglio.quantize(model, [image()], recipe=ACCURATE)
    assert torch.equal(by_name(image()), same(image()))
    assert torch.equal(by_name(image()), loaded(image()))
    assert Recipe.from_toml(ACCURATE.to_toml()) == ACCURATE
    with pytest.raises(SelectorError, match=r"no recipe is named 'precise'; names are default, .*, accurate"):
        Recipe.named("precise")
