"""Qronos rounds weights for the results that layers have in the float model, with other operands."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import intaglio
from intaglio import stages
from intaglio.ir import QParams
from intaglio.quant.correct.linalg import operand_factor, ordered_factor
from intaglio.quant.correct.operand_columns import LARGEST_SHIFT, SHIFT_UNIT
from intaglio.quant.correct.second_moments import LEAST_FLOAT32, Moments, Shift, moments, row_products, shift_of
from intaglio.quant.correct.weight_blocks import by_group
from intaglio.quant.correct.weight_rounding import nearest, qronos
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from support.slow_params import slow_params


@st.composite
def problems(draw):
    """A weight and its steps, quantized operands and what they lack, and the moments of both."""
    groups, rows, k = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 100))
    count, largest = draw(st.integers(1, 200)), draw(st.sampled_from([0, 1, 300, 32767]))
    make = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randint(-200, 200, (groups, k, count), generator=make).double()
    x[:, torch.rand(k, generator=make) < 0.2] = 0
    d = torch.randint(-largest, largest + 1, (groups, k, count), generator=make).double() * SHIFT_UNIT
    weight = torch.randn(groups, rows, k, generator=make, dtype=torch.float64)
    step = weight.abs().amax(2, keepdim=True) / draw(st.sampled_from([1, 7, 127]))
    return weight, step, x, d, Moments(x @ x.mT, x.sum(2).long(), count, count, shift=Shift(d @ x.mT, d @ d.mT))


def error(weight: Tensor, rounded: Tensor, x: Tensor, d: Tensor) -> Tensor:
    """Squared errors of the results, written out."""
    return (weight @ (x + d) - rounded @ x).square().sum(2)


@given(problem=problems())
def test_no_row_is_further_from_the_float_model_than_rounded_to_nearest(problem):
    weight, step, x, d, found = problem
    rows = qronos(weight, step, found, -127, 127)
    assert rows.quantized.eq(rows.quantized.round()).all()
    assert rows.quantized.abs().le(127).all()
    plain = error(weight, nearest(weight, step, -127, 127) * step, x, d)
    chosen = error(weight, rows.quantized * step, x, d)
    bound = 1e-9 * (weight @ (x + d)).square().sum(2)
    assert (chosen <= plain + bound).all()
    assert ((rows.error - chosen).abs() <= bound).all()
    assert ((rows.nearest_error - plain).abs() <= bound).all()


@given(problem=problems())
def test_the_target_is_no_further_from_the_float_model_than_the_weight(problem):
    weight, _, x, d, found = problem
    bound = 1e-9 * (weight @ (x + d)).square().sum(2)
    assert (error(weight, found.target(weight), x, d) <= error(weight, weight, x, d) + bound).all()


LAYERS = [
    nn.Conv2d(4, 6, 3, padding=1),
    nn.Conv2d(4, 8, 3, groups=2, stride=2),
    nn.Conv2d(4, 4, 3, dilation=2, padding="same"),
    nn.Conv1d(4, 6, 3, padding=1),
    nn.Linear(9, 5),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_errors_are_those_of_the_results_of_the_layer(layer):
    x = torch.randn(5, 4, 9) if isinstance(layer, nn.Conv1d) else torch.randn(5, 4, 9, 9)
    model = nn.Sequential(copy.deepcopy(layer)).eval()
    prepared = stages.prepare(stages.capture(model, x), Quantizer(Recipe.of({"*": {"equalize": 0.0}})))
    (region,) = prepared.annotations.regions
    (site,) = [site for site in prepared.annotations.sites if site.role == "activation"]
    q = stages.convert(prepared, stages.calibrate(prepared, [x], progress=False)).qparams[site.name]
    operand = torch.randint(0, 256, x.shape, dtype=torch.uint8)
    lacking = torch.randint(-500, 500, x.shape, dtype=torch.int16)
    shift = shift_of(region, operand.split(2), lacking.split(2), q)
    found = moments(region, operand.split(2), q)
    weight, rounded = (by_group(region, torch.randn(layer.weight.shape).double().numpy()) for _ in range(2))
    results = []
    for rows, values in ((weight, operand - float(q.zero) + lacking * SHIFT_UNIT), (rounded, operand - float(q.zero))):
        own = copy.deepcopy(layer).double()
        own.weight.data, own.bias.data = rows.reshape(layer.weight.shape), torch.zeros_like(own.bias)
        results.append(own(values.double()).detach())
    expected = (results[0] - results[1]).square().sum()
    with_shift = Moments(found.products, found.sums, found.count, found.samples, found.operands, shift)
    torch.testing.assert_close(with_shift.result_errors(weight, rounded).sum(), expected)


def test_products_of_the_largest_differences_are_exact():
    layer = nn.Linear(9, 5)
    x = torch.randn(4, 6, 9)
    prepared = stages.prepare(stages.capture(nn.Sequential(layer).eval(), x))
    (region,) = prepared.annotations.regions
    for zero in (0, 7, 128):
        operand = torch.randint(0, 256, x.shape, dtype=torch.uint8)
        lacking = torch.randint(-LARGEST_SHIFT, LARGEST_SHIFT + 1, x.shape).to(torch.int16)
        lacking[0, 0] = LARGEST_SHIFT
        lacking[0, 1] = -LARGEST_SHIFT
        found = shift_of(region, operand.split(1), lacking.split(1), QParams((0.5,), (zero,), 0, 255))
        columns, differences = operand.reshape(-1, 9).double() - zero, lacking.reshape(-1, 9).double() * SHIFT_UNIT
        assert torch.equal(found.products[0], differences.t() @ columns)
        assert torch.equal(found.squares[0], differences.t() @ differences)


@pytest.mark.parametrize("count", [5, 60])
def test_both_factors_solve_for_the_damped_moments(count):
    make = torch.Generator().manual_seed(0)
    x = torch.randn(2, 30, count, generator=make, dtype=torch.float64)
    rows = torch.randn(2, 4, 30, generator=make, dtype=torch.float64)
    for factor in (operand_factor(x), ordered_factor(x @ x.mT, count)):
        added = torch.empty_like(factor.added).scatter_(1, factor.order, factor.added)
        expected = torch.linalg.solve(x @ x.mT + torch.diag_embed(added), rows, left=False)
        torch.testing.assert_close(factor.solve(rows), expected)


def test_large_products_are_those_of_float64():
    make = torch.Generator().manual_seed(0)
    operands = torch.randint(-127, 128, (1, LEAST_FLOAT32, 1500), generator=make).double()
    matrix = operands @ operands.mT
    rows = torch.randn(1, 7, LEAST_FLOAT32, generator=make, dtype=torch.float64) * 1e200
    rows[0, 3] = 0
    exact = rows @ matrix
    torch.testing.assert_close(row_products(rows, matrix), exact, atol=1e-5 * exact.abs().max().item(), rtol=0)
    found = Moments(matrix, operands.sum(2).long(), 1500, 1500).errors(rows * 1e-190)
    torch.testing.assert_close(found, (exact * 1e-190 * rows * 1e-190).sum(2), atol=0, rtol=1e-4)


def deep() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))
    return nn.Sequential(*layers, nn.Linear(64, 16)).eval()


def mixed(count: int, seed: int) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    mixing = torch.randn(64, 64, generator=torch.Generator().manual_seed(9)) * torch.linspace(0.02, 1, 64)[:, None]
    return torch.randn(count, 64, generator=make) @ mixing


def quantized(model: nn.Module, data: list[Tensor], **settings: object) -> intaglio.QuantizedModel:
    recipe = {"*": {"weights_dtype": "s4", "rounding": "qronos", **settings}}
    return intaglio.quantize(model, data, recipe=recipe, progress=False)


@pytest.mark.slow(reason="quantizes a perceptron twice to compare errors; the target of one layer is tested above")
@pytest.mark.parametrize(
    "activations", ["static", *slow_params("token", reason="quantizes twice more; its bits are below")]
)
def test_layers_correct_the_errors_of_layers_in_front_of_them(activations):
    model, data, unseen = deep(), [mixed(256, seed) for seed in range(4)], mixed(500, 99)
    noise = []
    for rounding in ("gptq", "qronos"):
        int8 = quantized(model, data, activations=activations, rounding=rounding)
        assert f"{rounding}: 5 weights" in int8.text("corrections")
        noise.append((int8(unseen) - model(unseen)).square().sum().item())
    assert noise[1] < 0.9 * noise[0]


@pytest.mark.slow(reason="quantizes a perceptron twice; sums of moments do not depend on it")
@pytest.mark.parametrize(
    "activations", [*slow_params("static", reason="quantizes twice more; its gain is above"), "token"]
)
def test_the_bits_do_not_depend_on_how_data_is_divided(activations):
    model, whole = deep(), mixed(96, 1)
    found = [quantized(model, list(whole.split(size)), activations=activations) for size in (96, 16)]
    unseen = mixed(5, 2)
    assert all(torch.equal(a(unseen), b(unseen)) for a, b in itertools.pairwise(found))


def test_inputs_with_a_scale_per_channel_are_rounded_as_by_gptq():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    data = [torch.randint(0, 256, (16, 3, 8, 8)) / 255 * torch.tensor([1.0, 4.0, 9.0])[:, None, None] for _ in range(4)]
    int8 = quantized(model, data)
    assert int8.text("corrections").startswith("input 'input': a scale per channel")
    assert (int8(data[0]) - model(data[0])).square().sum() < 0.1 * model(data[0]).square().sum()
