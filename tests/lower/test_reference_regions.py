"""The integer interpreter against the Q/DQ reference, region by region on the same integers: one step at most."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from support import lowering, nets
from support.lowering import (
    ROUNDED,
    assert_equal_quantized,
    captured_net,
    kinds,
    largest_differences,
    quantized,
    sqnr,
    tensors,
)
from support.nets import Body
from support.side_by_side import SideBySide
from support.slow_params import slow_params


def batch(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def conv(inputs: int = 3, outputs: int = 8, kernel: int = 3, padding=1, **rest) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=padding, **rest)


QUANTIZED = [net for net in nets.ALL if net is not nets.CrossNet]


@pytest.mark.case("problem 16")
@pytest.mark.parametrize("net", QUANTIZED, ids=lambda net: net.__name__)
def test_every_net_is_within_one_quantized_value_of_the_reference(net):
    model, captured = captured_net(net)
    reference, lowered = lowering.lowered(captured, nets.example(model, 16))
    x = nets.example(model, 8, seed=3)
    differences = assert_equal_quantized(reference, lowered, x)
    assert differences.rate <= 1e-4
    for ours, theirs, exact in zip(*(tensors(run(x.clone())) for run in (lowered, reference, model)), strict=True):
        assert ours.shape == exact.shape
        assert sqnr(ours, theirs) > 60
        assert sqnr(theirs, exact) > 25


def test_the_comparison_detects_a_wrong_factor():
    model = nets.randomize(nets.Residual())
    reference, lowered = quantized(model, nets.example(model, 4))
    for name, array in lowered.graph.constants.items():
        if name.endswith("_factor_b"):
            array *= 1.1
    with pytest.raises(AssertionError, match="more than the contract allows"):
        assert_equal_quantized(reference, lowered, nets.example(model, 4))


X, X8 = (4, 3, 9, 9), (4, 8, 9, 9)
ODD = {
    "conv without bias": (X, lambda m, x: m.c(x), {"c": conv(bias=False)}),
    "batch norm without affine": (X, lambda m, x: m.b(m.c(x)), {"c": conv(), "b": nn.BatchNorm2d(8, affine=False)}),
    "relu6": (X, lambda m, x: m.d(F.relu6(m.c(x))), {"c": conv(), "d": conv(8)}),
    "hardtanh": (X, lambda m, x: m.d(F.hardtanh(m.c(x), -0.3, 0.7)), {"c": conv(), "d": conv(8)}),
    "clamp from below": (X, lambda m, x: m.d(m.c(x).clamp(min=-0.31)), {"c": conv(), "d": conv(8)}),
    "clamp from above": (X, lambda m, x: m.d(m.c(x).clamp(max=0.31)), {"c": conv(), "d": conv(8)}),
    "clamp to infinity": (X, lambda m, x: m.d(m.c(x).clamp(-float("inf"), 0.3)), {"c": conv(), "d": conv(8)}),
    "x + x": (X, lambda m, x: (lambda y: m.d(y + y))(m.c(x)), {"c": conv(), "d": conv(8)}),
    "conv(x) + x of the input": (X8, lambda m, x: m.c(x) + x, {"c": conv(8)}),
    "relu(x + conv(x))": (X8, lambda m, x: F.relu(x + m.c(x)), {"c": conv(8)}),
    "alpha on the operand": (X8, lambda m, x: m.d(torch.add(m.c(x), x, alpha=2.5)), {"c": conv(8), "d": conv(8)}),
    "alpha on the conv": (X8, lambda m, x: m.d(torch.add(x, m.c(x), alpha=-0.5)), {"c": conv(8), "d": conv(8)}),
    "alpha without a conv": (
        X8,
        lambda m, x: m.d(torch.add(F.relu(m.c(x)), F.max_pool2d(m.e(x), 3, 1, 1), alpha=-0.5)),
        {"c": conv(8), "d": conv(8), "e": conv(8)},
    ),
    "sum of two convs": (X, lambda m, x: F.relu(m.c(x) + m.d(x)), {"c": conv(), "d": conv()}),
    "both branches read later": (
        X,
        lambda m, x: (lambda a, b: (m.e(a + b), a, b))(m.c(x), m.d(x)),
        {"c": conv(), "d": conv(), "e": conv(8)},
    ),
    "avg_pool ceil": (X, lambda m, x: m.d(F.avg_pool2d(m.c(x), 3, 2, 1, ceil_mode=True)), {"c": conv(), "d": conv(8)}),
    "case 37, avg_pool without padding in the count": (
        X,
        lambda m, x: m.d(F.avg_pool2d(m.c(x), 3, 2, 1, True, False)),
        {"c": conv(), "d": conv(8)},
    ),
    "avg_pool with a divisor": (
        X,
        lambda m, x: m.d(F.avg_pool2d(m.c(x), (3, 2), (2, 3), (1, 0), divisor_override=5)),
        {"c": conv(), "d": conv(8)},
    ),
    "avg_pool ceil, windows of many sizes": (
        (2, 3, 10, 11),
        lambda m, x: m.d(F.avg_pool2d(m.c(x), (3, 4), (2, 3), (1, 2), True)),
        {"c": conv(), "d": conv(8)},
    ),
    "adaptive pool 7x5 to 3x2": ((4, 3, 7, 5), lambda m, x: F.adaptive_avg_pool2d(m.c(x), (3, 2)), {"c": conv()}),
    "adaptive pool that enlarges": ((4, 3, 3, 3), lambda m, x: F.adaptive_avg_pool2d(m.c(x), (5, None)), {"c": conv()}),
    "case 37, mean over 49": ((4, 3, 7, 7), lambda m, x: m.c(x).mean((-1, -2), keepdim=True), {"c": conv()}),
    "max_pool with dilation": ((4, 3, 12, 11), lambda m, x: F.max_pool2d(m.c(x), 3, 2, 1, 2), {"c": conv()}),
    "max_pool ceil": ((4, 3, 12, 11), lambda m, x: F.max_pool2d(m.c(x), (3, 2), (2, 3), 1, 1, True), {"c": conv()}),
    "max_pool first": ((4, 3, 12, 11), lambda m, x: m.c(F.max_pool2d(x, 3, 2, 1)), {"c": conv()}),
    "slices from the end and with steps": (X, lambda m, x: m.d(m.c(x)[:, :, -7:-1, 1::3]), {"c": conv(), "d": conv(8)}),
    "slice of channels": (X, lambda m, x: m.d(m.c(x)[:, 2:6]), {"c": conv(), "d": conv(4)}),
    "pad on one side": (X, lambda m, x: m.d(F.pad(m.c(x), (0, 2, 1, 0))), {"c": conv(), "d": conv(8)}),
    "even kernels with same padding": (
        X,
        lambda m, x: m.d(F.relu(m.c(x))),
        {"c": conv(kernel=4, padding="same"), "d": conv(8, 8, (2, 5), padding="same", dilation=(3, 2))},
    ),
    "case 43, groups, depthwise, stride 3": (
        X8,
        lambda m, x: m.d(F.relu(m.c(x))),
        {"c": conv(8, 12, groups=4), "d": conv(12, 24, groups=12, stride=3)},
    ),
    "case 43, dilations": (
        X,
        lambda m, x: m.d(F.relu(m.c(x))),
        {"c": conv(dilation=2, padding=2), "d": conv(8, 8, dilation=(1, 3), padding=(0, 3), stride=(3, 1))},
    ),
    "case 43, one channel, one tap": ((4, 1, 5, 5), lambda m, x: m.d(m.c(x)), {"c": conv(1, 1), "d": conv(1, 1, 1, 0)}),
    "one pixel": ((4, 3, 1, 1), lambda m, x: m.d(F.relu(m.c(x))), {"c": conv(), "d": conv(8, 8, 1, 0)}),
    "view to an image": (
        (4, 20),
        lambda m, x: m.c(m.a(x).view(-1, 3, 5, 4)),
        {"a": nn.Linear(20, 60), "c": conv()},
    ),
    "squeezes": (
        X,
        lambda m, x: m.a(F.adaptive_avg_pool2d(m.c(x), 1).squeeze(-1).squeeze(-1)),
        {"c": conv(), "a": nn.Linear(8, 5)},
    ),
}


LIKE_OTHERS = (
    "relu6",
    "clamp from above",
    "conv(x) + x of the input",
    "alpha on the operand",
    "sum of two convs",
    "avg_pool ceil",
    "avg_pool with a divisor",
    "adaptive pool that enlarges",
    "max_pool first",
    "slice of channels",
    "case 43, dilations",
)
FEW = tuple(name for name in ODD if name not in LIKE_OTHERS)


@pytest.mark.slow(reason="many graphs in one model; the named nets run always")
@pytest.mark.case("backend 25")
@pytest.mark.parametrize(
    "names",
    [FEW, *slow_params((tuple(ODD),), reason="other numbers of what some of the few have")],
    ids=["few", "all"],
)
def test_unusual_but_valid_graphs_run_in_int8(names, subtests):
    rows = {name: (nets.randomize(Body(ODD[name][1], **ODD[name][2])), [batch(*ODD[name][0])]) for name in names}
    model = SideBySide(rows).eval()
    reference, lowered = quantized(model, *model.inputs)
    assert not lowered.islands, [str(skip) for skip in lowered.skipped]
    assert_equal_quantized(reference, lowered, *[batch(*x.shape, seed=1) for x in model.inputs])
    found, expected = lowered(*model.inputs), model(*model.inputs)
    for name in names:
        with subtests.test(name=name):
            for ours, exact in zip(tensors(found[name]), tensors(expected[name]), strict=True):
                assert ours.shape == exact.shape
                assert sqnr(ours, exact) > 28


@pytest.mark.case("frontends A3")
@pytest.mark.parametrize(
    "shape",
    [(16,), *slow_params(((5, 16),), ((2, 5, 16),), reason="ranks between those of the others"), (2, 3, 5, 16)],
    ids=len,
)
def test_linear_layers_of_any_rank_equal_flattened_ones(shape):
    model = nets.randomize(Body(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Linear(16, 12), b=nn.Linear(12, 7, bias=False)))
    x = batch(*shape)
    reference, lowered = quantized(model, x)
    _, flat = quantized(model, x.reshape(-1, 16))
    assert_equal_quantized(reference, lowered, x)
    assert torch.equal(lowered(x).reshape(-1, 7), flat(x.reshape(-1, 16)))


@pytest.mark.case("frontends A3")
def test_inputs_that_are_not_contiguous():
    model = nets.randomize(Body(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Linear(16, 12), b=nn.Linear(12, 7)))
    _, lowered = quantized(model, batch(5, 16))
    wide = batch(16, 10)
    assert torch.equal(lowered(wide.t()[::2]), lowered(wide.t()[::2].contiguous()))


@pytest.mark.slow(reason="a residual network; inputs that are not contiguous are tested below")
@pytest.mark.case("backend 23")
def test_channels_last_inputs_match_contiguous_ones():
    model = nets.randomize(nets.Residual())
    x = nets.example(model, 3)
    _, lowered = quantized(model, x.contiguous(memory_format=torch.channels_last))
    assert torch.equal(lowered(x), lowered(x.contiguous(memory_format=torch.channels_last)))


@pytest.mark.case("calibration 41")
def test_an_empty_batch_gives_an_empty_result():
    model = nets.randomize(nets.MultiOutput())
    reference, lowered = quantized(model, nets.example(model, 2))
    shapes = [t.shape for t in tensors(lowered(torch.zeros(0, *model.shape)))]
    assert shapes == [(0, 5), (0, 8, 10, 10), (0, 5)]
    assert shapes == [t.shape for t in tensors(reference(torch.zeros(0, *model.shape)))]


@pytest.mark.slow(reason="drawn networks are captured one by one; the named nets run always")
@given(st.data())
@settings(max_examples=20)
def test_convolutions_of_any_geometry_match_the_reference(data):
    draw = data.draw
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    per_group, outputs = draw(st.integers(1, 5)), draw(st.integers(1, 4)) * groups
    kernel, dilation = (draw(st.tuples(st.integers(1, 4), st.integers(1, 3))) for _ in "kd")
    stride, padding = (draw(st.tuples(st.integers(low, 3), st.integers(low, 3))) for low in (1, 0))
    size = [(k - 1) * d + 1 + draw(st.integers(0, 6)) for k, d in zip(kernel, dilation, strict=True)]
    module = nn.Conv2d(per_group * groups, outputs, kernel, stride, padding, dilation, groups, draw(st.booleans()))
    model = nets.randomize(Body(lambda m, x: F.relu(m.c(x)), c=module), seed=draw(st.integers(0, 99)))
    x = batch(draw(st.integers(1, 3)), per_group * groups, *size, seed=draw(st.integers(0, 99)))
    reference, lowered = quantized(model, x, recipe=ROUNDED)
    assert kinds(lowered) == ["quantize", "conv2d", "requantize", "dequantize"]
    assert_equal_quantized(reference, lowered, x)
    assert lowered(x).shape == model(x).shape


@pytest.mark.slow(reason="drawn networks are captured one by one; the named nets run always")
@given(st.data())
@settings(max_examples=20)
def test_pools_of_any_geometry_match_the_reference(data):
    draw = data.draw
    kernel, stride = draw(st.tuples(st.integers(1, 4), st.integers(1, 4))), draw(st.integers(1, 3))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    ceil, counted = draw(st.booleans()), draw(st.booleans())
    size = draw(st.tuples(st.integers(4, 11), st.integers(4, 11)))
    pool = draw(
        st.sampled_from(
            [
                nn.MaxPool2d(kernel, stride, padding, ceil_mode=ceil),
                nn.AvgPool2d(kernel, stride, padding, ceil, counted),
                nn.AdaptiveAvgPool2d(kernel),
            ]
        )
    )
    model = nets.randomize(Body(lambda m, x: m.pool(m.c(x)), c=conv(2, 3), pool=pool), seed=draw(st.integers(0, 99)))
    x = batch(2, 2, *size, seed=draw(st.integers(0, 99)))
    reference, lowered = quantized(model, x)
    assert not lowered.islands
    assert_equal_quantized(reference, lowered, x)
    assert lowered(x).shape == model(x).shape


@pytest.mark.slow(reason="drawn networks are captured one by one; the named nets run always")
@given(st.data())
@settings(max_examples=20)
def test_sums_of_any_scales_are_bit_identical(data):
    """Case 32: operands of very different scales; the small one may vanish, the sum stays within one step."""
    draw = data.draw
    left, right = (10.0 ** draw(st.integers(-4, 3)) for _ in "ab")
    alpha = draw(st.sampled_from([1, -1, 0.37, 3, 0]))
    relu = draw(st.sampled_from([F.relu, F.relu6, lambda t: t]))
    model = nets.randomize(Body(lambda m, x: relu(torch.add(m.c(x), m.d(x), alpha=alpha)), c=conv(2, 3), d=conv(2, 3)))
    with torch.no_grad():
        for part, factor in ((model.c, left), (model.d, right)):
            part.weight *= factor
            part.bias *= factor
    x = batch(2, 2, 5, 5, seed=draw(st.integers(0, 99)))
    reference, lowered = quantized(model, x, recipe=ROUNDED)
    assert "add" in kinds(lowered)
    assert not lowered.islands
    assert_equal_quantized(reference, lowered, x)


def test_mismatches_are_counted_where_the_reference_quantizes():
    model = nets.randomize(nets.ConvBnRelu())
    x = nets.example(model, 2)
    differences = largest_differences(*quantized(model, x, recipe=ROUNDED), x)
    assert len(differences.worst) == 3
    assert differences.total == 2 * 144 * (3 + 8 + 8)
