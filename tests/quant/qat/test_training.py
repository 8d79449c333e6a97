"""Training with the rounding in the graph: it is the float model where nothing is rounded, and the int8 model where it
evaluates."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import intaglio
from intaglio import numerics, stages
from intaglio.errors import ArtifactError, CalibrationError, InputError, UnsupportedError
from intaglio.ir import DType
from intaglio.quant.annotate.sites import Observed, Site
from intaglio.quant.qat import PreparedQat
from intaglio.quant.qat.fake_quantize import FakeQuantize, FakeQuantizeFunction, FakeQuantizeMode
from support import nets
from support.nets import Body
from support.qat_models import assert_evaluates_alike, trainable
from support.slow_params import slow_params, slow_params_except

EPS, MOMENTUM = 1e-3, 0.03
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def layer(kind: str, axes: int, bias: bool) -> nn.Module:
    if kind == "linear":
        return nn.Linear(4, 6, bias=bias)
    if kind == "grouped":
        return CONVS[axes](4, 6, 3, padding=1, groups=2, bias=bias)
    kinds = CONVS if kind == "conv" else TRANSPOSED
    return kinds[axes](4, 6, 3, stride=1 if kind == "conv" else 2, padding=1, bias=bias)


def normed(kind: str, axes: int, bias: bool, relu: bool) -> nn.Module:
    parts = [layer(kind, axes, bias), NORMS[axes](6, eps=EPS, momentum=MOMENTUM), *[nn.ReLU()] * relu]
    return nets.randomize(nn.Sequential(*parts)).train()


def example(kind: str, axes: int, seed: int = 0) -> torch.Tensor:
    shape = (6, 4) if kind == "linear" else (6, 4, *[5] * axes)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(got: torch.Tensor, expected: torch.Tensor, scale: float = 1e-5) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=scale * max(expected.abs().max().item(), 1))


def assert_same_gradients(prepared: PreparedQat, model: nn.Module) -> None:
    """Relative to the largest of the model: that of a bias in front of a batch norm is 0 but for rounding."""
    largest = max(parameter.grad.abs().max().item() for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        got = prepared.get_parameter(name).grad
        torch.testing.assert_close(got, parameter.grad, rtol=1e-4, atol=1e-5 * largest, msg=name)


# -- A16 --------------------------------------------------------------------------------------------------------------


CASES = [
    *(("conv", 2), ("transposed", 1), ("linear", 1)),
    *slow_params(("grouped", 2), reason="a convolution, which folds its norm as one of one group does"),
    *slow_params(
        *(("conv", 1), ("conv", 3), ("transposed", 2), ("transposed", 3)), reason="the same layers over other axes"
    ),
]


@pytest.mark.case("frontends A16")
@pytest.mark.parametrize("relu", [True, *slow_params(False, reason="without a function behind the norm")])
@pytest.mark.parametrize(
    "bias", [False, *slow_params(True, reason="the norm takes the bias up; each kind of layer is compared without one")]
)
@pytest.mark.parametrize(("kind", "axes"), CASES)
def test_without_rounding_the_training_graph_is_the_float_model(kind, axes, bias, relu):
    """A16: results, gradients and running statistics, over steps in both modes."""
    model, x = normed(kind, axes, bias, relu), example(kind, axes)
    prepared = trainable(model, x).round_values(False)
    assert {name for name, _ in model.named_parameters()} <= {name for name, _ in prepared.named_parameters()}
    for step in range(3):
        for module in (model, prepared):
            module.train(step != 1)
            module.zero_grad()
        x = example(kind, axes, step)
        expected, got = model(x), prepared(x)
        assert_close(got, expected)
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(step))
        (expected * weights).sum().backward()
        (got * weights).sum().backward()
        assert_same_gradients(prepared, model)
        for name, buffer in model.named_buffers():
            assert_close(prepared.get_buffer(name), buffer)


@pytest.mark.case("frontends A16")
@pytest.mark.parametrize("learned", [True, *slow_params(False, reason="scales that are not learned")])
@pytest.mark.parametrize(("kind", "axes"), CASES)
def test_the_converted_model_matches_the_fake_quantized_one(kind, axes, learned):
    """A16, C13: after some steps the folded int8 model is the fake-quantized one, with scales that were learned too."""
    x = example(kind, axes)
    prepared = trainable(normed(kind, axes, True, True), x)
    stages.calibrate(prepared, [x], progress=False)
    before = [module.scale.clone() for module in prepared.learn_scales(learned).rounding()]
    optimizer = torch.optim.SGD([p for p in prepared.parameters() if p.requires_grad], lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        prepared(example(kind, axes, step)).square().mean().backward()
        optimizer.step()
    assert all(learned or scale.grad is None for scale in prepared.scale_parameters())
    moved = [not torch.equal(a, module.scale) for a, module in zip(before, prepared.rounding(), strict=True)]
    assert all(moved) if learned else any(moved)
    assert_evaluates_alike(prepared, x)


@pytest.mark.slow(reason="switches modes many times; batch norms and dropout switch below")
@pytest.mark.case("frontends A16")
def test_eps_momentum_and_dropout_survive_every_switch_of_modes():
    """A16, and what overwrote dropout p and batch norm's eps and momentum elsewhere (2.10, 3)."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, eps=EPS, momentum=MOMENTUM),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.37),
        nn.Linear(36, 3),
    )
    prepared = trainable(model, torch.randn(4, 3, 5, 5))
    for mode in (True, False, False, *[True, False] * 10):
        prepared.train(mode)
        norm, dropout = prepared.get_submodule("1"), prepared.get_submodule("4")
        assert (norm.eps, norm.momentum, dropout.p) == (EPS, MOMENTUM, 0.37)
        assert norm.training is dropout.training is mode


def test_batch_norm_statistics_use_the_momentum_of_the_model():
    model, x = normed("conv", 2, True, True), example("conv", 2)
    prepared, before = trainable(model, x), model[1].running_mean.clone()
    model(x)
    prepared.round_values(False)(x)
    assert not torch.equal(prepared.get_buffer("1.running_mean"), before)
    assert_close(prepared.get_buffer("1.running_mean"), model[1].running_mean, 1e-6)
    assert prepared.get_buffer("1.num_batches_tracked") == 1


def test_a_channel_with_batch_norm_weight_zero_trains_like_any_other():
    """Residual networks begin with norms of weight 0; dividing by them would give no number."""
    model, x = normed("conv", 2, False, False), example("conv", 2)
    model[1].weight.data[::2] = 0
    prepared = trainable(model, x).round_values(False)
    for module in (model, prepared):
        (module(x) * x[:, :1]).sum().backward()
    assert model[1].weight.grad[0] != 0
    assert_same_gradients(prepared, model)
    prepared.round_values()
    assert prepared(x).isfinite().all()


# -- modes ------------------------------------------------------------------------------------------------------------


def dropped() -> nn.Module:
    return nets.randomize(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4)))


@pytest.mark.case("frontends B24")
def test_train_and_eval_switch_batch_norms_and_dropout():
    """B24: dropout drops in training only, however often modes change (2.10, 11)."""
    x = torch.randn(5, 8)
    prepared = trainable(dropped(), x)
    prepared(x)
    for _ in range(2):
        prepared.train()
        assert not torch.equal(prepared(x), prepared(x))
        prepared.observe_ranges(False).eval()
        assert torch.equal(prepared(x), prepared(x))
    assert_evaluates_alike(prepared, x)


def test_a_part_of_the_model_can_be_put_into_evaluation():
    """By the names it has in the float model."""
    model, x = normed("conv", 2, True, True), example("conv", 2)
    prepared = trainable(model, x).round_values(False)
    prepared.get_submodule("1").eval()
    model[1].eval()
    before = prepared.get_buffer("1.running_mean").clone()
    assert_close(prepared(x), model(x))
    assert torch.equal(prepared.get_buffer("1.running_mean"), before)


@pytest.mark.parametrize(("kind", "axes"), [("conv", 2), ("transposed", 1), ("linear", 1)])
def test_frozen_batch_norms_use_running_statistics_leave_them_and_train_as_the_float_model_s_do(kind, axes):
    """From the first step; gradients of factors and shifts too."""
    model, x = normed(kind, axes, True, True), example(kind, axes)
    prepared = trainable(model, x).round_values(False).freeze_batch_norms()
    model[1].eval()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, prepared)]
    for step in range(5):
        for module, optimizer in zip((model, prepared), optimizers, strict=True):
            optimizer.zero_grad()
            module(example(kind, axes, step)).square().mean().backward()
        assert_same_gradients(prepared, model)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(prepared.get_buffer("1.running_var"), model[1].running_var)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_diverged_values_are_an_error_and_do_not_change_averages(value):
    x = example("conv", 2)
    prepared = trainable(normed("conv", 2, True, True), x)
    prepared(x)
    averages = [m.high.clone() for m in prepared.rounding() if isinstance(m, FakeQuantize)]
    with pytest.raises(CalibrationError, match="not finite") as raised:
        prepared(torch.where(torch.arange(5) == 2, value, x))
    assert raised.value.where == "#0/input.input_1"
    assert all(map(torch.equal, averages, [m.high for m in prepared.rounding() if isinstance(m, FakeQuantize)]))


@pytest.mark.slow(reason="a norm that is not folded; folded ones switch modes above")
def test_an_unfolded_batch_norm_evaluates_with_running_statistics():
    """What stayed in training made DenseNets useless elsewhere (2.10, 4)."""
    model = nets.randomize(nn.Sequential(nn.BatchNorm2d(3, eps=EPS), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    x = example("conv", 2)[:, :3]
    prepared = trainable(model, x)
    for mode in (True, False):
        prepared.train(mode).round_values(False)
        model.train(mode)
        assert_close(prepared(x), model(x))
    prepared.train().round_values()(x)
    assert_evaluates_alike(prepared, x)


@pytest.mark.slow(reason="captures a model for one rule of folding")
def test_a_batch_norm_after_a_token_layer_is_not_folded_into_the_wrong_axis():
    """Linear layers of three axes have their channels last, the norm has them second (2.10, 5)."""
    parts = {"a": nn.Linear(4, 5), "n": nn.BatchNorm1d(3), "b": nn.Linear(5, 2)}
    model = nets.randomize(Body(lambda m, x: m.b(m.n(m.a(x))), **parts))
    x = torch.randn(6, 3, 4)
    prepared = trainable(model, x).round_values(False)
    for mode in (True, False):
        assert_close(prepared.train(mode)(x), model.train(mode)(x))


def test_a_layer_that_is_called_twice_has_one_weight():
    """Tied and shared weights ended other flows (2.10, 6)."""
    model = nets.randomize(Body(lambda m, x: m.a(torch.relu(m.n(m.a(x)))), a=nn.Linear(4, 4), n=nn.BatchNorm1d(4)))
    x = torch.randn(6, 4)
    prepared = trainable(model, x).round_values(False)
    model.train()
    for module in (model, prepared):
        module(x).square().sum().backward()
    assert_same_gradients(prepared, model)
    prepared.round_values()(x)
    assert_evaluates_alike(prepared, x)


@pytest.mark.slow(reason="the same rule as for a layer that is called twice")
def test_a_norm_that_is_called_twice_counts_twice():
    parts = {"a": nn.Conv2d(4, 4, 1), "b": nn.Conv2d(4, 4, 1), "n": nn.BatchNorm2d(4)}
    model = nets.randomize(Body(lambda m, x: m.n(m.b(torch.relu(m.n(m.a(x))))), **parts))
    x = example("conv", 2)
    prepared = trainable(model, x).round_values(False)
    assert_close(prepared(x), model.train()(x))
    for name, buffer in model.named_buffers():
        assert_close(prepared.get_buffer(name), buffer)


@pytest.mark.slow(reason="another kind of dropout, whose switch is tested above")
def test_dropout2d_drops_whole_feature_maps_while_training():
    parts = nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Dropout2d(0.5), nn.Conv2d(8, 8, 1, bias=False)
    model = nets.randomize(nn.Sequential(*parts))
    model[3].weight.data = torch.eye(8)[..., None, None]
    x = torch.rand(2, 3, 4, 4)
    y = trainable(model, x).round_values(False)(x)
    maps = (y != 0).flatten(2)
    assert (maps.all(2) | ~maps.any(2)).all()
    assert maps.any()
    assert not maps.all()


@pytest.mark.slow(reason="captures a model for one reader of a dropout")
def test_a_dropout_with_some_of_the_readers_drops_only_for_them():
    model = nets.randomize(
        Body(
            lambda m, x: (m.a(y := torch.relu(m.b(x))), m.c(F.dropout(y, 0.5, m.training))),
            a=nn.Linear(4, 4),
            b=nn.Linear(4, 4),
            c=nn.Linear(4, 4),
        )
    )
    x = torch.randn(6, 4)
    prepared = trainable(model, x)
    prepared(x)
    prepared.observe_ranges(False)
    first, second = prepared(x), prepared(x)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


class Attention(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2, dropout=p, batch_first=True), nn.LayerNorm(8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x + self.attention(x, x, x, need_weights=False)[0]))


@pytest.mark.slow(reason="captures attention for training; layers and dropout train in tests of their own")
def test_attention_trains_and_drops_its_probabilities():
    torch.manual_seed(0)
    model, x = Attention(0.5), torch.randn(3, 6, 8)
    prepared = trainable(model, x)
    prepared(x).square().sum().backward()
    assert prepared.get_parameter("attention.in_proj_weight").grad.any()
    prepared.observe_ranges(False)
    assert not torch.equal(prepared(x), prepared(x))
    assert_evaluates_alike(prepared, x)
    assert_close(prepared.round_values(False).eval()(x), model.eval()(x))


# -- scales -----------------------------------------------------------------------------------------------------------


def test_fake_quantize_rounds_like_numerics_and_has_no_gradient_outside_the_range():
    draw = torch.Generator().manual_seed(0)
    x = (torch.randn(1000, generator=draw) * 3).requires_grad_()
    scale, zero = torch.tensor(0.0123), torch.tensor(97.0)
    y = FakeQuantizeFunction.apply(x, scale, zero, None, 0, 255, 1.0)
    max_quantized = numerics.quantize(x.detach().numpy(), scale.numpy(), 97, 0, 255)
    assert np.array_equal(y.detach().numpy(), numerics.dequantize(max_quantized, scale.numpy(), 97))
    y.sum().backward()
    v = x.detach() / scale + 97
    assert torch.equal(x.grad, ((v >= 0) & (v <= 255)).float())


@pytest.mark.case("frontends C13")
@pytest.mark.parametrize(("low", "high", "zero"), [(0, 255, 97.0), (0, 15, 0.0), (-8, 7, 0.0)])
def test_gradients_of_scale_and_zero_point_are_those_of_the_papers(low, high, zero):
    """C13: Esser et al. 2020, eq. 3, of the shifted quantized values; Bhalgat et al. 2020 for the zero point."""
    draw = torch.Generator().manual_seed(1)
    x, upstream = 4 * torch.randn(4000, generator=draw), torch.randn(4000, generator=draw)
    scale, zero_point = torch.tensor(0.05, requires_grad=True), torch.tensor(zero, requires_grad=True)
    share = (4000 * high) ** -0.5
    (FakeQuantizeFunction.apply(x, scale, zero_point, None, low, high, share) * upstream).sum().backward()
    v, s = x / 0.05, 0.0
    below, above = v < low - zero, v > high - zero
    assert below.any()
    assert above.any()
    slope = torch.where(below, low - zero, torch.where(above, high - zero, v.round() - v))
    s = (upstream * slope).sum() * share
    torch.testing.assert_close(scale.grad, s, rtol=1e-4, atol=1e-5)
    shift = (upstream * (below | above) * -0.05).sum() * share
    torch.testing.assert_close(zero_point.grad, shift, rtol=1e-4, atol=1e-6)


@pytest.mark.case("frontends C13")
def test_gradients_of_scales_are_normalized_by_the_number_of_values():
    """C13: values of one sample for an activation, of one channel for a weight; 1/sqrt(n * quantized values above
    zero)."""
    x = example("conv", 2)
    prepared = trainable(normed("conv", 2, True, True), x)
    prepared(x)
    prepared.learn_scales()
    weight = next(m for m in prepared.rounding() if not isinstance(m, FakeQuantize))
    given = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0)) * 100
    weight(given).sum().backward()
    v = given / weight.scale.detach().reshape(-1, 1, 1, 1)
    slope = torch.where(v.abs() > 127, v.sign() * 127, v.round() - v).sum((1, 2, 3))
    torch.testing.assert_close(weight.scale.grad, slope * (36 * 127) ** -0.5, rtol=1e-3, atol=1e-3)
    site = next(m for m in prepared.rounding() if isinstance(m, FakeQuantize))
    site.zero_grad()
    site(torch.full_like(x, 1e6)).sum().backward()
    above = 255 - site.zero_point.item()
    assert 0 < above < 255
    expected = x.numel() * above * (4 * 5 * 5 * max(above, 255 - above)) ** -0.5
    assert site.scale.grad.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.case("frontends C13")
@pytest.mark.parametrize(
    ("low", "high", "ends", "max_quantized"),
    [(0, 255, (0.0, 4.0), 255), (1, 255, (-4.0, 4.0), 127), (0, 15, (-1.0, 2.0), 10), (0, 255, (-4.0, 0.0), 255)],
)
def test_learned_scales_count_values_on_the_longer_side_of_the_zero_point(low, high, ends, max_quantized):
    """C13: Esser et al. 2020, section 2.2; an unsigned type with its zero point in the middle is a signed one."""
    site = Site("x", "x", "activation", Observed("minmax", low == 1), DType.U8, low, high)
    rounding = FakeQuantize(site, 1, 2, FakeQuantizeMode())
    rounding(torch.tensor([ends]))
    rounding.mode.observe, rounding.mode.learn = False, True
    rounding.scale.requires_grad_(True)
    x = torch.full((2, 50), 1e6 if ends[1] else -1e6)
    rounding(x).sum().backward()
    side = high if ends[1] else low
    expected = 100 * (side - rounding.zero_point.item()) * (50 * max_quantized) ** -0.5
    assert rounding.scale.grad.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.case("frontends C13")
def test_observing_ends_learning_and_learning_ends_observing():
    """C13."""
    x = example("conv", 2)
    prepared = trainable(normed("conv", 2, True, True), x)
    prepared(x)
    assert not any(p.requires_grad for p in prepared.scale_parameters())
    prepared.learn_scales()
    assert all(p.requires_grad for p in prepared.scale_parameters())
    scales = [p.clone() for p in prepared.scale_parameters()]
    prepared(x * 100)
    assert all(torch.equal(a, b) for a, b in zip(scales, prepared.scale_parameters(), strict=True))
    prepared.observe_ranges()
    assert not any(p.requires_grad for p in prepared.scale_parameters())
    prepared(x * 100)
    assert not all(torch.equal(a, b) for a, b in zip(scales, prepared.scale_parameters(), strict=True))


def test_scales_without_data_cannot_be_learned_or_converted():
    x = example("conv", 2)
    prepared = trainable(normed("conv", 2, True, True), x)
    with pytest.raises(CalibrationError, match="seen no data"):
        prepared.learn_scales()
    with pytest.raises(CalibrationError, match="seen no data"):
        stages.convert(prepared)


def test_learned_scales_are_those_of_the_int8_model():
    x = example("conv", 2)
    prepared = trainable(normed("conv", 2, True, True), x)
    stages.calibrate(prepared, [x], progress=False)
    prepared.learn_scales()
    before = [p.clone() for p in prepared.scale_parameters()]
    optimizer = torch.optim.Adam(prepared.parameters(), lr=1e-3)
    for step in range(5):
        optimizer.zero_grad()
        (prepared(example("conv", 2, step)) - 1).square().mean().backward()
        optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, prepared.scale_parameters(), strict=True))
    assert_evaluates_alike(prepared, x)


@pytest.mark.slow(reason="trains a residual network of 4 bits; layers of 8 bits are trained above")
@pytest.mark.parametrize(
    "setting",
    slow_params_except(
        {"weights_dtype": "s4", "weights": "group:4", "activations_dtype": "u4"},
        of=[
            {"weights_dtype": "s4", "weights": "group:4", "activations_dtype": "u4"},
            {"weights": "tensor", "bits": 7},
            {"shortcut": 16},
        ],
        reason="recipes of more bits",
    ),
)
def test_any_integer_recipe_trains(setting):
    model = nets.randomize(nets.Residual())
    x = nets.example(model, 4)
    prepared = trainable(model, x, stages.Quantizer(intaglio.Recipe.of({}, intaglio.Setting(**setting))))
    stages.calibrate(prepared, [x], progress=False)
    prepared.learn_scales()(x).square().sum().backward()
    assert all(p.grad is not None for p in prepared.scale_parameters())
    assert_evaluates_alike(prepared, x)


@pytest.mark.slow(reason="trains with scales per token; linear layers train with the others above")
def test_linear_layers_train_with_per_token_quantization():
    model, x = dropped(), torch.randn(5, 8)
    prepared = trainable(model, x, stages.Quantizer(intaglio.Recipe.named("int8_dynamic")))
    prepared(x).square().sum().backward()
    assert prepared.get_parameter("0.weight").grad.any()
    assert_evaluates_alike(prepared, x)


@pytest.mark.slow(reason="bytes at the input are tested without training")
def test_images_as_bytes_train():
    parts = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)
    model = nets.randomize(nn.Sequential(*parts))
    image = intaglio.Image(0.5, 0.25)
    x = image.normalize(torch.randint(0, 256, (4, 3, 6, 6), dtype=torch.uint8))
    prepared = trainable(model, x, stages.Quantizer(input=image))
    prepared(x).square().sum().backward()
    assert prepared.get_parameter("0.weight").grad.any()
    assert_evaluates_alike(prepared, x)


@pytest.mark.slow(reason="calibrates a residual network twice; learned scales of layers are converted above")
def test_learned_scales_start_at_the_calibrated_ones():
    """The ranges are those that calibrating without training gives, by the recipe's method."""
    model, x = nets.randomize(nets.Residual()), nets.example(nets.Residual(), 4)
    plain = stages.prepare(stages.capture(model, x))
    reference = stages.convert(plain, stages.calibrate(plain, [x], progress=False))
    prepared = trainable(model, x)
    stages.calibrate(prepared, [x], progress=False)
    assert dict(stages.convert(prepared).qparams) == dict(reference.qparams)


# -- life -------------------------------------------------------------------------------------------------------------


def loop(prepared: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        prepared(example("conv", 2, step)).square().mean().backward()
        optimizer.step()


def with_dropout() -> nn.Module:
    return nn.Sequential(*normed("conv", 2, True, True), nn.Dropout(0.2), nn.Conv2d(6, 2, 1)).train()


@pytest.mark.case("frontends C13")
@pytest.mark.parametrize("learned", [*slow_params(False, reason="the same state without learned scales"), True])
def test_training_resumes_bit_for_bit(learned):
    """C13: states of model and optimizer saved in the middle, into a model that is built anew."""
    torch.manual_seed(3)
    model, x = with_dropout(), example("conv", 2)

    def make():
        prepared = trainable(copy.deepcopy(model), x)
        return prepared, torch.optim.SGD(prepared.parameters(), lr=0.01, momentum=0.9)

    straight, optimizer = make()
    loop(straight, optimizer, range(2))
    if learned:
        straight.learn_scales()
    loop(straight, optimizer, range(2, 4))
    saved = copy.deepcopy((straight.state_dict(), optimizer.state_dict()))
    loop(straight, optimizer, range(4, 6))
    resumed, second = make()
    resumed.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    loop(resumed, second, range(4, 6))
    for (name, expected), got in zip(straight.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(got, expected), name
    assert torch.equal(resumed.eval()(x), straight.eval()(x))


def test_a_copy_trains_on_its_own():
    x = example("conv", 2)
    prepared = trainable(with_dropout(), x)
    prepared(x)
    other = copy.deepcopy(prepared)
    before = prepared.get_parameter("0.weight").clone()
    loop(other, torch.optim.SGD(other.parameters(), lr=0.1), range(2))
    other.learn_scales()
    assert torch.equal(prepared.get_parameter("0.weight"), before)
    assert not prepared.scale_parameters()[0].requires_grad
    assert not torch.equal(other.get_parameter("0.weight"), before)


def test_the_float_model_is_not_changed_and_its_state_can_be_loaded():
    model, x = with_dropout(), example("conv", 2)
    before = copy.deepcopy(model.state_dict())
    prepared = trainable(model, x)
    loop(prepared, torch.optim.SGD(prepared.parameters(), lr=0.1), range(2))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    missing, unexpected = prepared.load_state_dict(before, strict=False)
    assert not unexpected
    assert all(name.startswith("quantizers.") or name == "_extra_state" for name in missing)
    assert torch.equal(prepared.get_parameter("0.weight"), model[0].weight)


@pytest.mark.slow(reason="captures a model for the names of its parameters")
def test_parameters_have_the_float_models_order_and_frozen_ones_stay_frozen():
    model = with_dropout()
    model[0].weight.requires_grad_(False)
    prepared = trainable(model, example("conv", 2))
    names = [name for name, _ in prepared.named_parameters() if not name.startswith("quantizers.")]
    assert names == [name for name, _ in model.named_parameters()]
    assert not prepared.get_parameter("0.weight").requires_grad


def test_the_batch_is_free_where_dropout_and_batch_norms_train():
    """The last batch of an epoch is smaller."""
    prepared = trainable(with_dropout(), example("conv", 2))
    assert prepared(example("conv", 2)[:3]).shape[0] == 3
    prepared.eval()
    assert prepared(example("conv", 2)[:1]).shape[0] == 1


def test_a_parameter_that_becomes_a_number_is_named():
    model = Body(lambda m, x: m.a(x) * m.gain, a=nn.Linear(4, 4))
    model.gain = nn.Parameter(torch.tensor([1.5]))
    x = torch.randn(3, 4)
    prepared = trainable(model, x)
    prepared(x)
    assert "not trained, because the graph contains their values as constants: gain" in stages.convert(prepared).notes


@pytest.mark.slow(reason="a parametrized layer; gradients of plain weights are compared above")
def test_weights_that_are_computed_are_trained_where_they_come_from():
    torch.manual_seed(0)
    conv, x = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 6, 3)), example("conv", 2)
    model = nn.Sequential(conv, nn.BatchNorm2d(6))
    prepared = trainable(model, x).round_values(False)
    for module in (model, prepared):
        (module(x) * x[:, :1, :3, :3]).sum().backward()
    assert_same_gradients(prepared, model)


@pytest.mark.case("frontends B20")
def test_a_model_is_prepared_for_training_or_for_calibration():
    """B20: what one of them made is not taken by the other, and says which call makes the right thing."""
    model, x = normed("conv", 2, True, True), example("conv", 2)
    with pytest.raises(InputError, match="captured in evaluation mode") as raised:
        stages.prepare(stages.capture(model, x), qat=True)
    assert "train=True" in raised.value.remedy
    prepared = trainable(model, x)
    prepared(x)
    with pytest.raises(InputError, match="takes a Captured"):
        stages.prepare(prepared)
    with pytest.raises(InputError, match="has its own parameters"):
        stages.convert(prepared, stages.calibrate(prepared, [x], progress=False))


@pytest.mark.case("frontends C11")
def test_a_model_can_be_converted_again_after_more_training():
    """C11: convert does not change what it converts."""
    x = example("conv", 2)
    prepared = trainable(with_dropout(), x)
    prepared(x)
    first = stages.convert(prepared)
    assert torch.equal(stages.convert(prepared)(x), first(x))
    assert prepared.training
    loop(prepared, torch.optim.SGD(prepared.parameters(), lr=0.5), range(2))
    assert not torch.equal(stages.convert(prepared)(x), first(x))


@pytest.mark.slow(reason="trains a part and quantizes the whole")
@pytest.mark.case("frontends C11")
def test_a_part_is_trained_and_the_whole_quantized_afterwards():
    """C11: the part keeps the integers it was trained to, and all of it is one int8 program."""
    part, x = normed("conv", 2, True, True), example("conv", 2)
    prepared = trainable(part, x)
    stages.calibrate(prepared, [x], progress=False)
    loop(prepared.learn_scales(), torch.optim.SGD(prepared.parameters(), lr=0.01), range(2))
    trained = stages.convert(prepared)
    whole = nn.Sequential(trained.as_module(), nn.Conv2d(6, 2, 1)).eval()
    calibrated = stages.prepare(stages.capture(whole, x))
    reference = stages.convert(calibrated, stages.calibrate(calibrated, [x], progress=False))
    (integers,) = (buffer for buffer in trained.module.buffers() if buffer.dtype == torch.int8)
    assert any(torch.equal(buffer, integers) for buffer in reference.module.buffers() if buffer.shape == integers.shape)
    model = stages.compile(reference, isa="portable")
    assert model.coverage.macs == 1
    assert not model.coverage.islands


@pytest.mark.parametrize(
    ("model", "x", "match"),
    [
        (Body(lambda m, x: m.a(x)[0], a=nn.LSTM(4, 4)), torch.randn(3, 2, 4), "a recurrent layer"),
        (Body(lambda m, x: m.a(F.alpha_dropout(x, 0.5, m.training)), a=nn.Linear(4, 4)), torch.randn(3, 4), "random"),
    ],
)
def test_operators_that_cannot_be_trained_are_refused_by_name(model, x, match):
    with pytest.raises(UnsupportedError, match=match):
        trainable(model, x)


def test_a_model_prepared_for_training_says_how_to_save_it():
    prepared = trainable(with_dropout(), example("conv", 2))
    with pytest.raises(ArtifactError, match="cannot be pickled") as raised:
        pickle.dumps(prepared)
    assert "state_dict()" in raised.value.remedy


@pytest.mark.slow(reason="captures a network with a norm that no other operator reads")
def test_a_batch_norm_whose_result_is_not_read_needs_no_evaluation():
    model = Body(lambda m, x: (m.spare(m.c(x)), m.norm(m.c(x)))[1], c=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4))
    model.spare = nn.BatchNorm2d(4)
    x = torch.randn(4, 3, 8, 8)
    prepared = stages.prepare(stages.capture(model.train(), x, train=True), qat=True).train()
    prepared(x).sum().backward()
    assert_evaluates_alike(prepared.eval(), x)
