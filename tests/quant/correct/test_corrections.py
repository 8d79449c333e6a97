"""Corrections: the float function stays, errors shrink, and every sum they rest on is exact."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import intaglio
from intaglio import stages
from intaglio.fxgraph.node_info import info
from intaglio.native.row_errors import split_rows_numpy
from intaglio.quant.correct.linalg import (
    COLUMN_BLOCK,
    DAMPING_OF_A_POSITION,
    DAMPINGS,
    LEAST_DAMPING,
    operand_factor,
    ordered_factor,
)
from intaglio.quant.correct.second_moments import (
    LEAST_SPLIT,
    Moments,
    Operands,
    are_few,
    moments,
)
from intaglio.quant.correct.weight_rounding import ROUNDINGS, gptq, nearest
from intaglio.quant.equalization.channel_records import FoldExtrema
from intaglio.quant.equalization.sampled_rows import SampledRows
from intaglio.quant.equalization.smooth_factors import LayerRounding, smoothing
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe, Setting
from support import nets
from support.programs import assert_same_bits
from support.slow_params import slow_params, slow_params_except


def prepared_of(model, batch, **setting):
    quantizer = Quantizer(Recipe(default=Setting(**setting)))
    return stages.prepare(stages.capture(model, batch), quantizer)


NETS = {
    "plain": nets.ConvBnRelu,
    "residual": nets.Residual,
    "option a": nets.OptionA,
    "grouped": nets.Grouped,
    "pool": nets.MaxPoolNet,
    "same": nets.SamePadding,
    "linears": nets.Linears,
}


def report(stage):
    return stage.model_info.texts.get("corrections", "")


def noise(exact, found):
    return ((exact - found).double().square().sum() / exact.double().square().sum()).item()


# -- equalize --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", slow_params_except("grouped", "linears", of=NETS, reason="layers of the other networks")
)
def test_equalizing_leaves_the_float_function_alone(name):
    model = nets.uneven(nets.randomize(NETS[name]()))
    x = nets.example(model, 4)
    prepared = prepared_of(model, x)
    apply_equalization = stages.equalize(prepared, [x])
    torch.testing.assert_close(
        apply_equalization(x), prepared(x), rtol=1e-3, atol=1e-3 * float(prepared(x).abs().max())
    )


def test_sums_take_a_factor_per_channel():
    model = nets.uneven(nets.randomize(nets.Residual()))
    x = nets.example(model, 4)
    apply_equalization = stages.equalize(prepared_of(model, x), [x])
    assert "aten.addcmul.default" in apply_equalization.text()
    assert "equalize: " in report(apply_equalization)


@pytest.mark.slow(reason="compiles an equalized network; corrected ones are compared below")
def test_equalized_models_run_in_int8_bit_identically():
    model = nets.uneven(nets.randomize(nets.OptionA()))
    x = nets.example(model, 4)
    prepared = stages.equalize(prepared_of(model, x), [x])
    ranges = stages.calibrate(prepared, [x])
    lowered = stages.requantize(stages.convert(prepared, ranges, stages.correct(prepared, ranges, [x])))
    quantized = stages.compile(lowered)
    assert quantized.coverage.macs == 1
    assert not quantized.coverage.islands
    assert torch.equal(quantized(x), lowered(x))


@pytest.mark.slow(reason="calibrates a residual network twice; equalizing leaves the function alone above")
def test_equalization_improves_channels_of_small_range():
    model = nets.uneven(nets.randomize(nets.Residual()))
    x = nets.example(model, 16)
    plain = prepared_of(model, x, equalize=0.0)
    even = stages.equalize(prepared_of(model, x), [x])
    errors = [noise(model(x).detach(), stages.convert(p, stages.calibrate(p, [x]))(x)) for p in (plain, even)]
    assert errors[1] < errors[0]


def test_a_recipe_can_disable_equalization():
    model = nets.uneven(nets.randomize(nets.Residual()))
    x = nets.example(model, 4)
    prepared = prepared_of(model, x, equalize=0.0)
    assert stages.equalize(prepared, [x]) is prepared


def test_bounds_above_zero_forbid_factors():
    model = nets.randomize(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 8, 3)))
    x = torch.randn(4, 3, 9, 9)
    assert "equalize" not in report(stages.equalize(prepared_of(model, x), [x]))


def test_normalized_bytes_are_represented_exactly_without_a_declaration():
    mean, std = torch.tensor([0.4, 0.5, 0.3]).reshape(1, 3, 1, 1), torch.tensor([0.2, 0.3, 0.25]).reshape(1, 3, 1, 1)
    pixels = torch.randint(0, 256, (8, 3, 12, 12), generator=torch.Generator().manual_seed(0))
    pixels[0, :, 0, 0], pixels[0, :, 0, 1] = 0, 255
    x = (pixels / 255 - mean) / std
    prepared = prepared_of(nets.randomize(nets.ConvBnRelu()), x)
    apply_equalization = stages.equalize(prepared, [x])
    assert "3 of 3 without loss" in report(apply_equalization)
    (node,) = [node for node in apply_equalization.annotations.module.graph.nodes if info(node).zero_points is not None]
    shift, _, gain = (getattr(apply_equalization.annotations.module, str(a.target), None) for a in node.args)
    q_values = x * gain + shift + torch.tensor(info(node).zero_points).reshape(1, 3, 1, 1)
    torch.testing.assert_close(q_values, pixels.float(), rtol=0, atol=1e-3)


def test_an_input_that_something_else_reads_too_keeps_one_scale():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            return self.conv(x) + x

    x = torch.randn(4, 3, 8, 8)
    assert not stages.equalize(prepared_of(Both().eval(), x), [x]).equalization.inputs


# -- moments ---------------------------------------------------------------------------------------------------------


class One(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def region_of(layer, x):
    prepared = prepared_of(One(layer).eval(), x, equalize=0.0)
    reference = stages.convert(prepared, stages.calibrate(prepared, [x]))
    (region,) = prepared.annotations.regions
    (site,) = [s for s in prepared.annotations.sites if s.role == "activation"]
    return region, reference.qparams[site.name]


def written_out(layer, q_values, zero):
    """Sums over positions of x x^T and x by `F.unfold`, in float64, of quantized values less their zero point."""
    difference = q_values.double() - zero
    if isinstance(layer, nn.Linear):
        columns = difference.reshape(-1, difference.shape[-1]).t()[None]
        return columns @ columns.transpose(1, 2), columns.sum(2)
    padding = layer.padding
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        sides = [side for t in reversed(total) for side in (t // 2, t - t // 2)]
        difference, padding = F.pad(difference, sides), 0
    unfolded = F.unfold(difference, layer.kernel_size, layer.dilation, padding, layer.stride)
    columns = unfolded.transpose(0, 1).flatten(1).reshape(layer.groups, -1, unfolded.shape[0] * unfolded.shape[2])
    return columns @ columns.transpose(1, 2), columns.sum(2)


LAYERS = [
    nn.Conv2d(4, 6, 3, padding=1),
    nn.Conv2d(4, 6, (1, 3), stride=(2, 1), padding=(0, 2)),
    nn.Conv2d(4, 8, 3, groups=2),
    nn.Conv2d(4, 8, 5, padding=2, groups=4),
    nn.Conv2d(4, 4, 3, dilation=2, padding="same"),
    nn.Conv2d(4, 4, 1, stride=2),
    nn.Conv2d(4, 4, 2, padding="same"),
    nn.Linear(9, 5),
]


def model_positions(layer, x):
    """Results of one output channel."""
    return layer(x).numel() // (layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_moments_are_the_sums_written_out(layer):
    x = torch.randn(5, 4, 9, 9)
    region, q = region_of(layer, x)
    q_values = torch.randint(0, 256, x.shape, dtype=torch.uint8)
    products, sums = written_out(layer, q_values, q.zero)
    found = moments(region, [q_values[:2], q_values[2:]], q)
    assert torch.equal(found.matrix, products)
    assert torch.equal(found.sums.double(), sums)
    assert found.count == model_positions(layer, x)


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3), nn.Conv2d(6, 4, 3, groups=2)], ids=str)
def test_moments_of_one_position_are_exact(layer):
    x = torch.randn(4, layer.in_channels, 3, 3)
    region, q = region_of(layer, x)
    q_values = torch.randint(0, 256, x.shape, dtype=torch.uint8)
    products, sums = written_out(layer, q_values[:1], q.zero)
    found = moments(region, [q_values[:1]], q)
    assert torch.equal(found.matrix, products)
    assert torch.equal(found.sums.double(), sums)
    parts = [moments(region, [image], q) for image in q_values.split(1)]
    assert torch.equal(sum(part.matrix for part in parts), moments(region, [q_values], q).matrix)


@pytest.mark.parametrize(
    ("layer", "x"),
    [(nn.Linear(200, 3), torch.randn(5, 200)), (nn.Conv2d(6, 4, 3, groups=2), torch.randn(2, 6, 3, 5))],
    ids=["linear", "groups"],
)
def test_few_operands_are_kept_in_an_order_of_their_own(layer, x):
    region, q = region_of(layer, x)
    q_values = torch.randint(0, 256, x.shape, dtype=torch.uint8)
    found, backwards = moments(region, [q_values], q), moments(region, q_values.flip(0).split(1), q)
    products, sums = written_out(layer, q_values, q.zero)
    assert found.products is None
    assert torch.equal(found.matrix, products)
    assert torch.equal(found.sums.double(), sums)
    assert torch.equal(found.operands.wide, backwards.operands.wide)


def test_products_of_many_columns_are_those_of_all_pairs(monkeypatch):
    monkeypatch.setattr("intaglio.quant.correct.second_moments.GRAM_ROWS", 7)
    layer, x = nn.Linear(24, 3), torch.randn(50, 24)
    region, q = region_of(layer, x)
    q_values = torch.randint(0, 256, x.shape, dtype=torch.uint8)
    assert torch.equal(moments(region, [q_values], q).matrix, written_out(layer, q_values, q.zero)[0])


def test_moments_add_up_whatever_the_split():
    layer, x = nn.Conv2d(4, 6, 3, padding=1), torch.randn(7, 4, 9, 9)
    region, q = region_of(layer, x)
    q_values = torch.randint(0, 256, x.shape, dtype=torch.uint8)
    whole, parts = moments(region, [q_values], q), [moments(region, [part], q) for part in (q_values[4:], q_values[:4])]
    assert torch.equal(whole.matrix, parts[0].matrix + parts[1].matrix)
    assert torch.equal(whole.sums, parts[0].sums + parts[1].sums)
    assert whole.count == parts[0].count + parts[1].count
    assert torch.equal(whole.matrix, moments(region, q_values.split(1), q).matrix)


def ridge(diagonal, damping):
    """Return what is added to the diagonal [groups, k] of moments, none of which are zero."""
    return damping * diagonal.mean(1, keepdim=True) + LEAST_DAMPING * diagonal.amax(1, keepdim=True)


@pytest.mark.parametrize("k", [1, 7, 200, 517])
def test_the_factor_is_that_of_the_damped_moments_in_order(k):
    x = torch.randn(2, k, 2 * k + 3, dtype=torch.float64)
    x[:, k // 2] = 0
    matrix = x @ x.transpose(1, 2)
    given = matrix.clone()
    factor = ordered_factor(matrix, x.shape[2])
    assert torch.equal(matrix, given)
    ordered = x.gather(1, factor.order[..., None].expand_as(x))
    expected = ordered @ ordered.transpose(1, 2)
    diagonal = expected.diagonal(dim1=1, dim2=2)
    assert (diagonal.diff(dim=1) >= 0).all()
    added = ridge(diagonal, DAMPING_OF_A_POSITION * k / x.shape[2])
    torch.testing.assert_close(factor.added, added.expand(2, k).where(diagonal > 0, 1))
    assert torch.equal(factor.lower, factor.lower.tril())
    assert (factor.lower.diagonal(dim1=1, dim2=2) == 1).all()
    product = factor.lower * factor.pivots[:, None] @ factor.lower.transpose(1, 2)
    torch.testing.assert_close(product, expected + torch.diag_embed(factor.added))


@pytest.mark.parametrize("k", [1, 7, 200])
def test_moments_of_few_positions_are_damped_more(k):
    x = torch.randn(2, k, 2 * k + 3, dtype=torch.float64)
    matrix = x @ x.mT
    diagonal = matrix.diagonal(dim1=1, dim2=2).sort(dim=1).values
    for count, damping in ((1, 0.3 * k), (k, 0.3), (10 * k, 0.03)):
        torch.testing.assert_close(ordered_factor(matrix, count).added, ridge(diagonal, damping).expand(2, k))
    for count in (31 * k, 1000 * k):
        assert torch.equal(ordered_factor(matrix, count).added, ridge(diagonal, DAMPINGS[0]).expand(2, k))


@pytest.mark.parametrize("layer", [nn.Linear(24, 3), nn.Conv2d(6, 4, 3, groups=2)], ids=str)
@pytest.mark.parametrize("samples", [2, *slow_params(300, reason="more samples of the same layers")])
def test_the_damping_is_that_of_the_positions_of_the_data(layer, samples):
    """Moments may keep operands or their products, and may be of one batch or of many."""
    x = torch.randn(samples, 24) if isinstance(layer, nn.Linear) else torch.randn(samples, 6, 3, 5)
    region, q = region_of(layer, x)
    q_values = torch.randint(0, 256, x.shape, dtype=torch.uint8)
    k, count = layer.weight[0].numel(), model_positions(layer, x)
    whole, parts = moments(region, [q_values], q), [moments(region, [one], q) for one in q_values.split(1)]
    diagonal = whole.matrix.diagonal(dim1=1, dim2=2).sort(dim=1).values
    expected = ridge(diagonal, max(DAMPINGS[0], DAMPING_OF_A_POSITION * k / count)).expand(diagonal.shape)
    for found in (whole, moments(region, q_values.split(1), q), sum(parts[1:], parts[0])):
        torch.testing.assert_close(found.factor.added, expected)


@pytest.mark.parametrize(("k", "count"), [(1, 1), (7, 1), (64, 9), (200, 12), (517, 60)])
def test_the_factor_of_few_operands_is_that_of_their_products(k, count):
    x = torch.randint(-255, 256, (2, k, count)).double()
    x[:, k // 2] = 0
    found, expected = operand_factor(x), ordered_factor(x @ x.mT, count)
    for name in ("order", "pivots", "added"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    error = torch.randn(2, k, 3, dtype=torch.float64)
    spread, spread_of_products = found.spreading(error), expected.spreading(error)
    for start in reversed(range(0, k, COLUMN_BLOCK)):
        stop = min(start + COLUMN_BLOCK, k)
        torch.testing.assert_close(found.triangle(start), expected.triangle(start))
        torch.testing.assert_close(spread(start, stop), spread_of_products(start, stop))


# -- rounding --------------------------------------------------------------------------------------------------------


def loss(quantized, weight, step, matrix):
    error = weight - quantized * step
    return ((error @ matrix) * error).sum(2)


def random_operands(groups, k, count, make):
    """Operands from -200 to 199, some of which are never anything but zero."""
    offset = torch.randint(-72, 73, (groups, k), generator=make)
    signed = torch.randint(-128, 128, (groups, k, count), generator=make)
    silent = torch.rand(k, generator=make) < 0.2
    signed[:, silent] = -offset[:, silent, None]
    return Operands.of(signed.to(torch.int8), offset)


@st.composite
def problems(draw):
    groups, rows, k = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 150))
    rank, seed = draw(st.integers(1, 40)), draw(st.integers(0, 2**31))
    make = torch.Generator().manual_seed(seed)
    operands = random_operands(groups, k, rank, make)
    x = operands.wide.long()
    weight = torch.randn(groups, rows, k, generator=make, dtype=torch.float64)
    step = weight.abs().amax(2, keepdim=True) / draw(st.sampled_from([1, 7, 127]))
    if draw(st.booleans()):
        return weight, step, Moments(None, x.sum(2), rank, rank, operands)
    return weight, step, Moments((x @ x.transpose(1, 2)).double(), x.sum(2), rank, rank)


@given(rows=st.integers(1, 40), k=st.integers(LEAST_SPLIT, 700), share=st.floats(0.01, 1), seed=st.integers(0, 2**31))
def test_errors_by_bytes_differ_by_what_rounding_rows_to_two_bytes_can_change(rows, k, share, seed):
    make = torch.Generator().manual_seed(seed)
    count = max(1, int(share * k))
    operands = random_operands(1, k, count, make)
    x = operands.wide
    weight = torch.randn(1, rows, k, generator=make, dtype=torch.float64)
    noise = weight - nearest(weight, weight.abs().amax(2, keepdim=True) / 127, -127, 127)
    products = x @ x.mT
    found = Moments(None if are_few(count, k) else products, x.long().sum(2), count, count, operands)
    both = found + found
    torch.testing.assert_close(both.matrix, 2 * products)
    for some in (weight, noise):
        split = split_rows_numpy(some[0].numpy(), operands.offset[0].numpy())
        upper, lower = torch.from_numpy(split.digits.astype("float64"))
        lost = some[0] - (256 * upper + lower) * torch.from_numpy(split.units)[:, None]
        exact, most = (((r @ products[0]) * r).sum(1) for r in (some[0], lost))
        for errors in (found.errors(some)[0], both.errors(some)[0] / 2):
            assert ((errors.sqrt() - exact.sqrt()).abs() <= most.sqrt() + 1e-9 * exact.sqrt()).all()


@given(problem=problems())
@settings(max_examples=2 * settings.default.max_examples)
def test_no_row_is_worse_than_rounded_to_nearest(problem):
    weight, step, found = problem
    rows = gptq(weight, step, found, -127, 127)
    assert rows.quantized.eq(rows.quantized.round()).all()
    assert rows.quantized.abs().le(127).all()
    plain, chosen = (found.errors(weight - q * step) for q in (nearest(weight, step, -127, 127), rows.quantized))
    assert torch.equal(rows.nearest_error, plain)
    assert (chosen <= plain).all()
    torch.testing.assert_close(rows.error, chosen, rtol=1e-6, atol=1e-9 * plain.max().item())


@given(problem=problems())
def test_errors_are_those_of_the_moments_written_out(problem):
    weight, step, found = problem
    plain = nearest(weight, step, -127, 127)
    torch.testing.assert_close(found.errors(weight - plain * step), loss(plain, weight, step, found.matrix))


def gptq_with_inverse(weight, step, found, low, high):
    """GPTQ as in the paper: columns one by one, with the Cholesky factor of the inverse of the damped moments."""
    order, added = found.factor.order.flip(1), found.factor.added
    place = order[:, None].expand_as(weight)
    columns, steps = weight.gather(2, place).clone(), step.expand_as(weight).gather(2, place)
    groups = torch.arange(len(weight))[:, None, None]
    damped = found.matrix[groups, order[:, :, None], order[:, None]] + torch.diag_embed(added.flip(1))
    factor = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    quantized = torch.empty_like(columns)
    for i in range(weight.shape[2]):
        quantized[..., i] = (columns[..., i] / steps[..., i]).round().clamp(low, high)
        error = (columns[..., i] - quantized[..., i] * steps[..., i]) / factor[:, i, i, None]
        columns[..., i:] -= error[..., None] * factor[:, None, i, i:]
    return torch.zeros_like(quantized).scatter(2, place, quantized)


@given(problem=problems())
def test_gptq_is_the_algorithm_of_the_paper(problem):
    weight, step, found = problem
    rows, expected = gptq(weight, step, found, -127, 127), gptq_with_inverse(weight, step, found, -127, 127)
    gains = rows.error < rows.nearest_error
    differ = (rows.quantized != expected)[gains]
    assert differ.float().mean() <= 0.01 or not gains.any()  # quotients halfway between two integers


@pytest.mark.parametrize("name", ["gptq", "adaround"])
def test_gptq_uses_correlations_of_inputs(name, monkeypatch):
    # Fewer and longer steps are enough for 8 rows of 24.
    monkeypatch.setattr("intaglio.quant.correct.weight_rounding.ITERATIONS", 600)
    monkeypatch.setattr("intaglio.quant.correct.weight_rounding.RATE", 0.01)
    make = torch.Generator().manual_seed(0)
    common = torch.randint(-100, 100, (1, 1, 400), generator=make)
    x = common + torch.randint(-10, 10, (1, 24, 400), generator=make)
    weight = torch.randn(1, 8, 24, generator=make, dtype=torch.float64)
    step = weight.abs().amax(2, keepdim=True) / 7
    found = Moments((x @ x.transpose(1, 2)).double(), x.sum(2), 400, 400)
    matrix = found.matrix
    rows = ROUNDINGS[name](weight, step, found, -7, 7)
    assert loss(rows.quantized, weight, step, matrix).sum() < 0.3 * rows.nearest_error.sum()


def test_nearly_collinear_inputs_do_not_harm_gptq():
    """One channel is thousands of times the others, and there twice: the moments can hardly be inverted."""
    make = torch.Generator().manual_seed(0)
    x = torch.randint(-1, 2, (1, 40, 30), generator=make)
    x[:, :2] = 255
    found = Moments((x @ x.transpose(1, 2) * 10**6).double(), x.sum(2), 30, 30)
    weight = torch.randn(1, 4, 40, generator=make, dtype=torch.float64)
    step = weight.abs().amax(2, keepdim=True) / 127
    q_values = gptq(weight, step, found, -127, 127).quantized
    matrix = found.matrix
    plain = loss(nearest(weight, step, -127, 127), weight, step, matrix)
    assert (loss(q_values, weight, step, matrix) <= plain).all()


# -- correct ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        *slow_params({"rounding": "gptq"}, reason="takes longer, and gives integers of the same type"),
        {"rounding": "nearest", "bias": "weights"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "name", slow_params_except("option a", "grouped", "linears", of=NETS, reason="layers of the other networks")
)
def test_a_corrected_model_is_still_equal_to_its_integer_graph(name, setting):
    model = nets.randomize(NETS[name]())
    x = nets.example(model, 4)
    prepared = prepared_of(model, x, **setting)
    ranges = stages.calibrate(prepared, [x])
    lowered = stages.requantize(stages.convert(prepared, ranges, stages.correct(prepared, ranges, [x])))
    assert torch.equal(stages.compile(lowered)(x), lowered(x))


def test_rounding_by_output_error_is_better_than_to_nearest():
    torch.manual_seed(0)
    model = One(nn.Conv2d(32, 8, 1)).eval()
    x = torch.randn(8, 1, 9, 9) + 0.1 * torch.randn(8, 32, 9, 9)
    errors = []
    for rounding in ("gptq", "nearest"):
        prepared = prepared_of(model, x, rounding=rounding, equalize=0.0)
        ranges = stages.calibrate(prepared, [x])
        found = stages.convert(prepared, ranges, stages.correct(prepared, ranges, [x]))
        errors.append(noise(model(x).detach(), found(x)))
    assert errors[0] < errors[1]


@pytest.mark.parametrize("kind", ["weights", "outputs"])
def test_bias_correction_removes_the_mean_error_of_rounding(kind):
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, 3, bias=False)
    x = torch.rand(8, 4, 9, 9)
    model = One(layer).eval()
    prepared = prepared_of(model, x, rounding="nearest", bias=kind, equalize=0.0)
    ranges = stages.calibrate(prepared, [x])
    plain, corrected = (
        stages.convert(prepared, ranges, found)(x) for found in (None, stages.correct(prepared, ranges, [x]))
    )
    means = [(model(x) - y).mean((0, 2, 3)).abs().max().item() for y in (plain, corrected)]
    assert means[1] < 0.2 * means[0]


@pytest.mark.slow(reason="calibrates two networks")
def test_corrections_of_another_model_are_refused():
    x = torch.randn(2, 3, 12, 12)
    all_stages = [prepared_of(nets.randomize(net()), x) for net in (nets.Residual, nets.OptionA)]
    ranges = [stages.calibrate(stage, [x]) for stage in all_stages]
    with pytest.raises(intaglio.errors.CalibrationError, match="another model"):
        stages.convert(all_stages[0], ranges[0], stages.correct(all_stages[1], ranges[1], [x]))


def test_corrections_do_not_change_their_inputs():
    model = nets.randomize(nets.Residual())
    x = nets.example(model, 4)
    prepared = prepared_of(model, x, bias="weights")
    ranges = stages.calibrate(prepared, [x])
    before = (prepared.text(), ranges.to_json(), [t.clone() for t in prepared.annotations.module._buffers.values()])
    stages.correct(prepared, ranges, [x])
    stages.equalize(prepared, [x])
    assert prepared.text() == before[0]
    assert ranges.to_json() == before[1]
    after = prepared.annotations.module._buffers.values()
    assert all(torch.equal(a, b) for a, b in zip(after, before[2], strict=True))


def test_a_generator_that_reuses_one_buffer_is_read_once_and_kept_right():
    model = nets.randomize(nets.ConvBnRelu())
    images = [nets.example(model, 2, seed) for seed in range(3)]

    def refilled():
        buffer = torch.empty_like(images[0])
        for image in images:
            buffer.copy_(image)
            yield buffer

    x = nets.example(model, 3, 9)
    assert torch.equal(intaglio.quantize(model, refilled())(x), intaglio.quantize(model, images)(x))


def test_an_int8_model_has_the_text_of_its_corrections():
    model = nets.randomize(nets.Residual())
    text = intaglio.quantize(model, [nets.example(model, 4)]).text("corrections")
    assert [line.split(":")[0] for line in text.splitlines()] == ["input 'x'", "equalize", "gptq"]


def test_bias_correction_reports_its_gain():
    model, x = One(nn.Conv2d(4, 6, 3, bias=False)).eval(), torch.rand(8, 4, 9, 9)
    prepared = prepared_of(model, x, rounding="nearest", bias="weights", equalize=0.0)
    (step,) = stages.correct(prepared, stages.calibrate(prepared, [x]), [x]).steps
    assert step.name == "bias of weights"
    assert step.after > step.before + 1


def test_corrections_report_their_gain():
    model = nets.randomize(nets.Residual())
    x = nets.example(model, 4)
    prepared = prepared_of(model, x)
    ranges = stages.calibrate(prepared, [x])
    (step,) = stages.correct(prepared, ranges, [x]).steps
    assert step.name == "gptq"
    assert step.after > step.before
    assert np.isfinite([step.before, step.after]).all()


def test_four_bits_lose_less_with_integers_and_scales_that_the_operand_chose():
    model = nets.randomize(nets.Residual())
    x = nets.example(model, 16)
    errors = []
    for rounding in ("gptq", "nearest"):
        prepared = prepared_of(model, x, weights_dtype="s4", rounding=rounding, equalize=0.0)
        ranges = stages.calibrate(prepared, [x])
        corrections = stages.correct(prepared, ranges, [x])
        assert all(rounded.values.min() >= -8 and rounded.values.max() <= 7 for rounded in corrections.weights.values())
        errors.append(noise(model(x).detach(), stages.convert(prepared, ranges, corrections)(x)))
    assert errors[0] < 0.5 * errors[1]


# -- smoothing -------------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Two linear layers read one layer norm, of which one channel is large."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(12, 24), nn.LayerNorm(24)
        self.a, self.b = nn.Linear(24, 16), nn.Linear(24, 8)
        with torch.no_grad():
            self.norm.weight[5] = 30.0
            self.norm.bias.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))

    def forward(self, x):
        y = self.norm(self.first(x))
        return self.a(y), self.b(y)


def test_smoothing_leaves_the_float_function_alone_and_gains():
    torch.manual_seed(0)
    model, x = Tokens().eval(), torch.randn(16, 10, 12)
    exact = [y.detach() for y in model(x)]
    plain = prepared_of(model, x, equalize=0.0)
    smooth = stages.equalize(prepared_of(model, x), [x[:8], x[8:]])
    assert "smooth: 1 values" in report(smooth)
    for found, expected in zip(smooth(x), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    errors = []
    for prepared in (plain, smooth):
        results = stages.convert(prepared, stages.calibrate(prepared, [x]))(x)
        errors.append(sum(noise(*pair) for pair in zip(exact, results, strict=True)))
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize(
    "weights",
    [*slow_params({}, reason="int8 weights gain by the same factors"), {"weights_dtype": "s4", "weights": "group:8"}],
    ids=["int8", "4 bits"],
)
def test_smoothing_gains_with_scales_per_token(weights):
    torch.manual_seed(0)
    model, x = Tokens().eval(), torch.randn(16, 10, 12)
    exact = [y.detach() for y in model(x)]
    per_token = {"activations": "token", "residual": "float", "rounding": "nearest", **weights}
    plain = prepared_of(model, x, **per_token, equalize=0.0)
    smooth = stages.equalize(prepared_of(model, x, **per_token), [x[:8], x[8:]])
    assert "smooth: 1 values" in report(smooth)
    for found, expected in zip(smooth(x), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    errors = []
    for prepared in (plain, smooth):
        reference = stages.convert(prepared, stages.calibrate(prepared, [x]))
        errors.append(sum(noise(*pair) for pair in zip(exact, reference(x), strict=True)))
    assert errors[1] < 0.8 * errors[0]
    lowered = stages.requantize(reference)
    assert_same_bits(stages.compile(lowered)(x), lowered(x))


def test_weights_of_few_bits_are_smoothed_by_the_sizes_of_channels_alone_too():
    assert {strength for strength in LayerRounding(largest=7).strengths if strength[1] == 0.0}
    assert not [strength for strength in LayerRounding().strengths if strength[1] == 0.0]


def test_layers_that_smoothing_does_not_improve_are_unchanged():
    rows = SampledRows.of(torch.randn(16, 4, 8).sign(), 0, -1, 16)
    weight = torch.ones(4, 8)
    extrema = FoldExtrema(-torch.ones(8, 8), torch.ones(8, 8))
    assert smoothing(extrema, rows, [weight]) is None


def test_an_error_in_a_correction_leaves_gradients_enabled_while_it_is_kept(monkeypatch):
    def failing(*_):
        raise ZeroDivisionError

    made = stages.prepare(stages.capture(nn.Linear(4, 4).eval(), torch.randn(3, 4)))
    data = [torch.randn(3, 4)]
    ranges = stages.calibrate(made, data, progress=False)
    monkeypatch.setattr("intaglio.quant.correct.operand_columns.OperandReader.batches", failing)
    with pytest.raises(ZeroDivisionError) as kept:
        stages.correct(made, ranges, data)
    assert torch.is_grad_enabled()
    assert kept.tb is not None
