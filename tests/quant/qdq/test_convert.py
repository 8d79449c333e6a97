"""Ranges -> parameters -> the Q/DQ reference model."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from intaglio import numerics
from intaglio.errors import CalibrationError, UnsupportedError
from intaglio.fxgraph.node_info import info
from intaglio.fxgraph.nodes import operator
from intaglio.ir import DType
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.qdq.convert import convert
from intaglio.quant.recipes.recipe import Recipe
from intaglio.tracing import capture
from support import nets
from support.lowering import assert_equal_quantized, quantized, sqnr, tensors
from support.nets import Body
from support.slow_params import slow_params

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
INPUT = "#0/input.args_0"


def conv(inputs: int = 3, outputs: int = 4, **rest) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **rest)


def one(module: nn.Module, x: torch.Tensor, recipe=None):
    """A model of one module: reference and integer graph, compared."""
    found = quantized(Body(lambda m, x: m.a(x), a=module), x, recipe=recipe)
    assert_equal_quantized(*found, x)
    return found


@pytest.mark.case("frontends A19", "problem 13", *(f"calibration {n}" for n in (1, 4, 5, 6, 19)))
@pytest.mark.parametrize(
    ("x", "scale", "zero_point"),
    [
        (torch.zeros(4, 3, 8, 8), 1.0, 0),
        (torch.full((4, 3, 8, 8), 5.0), 5 / 255, 0),
        (torch.full((4, 3, 8, 8), -5.0), 5 / 255, 255),
        (torch.full((4, 3, 8, 8), -0.0), 1.0, 0),
    ],
)
def test_constant_inputs_have_exact_parameters(x, scale, zero_point):
    reference, lowered = one(conv(), x)
    assert reference.qparams[INPUT].scale == (float(np.float32(scale)),)
    assert reference.qparams[INPUT].zero_point == (zero_point,)
    assert sqnr(lowered(x), conv().eval()(x) * 0 + reference(x)) > 100


@pytest.mark.case("calibration 1")
def test_all_zero_data_gives_exactly_zero():
    _, lowered = one(conv(bias=False), X * 0)
    assert torch.equal(lowered(X * 0), torch.zeros(4, 4, 8, 8))


@pytest.mark.case("calibration 21")
def test_a_range_without_zero_is_widened_to_it():
    reference, _ = one(conv(), X.sigmoid() + 5, Recipe.of({"*": {"method": "minmax"}}))
    q = reference.qparams[INPUT]
    assert q.zero_point == (0,)
    assert q.scale[0] == pytest.approx((X.sigmoid().max() + 5).item() / 255, rel=1e-6)


@pytest.mark.case("frontends A19", "calibration 17", "problem 13")
@pytest.mark.parametrize("tiny", [1e-30, 1e-36])
def test_tiny_ranges_have_a_finite_reciprocal(tiny):
    reference, lowered = one(conv(bias=False), X * tiny)
    assert np.isfinite(numerics.reciprocal(reference.qparams[INPUT].scale[0]))
    assert torch.isfinite(lowered(X * tiny)).all()


@pytest.mark.case("calibration 18")
def test_the_widest_range_of_float32_has_a_finite_scale():
    prepared = prepare(capture(Body(lambda m, x: m.a(x), a=conv(bias=False)).eval(), X))
    most = torch.full((1, 3, 8, 8), 3e38)
    reference = convert(prepared, calibrate(prepared, [most, -most]))
    assert np.isfinite(reference.qparams[INPUT].scale[0])


@pytest.mark.case("calibration 2")
def test_an_all_zero_channel_keeps_its_bias_and_leaves_the_others_alone():
    module = conv()
    before, _ = one(module, X)
    with torch.no_grad():
        module.weight[1] = 0
    after, lowered = one(module, X)
    same = [i for i in range(4) if i != 1]
    a, b = (np.array(r.qparams["a.weight"].scale)[same] for r in (before, after))
    np.testing.assert_array_equal(a, b)
    expected = torch.full((4, 8, 8), module.bias[1].item())
    torch.testing.assert_close(lowered(X)[:, 1], expected, rtol=2**-20, atol=0)


@pytest.mark.case("calibration 7")
def test_one_channel_per_channel_equals_per_tensor():
    module = conv(3, 1)
    a, b = (one(module, X, Recipe.of({"*": {"weights": kind}}))[1](X) for kind in ("channel", "tensor"))
    assert torch.equal(a, b)


@pytest.mark.case("calibration 35")
@pytest.mark.parametrize("bias", [None, 0.0, 0.5, 1e9])
def test_biases_of_any_size_match_the_reference(bias):
    module = conv(bias=bias is not None)
    if bias is not None:
        with torch.no_grad():
            module.bias.fill_(bias)
    reference, lowered = one(module, X)
    assert sqnr(lowered(X), module(X)) > (30 if bias != 1e9 else 100)
    assert any("enlarged to fit the bias" in line for line in reference.notes) is (bias == 1e9)


@pytest.mark.case("frontends B17")
def test_bias_scales_are_products_and_zero_points_zero():
    for kind in ("channel", "tensor"):
        reference, _ = one(conv(), X, Recipe.of({"*": {"weights": kind}}))
        q, x, w = (reference.qparams[name] for name in ("a#0/conv2d.0:bias", INPUT, "a.weight"))
        np.testing.assert_array_equal(q.scale, numerics.accumulator_scale(x.scale, w.scale))
        assert set(q.zero_point) == {0}
        node = next(n for n in reference.module.graph.nodes if info(n).path == "a#0/conv2d.0:bias")
        assert info(node).type.dtype is DType.I32


@pytest.mark.case("calibration 29")
def test_a_shared_weight_is_scaled_for_the_larger_bias_and_stored_once():
    def body(m, x):
        return m.c(m.c(x) * 1e-4)

    model = Body(body, c=conv(3, 3))
    with torch.no_grad():
        model.c.bias.fill_(1e4)
    reference, lowered = quantized(model, X)
    assert_equal_quantized(reference, lowered, X)
    integers = [n for n in reference.module.graph.nodes if n.op == "get_attr" and info(n).type.dtype is DType.S8]
    assert len(integers) == 1
    assert len(integers[0].users) == 2


@pytest.mark.case("calibration 29")
def test_tied_parameters_stay_one_tensor_or_agree():
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    b.weight = a.weight
    reference, lowered = quantized(nets.randomize(Body(lambda m, x: m.b(F.relu(m.a(x))), a=a, b=b)), X)
    assert_equal_quantized(reference, lowered, X)
    scales = {q.scale for name, q in reference.qparams.items() if name.endswith("weight")}
    assert len(scales) == 1


@pytest.mark.case("frontends B25")
@pytest.mark.parametrize(
    "groups", [*slow_params(1, 4, reason="layers of fewer groups"), 8], ids=["plain", "grouped", "depthwise"]
)
def test_channel_scales_win_where_channels_differ(groups):
    module = conv(8, 8, groups=groups)
    with torch.no_grad():
        module.weight *= torch.logspace(-2, 0, 8).reshape(8, 1, 1, 1)
    x = torch.cat([X, X, X[:, :2]], 1)
    errors = []
    for kind in ("channel", "tensor"):
        reference, _ = one(module, x, Recipe.of({"*": {"weights": kind}}))
        errors.append((reference(x) - module(x)).square().mean((0, 2, 3)))
    assert (errors[0] <= errors[1] * 1.05).all()
    assert errors[0][0] < errors[1][0] / 10


@pytest.mark.case("frontends B26", "backend 27")
def test_seven_bits_stay_in_0_127():
    reference, lowered = one(conv(), X, Recipe.of({"*": {"bits": 7}}))
    q = reference.qparams[INPUT]
    assert (q.qmin, q.qmax) == (0, 127)
    assert lowered.graph.types["args_0_u8"].q.qmax == 127


@pytest.mark.case("calibration 36")
@pytest.mark.parametrize(
    ("body", "modules"),
    [
        (lambda m, x: m.a(F.relu(x)), {"a": conv()}),
        (lambda m, x: F.relu6(m.a(x * 9)), {"a": conv()}),
        (lambda m, x: F.hardtanh(m.a(x)), {"a": conv()}),
        (lambda m, x: m.a(x).clamp(min=0.37), {"a": conv()}),
        (lambda m, x: F.leaky_relu(m.a(x)), {"a": conv()}),
    ],
)
def test_clamps_fused_and_unfused_agree(body, modules):
    """Unfused: another setting on the activation function puts a site between it and the convolution's result."""
    reference, lowered = quantized(nets.randomize(Body(body, **modules)), X)
    assert_equal_quantized(reference, lowered, X)
    for ours, theirs in zip(tensors(lowered(X)), tensors(reference(X)), strict=True):
        assert (ours - theirs).abs().max() <= max(q.scale[0] for q in reference.qparams.values())


@pytest.mark.case("calibration 36")
@given(st.floats(-2, 2), st.floats(1e-3, 0.1), st.integers(0, 255))
@settings(max_examples=3 * settings.default.max_examples)
def test_a_bound_is_rounded_as_its_value_would_be(bound, scale, zero_point):
    scale = float(np.float32(scale))
    x = np.linspace(-3, 3, 601, dtype=np.float32)
    unfused = numerics.quantize(np.maximum(x, np.float32(bound)), scale, zero_point, 0, 255)
    low, high = numerics.clamp_bounds(bound, None, scale, zero_point, 0, 255)
    np.testing.assert_array_equal(np.clip(numerics.quantize(x, scale, zero_point, 0, 255), low, high), unfused)


@pytest.mark.case("calibration 34", "backend 40")
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_borders_are_exact_with_every_padding_mode_and_a_zero_point(mode):
    module = conv(padding_mode=mode)
    reference, lowered = one(module, X + 1)
    assert next(iter(reference.qparams.values())).zero_point[0] > 20
    error = (lowered(X + 1) - module(X + 1)).abs()
    assert error[..., 0, :].max() <= 2 * error[..., 1:-1, 1:-1].max()


@pytest.mark.case("calibration 37")
def test_padding_is_never_the_maximum_of_a_max_pool():
    _, lowered = quantized(nets.randomize(Body(lambda m, x: F.max_pool2d(m.a(x) - 10, 3, 1, 1), a=conv())), X)
    assert lowered(X).max() < -3


@pytest.mark.case("frontends B15")
def test_every_dequantize_inside_has_one_reader():
    model = nets.randomize(nets.Residual())
    reference, _ = quantized(model, nets.example(model))
    dequantizes = [n for n in reference.module.graph.nodes if operator(n).startswith("quantized_decomposed.dequantize")]
    assert all(len(node.users) == 1 for node in dequantizes)
    sources = [n.args[0] for n in reference.module.graph.nodes if "quantize_per_tensor" in n.name[:19]]
    assert len(sources) == len(set(sources)), "one quantize a value"


@pytest.mark.case("frontends A15")
def test_weights_are_integers_and_a_quarter_of_the_bytes():
    model = nets.randomize(nets.ConvBnRelu(2, 16))
    reference, lowered = quantized(model, nets.example(model))
    assert {b.dtype for b in reference.module.buffers() if b.dim() > 1} == {torch.int8}
    stored = sum(array.nbytes for array in lowered.graph.constants.values())
    assert stored < 0.35 * sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value):
    module = conv()
    with torch.no_grad():
        module.weight[0, 0, 0, 0] = value
    with pytest.raises((UnsupportedError, CalibrationError), match=r"a\.weight|a#0"):
        quantized(Body(lambda m, x: m.a(x), a=module), X)


@pytest.mark.slow(reason="converts a larger network twice")
def test_converting_twice_gives_the_same_text_and_leaves_prepared_usable():
    model = nets.randomize(nets.OptionA())
    prepared = prepare(capture(model, nets.example(model)))
    ranges = calibrate(prepared, [nets.example(model)])
    first = convert(prepared, ranges)
    assert convert(prepared, ranges).text() == first.text()
    assert "simulation in float" in repr(first)
    prepared(nets.example(model))
