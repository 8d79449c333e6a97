"""Models that others quantized, taken as they are: every form of levels that they may have."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers torch.ops.quantized_decomposed
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import intaglio
from intaglio import stages
from intaglio.errors import UnsupportedError
from intaglio.fxgraph.graph_passes import copy_graph, run
from intaglio.quant.qdq.imported.qdq_constants import convert_biases_to_i32
from intaglio.quant.qdq.prepare_passes import PTQ_PASSES, QDQ_PASSES
from support.nets import Body, randomize
from support.slow_params import slow_params, slow_params_except

OPS = torch.ops.quantized_decomposed
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
U8, S8 = (0.04, 120, 0, 255, torch.uint8), (0.04, -8, -128, 127, torch.int8)
RELU = (0.02, 0, 0, 255, torch.uint8)


def rounded(x, *parameters):
    """x in the nearest of its levels."""
    return OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *parameters), *parameters)


class Weight(nn.Module):
    """Quantized values behind a dequantize by channel, or floats behind both."""

    def __init__(self, shape, dtype=torch.int8, axis=0, zero=0, folded=True):
        super().__init__()
        low, high = (-127, 127) if dtype is torch.int8 else (0, 255)
        draw = torch.Generator().manual_seed(math.prod(shape))
        levels = torch.randint(low, high + 1, shape, generator=draw).to(dtype)
        scales = 0.002 + 0.002 * torch.rand(shape[axis], generator=draw)
        zeros = torch.full((shape[axis],), zero)
        self.parameters_ = axis, low, high, dtype
        for name, tensor in {"levels": levels, "scales": scales, "zeros": zeros}.items():
            self.register_buffer(name, tensor)
        if not folded:
            self.real = nn.Parameter(self().detach())
        self.folded = folded

    def forward(self):
        given = self.scales, self.zeros, *self.parameters_
        levels = self.levels if getattr(self, "folded", True) else OPS.quantize_per_channel(self.real, *given)
        return OPS.dequantize_per_channel(levels, *given)


def taken(model, x=X, exact=True):
    """The reference; all it computes has the model's bits, but for biases."""
    captured = stages.capture(model.eval(), x)
    module = copy_graph(captured.module)
    run(module, [step for step in PTQ_PASSES.patterns if step is not convert_biases_to_i32])
    results = module(x)
    assert not exact or torch.equal(results[0], model(x))
    before, reference = str(module.graph), stages.from_qdq(captured)
    run(module, [step for step in QDQ_PASSES if step is not convert_biases_to_i32])
    assert str(module.graph) == before
    before = reference.text()
    run(reference.module, QDQ_PASSES)
    assert reference.text() == before
    return reference


def same_bits(reference, x=X):
    """The program, whose results are the integer graph's."""
    lowered = stages.requantize(reference)
    model = stages.compile(lowered)
    assert torch.equal(model(x), lowered(x))
    return model


def body(first=U8, last=RELU, **weight):
    def forward(m, x):
        y = F.relu(F.conv2d(rounded(x, *first), m.w(), m.bias, padding=1))
        return rounded(y, *last)

    model = Body(forward, w=Weight((4, 3, 3, 3), **weight))
    model.bias = nn.Parameter(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    return model


@pytest.mark.parametrize(
    "first",
    [
        U8,
        S8,
        *slow_params(
            ((0.04, 60, 0, 127, torch.uint8),),
            ((0.04, 3, -64, 63, torch.int8),),
            reason="fewer levels of the same types",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("folded", [True, *slow_params(False, reason="constants that are not folded")])
def test_every_kind_of_activation_and_weight_is_one_kernel(first, folded):
    model = body(first, folded=folded)
    reference = taken(model)
    native = same_bits(reference)
    assert (reference(X) - model(X)).abs().max() <= RELU[0] * 1.001
    assert native.coverage.macs == 1
    assert native.coverage.operators == 1
    assert not native.coverage.islands


@functools.cache
def captured():
    return stages.capture(body().eval(), X)


@pytest.mark.slow(reason="draws many scales and zero points; named ones are compared above")
@settings(max_examples=2 * settings.default.max_examples)
@given(
    st.sampled_from([torch.uint8, torch.int8]),
    st.integers(0, 255),
    st.integers(0, 100),
    st.integers(101, 255),
    st.floats(2.0**-10, 2.0**-3),
    st.integers(0, 2**31),
)
def test_imported_quantized_values_match_the_given_model(dtype, zero, low, high, scale, seed):
    """Scales that are no float32, any zero point, fewer levels: what the integer graph computes is at most one level
    off, and what it reads is not off at all."""
    shift = 128 if dtype is torch.int8 else 0
    first = (scale, min(max(zero, low), high) - shift, low - shift, high - shift, dtype)
    module = copy_graph(captured().module)
    for node in module.graph.nodes:
        if str(node.target).startswith("quantized_decomposed") and node.args[1:] == U8:
            node.args = (node.args[0], *first)
    module.recompile()
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    reference = stages.from_qdq(replace(captured(), module=module))
    q = next(iter(reference.qparams.values()))
    assert (q.step, q.zero, q.qmin, q.qmax) == (float(np.float32(scale)), first[1] + shift, low, high)
    off = (stages.requantize(reference)(x) - module(x)[0]).abs() / RELU[0]
    assert off.max() < 1.01
    assert (off > 0.5).float().mean() < 0.02


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        *slow_params(({"zero": 3}, "zero points"), reason="zero points of another type"),
        ({"axis": 1}, "scales along axis 1"),
        ({"dtype": torch.uint8, "zero": 127}, "zero points"),
    ],
)
def test_weights_that_kernels_do_not_have_stay_in_float_with_a_reason(weight, reason):
    model = body(**weight)
    reference = taken(model)
    native = same_bits(reference)
    assert (native(X) - model(X)).abs().max() <= RELU[0] * 1.001
    (part,) = [part for part in native.coverage.floats if part.operator == "aten.conv2d.default"]
    assert reason in part.reason


def test_uint8_weights_with_zero_point_128_become_int8():
    model = body(dtype=torch.uint8, zero=128)
    native = same_bits(taken(model))
    assert native.coverage.operators == 1
    assert (native(X) - model(X)).abs().max() <= RELU[0] * 1.001


def test_a_bias_with_another_scale_is_requantized():
    def forward(m, x):
        bias = OPS.dequantize_per_tensor(m.bias, 0.001, 0, -(2**31), 2**31 - 1, torch.int32)
        return rounded(F.conv2d(rounded(x, *U8), m.w(), bias), *U8)

    model = Body(forward, w=Weight((4, 3, 3, 3)))
    model.register_buffer("bias", torch.tensor([100, -200, 3000, 0], dtype=torch.int32))
    reference = taken(model)
    assert same_bits(reference).coverage.operators == 1
    assert (reference(X) - model(X)).abs().max() <= U8[0] * 1.001


def test_a_bias_that_does_not_fit_leaves_the_layer_in_float():
    model = body()
    model.bias.data[1] = 3e5
    native = same_bits(taken(model))
    assert [part.reason for part in native.coverage.floats] == ["its bias is larger than 2^30 * scale_x * scale_w"]


def test_channels_with_zero_weights_take_any_bias():
    model = body()
    model.w.levels[1] = 0
    model.bias.data[1] = 3e5
    native = same_bits(taken(model))
    assert native.coverage.operators == 1
    assert (native(X) - model(X)).abs().max() <= RELU[0] * 1.001


BETWEEN = {
    "a pool": lambda x: F.max_pool2d(x, 2),
    "a reshape": lambda x: x.flatten(2).unflatten(2, (8, 8)),
    "an order": lambda x: x.transpose(2, 3),
    "padding": lambda x: F.pad(x, (1, 1)),
    "a pool and a clamp": lambda x: F.max_pool2d(x, 2).clamp(-0.3, 0.7),
    "two values": lambda x: torch.cat([x, x.flip(1)], 1)[:, :3],
    "a rounded pool": lambda x: F.max_pool2d(rounded(x, *S8), 2),
}


@pytest.mark.parametrize(
    "name",
    slow_params_except("an order", "padding", of=BETWEEN, reason="other operators that select values"),
)
@pytest.mark.parametrize(
    "where", [*slow_params("in front", reason="the same operators on the other side of a layer"), "behind"]
)
def test_quantize_is_propagated_through_operators_that_select_values(name, where):
    """Quantized behind it, or dequantized in front of it."""
    between = BETWEEN[name]

    def forward(m, x):
        x = between(rounded(x, *U8)) if where == "in front" else rounded(between(x), *U8)
        return rounded(F.conv2d(x, m.w()), *U8)

    model = Body(forward, w=Weight((4, 3, 3, 3)))
    native = same_bits(taken(model))
    assert (native(X) - model(X)).abs().max() <= U8[0] * 1.001
    if "two" not in name and "clamp" not in name:
        assert not native.coverage.islands, native.coverage


ODD = {
    "returned levels": lambda x: OPS.quantize_per_tensor(x, *S8).to(torch.float32),
    "shifted levels": lambda x: OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *U8) // 2, *U8),
    "other parameters": lambda x: OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *U8), 0.1, 7, *U8[2:]),
    "16 bits": lambda x: rounded(x, 0.001, 5, -32768, 32767, torch.int16),
    "16 bits unsigned": lambda x: rounded(x, 0.001, 32000, 0, 65535, torch.uint16),
    "32 bits": lambda x: rounded(x, 0.00001, 0, -(2**31), 2**31 - 1, torch.int32),
    "a zero point outside": lambda x: rounded(x, 0.01, -30, 0, 255, torch.uint8),
    "a constant": lambda x: x + rounded(torch.linspace(-1, 1, 8), *S8),
}


@pytest.mark.parametrize(
    "name",
    slow_params_except("16 bits", of=ODD, reason="other numbers without a kernel"),
)
def test_quantized_types_without_kernels_are_computed_as_written(name):
    model = Body(lambda m, x: rounded(F.conv2d(ODD[name](x), m.w()), *U8), w=Weight((4, 3, 3, 3)))
    reference = taken(model)
    assert torch.equal(reference(X), model(X))
    native = same_bits(reference)
    assert (native(X) - reference(X)).abs().max() <= U8[0] * 1.001
    assert ((native(X) - reference(X)).abs() > 0.001).float().mean() < 0.01


@pytest.mark.slow(reason="scales per channel at borders have a file of tests")
def test_per_channel_quantized_activations_are_computed_as_written():
    def forward(m, x):
        given = m.scales, m.zeros, 1, 0, 255, torch.uint8
        return rounded(F.conv2d(OPS.dequantize_per_channel(OPS.quantize_per_channel(x, *given), *given), m.w()), *U8)

    model = Body(forward, w=Weight((4, 3, 3, 3)))
    model.register_buffer("scales", torch.tensor([0.01, 0.02, 0.04]))
    model.register_buffer("zeros", torch.tensor([3, 100, 128]))
    reference = taken(model)
    assert torch.equal(same_bits(reference)(X), reference(X))


@pytest.mark.parametrize(
    ("zero", "low", "macs"),
    [(0, -127, 1), *slow_params((0, -128, 0), (9, -127, 0), reason="second operands whose products stay in float")],
)
def test_a_matrix_product_has_a_symmetric_second_operand(zero, low, macs):
    def forward(m, x):
        a, b = rounded(x, *U8), rounded(x.tanh(), 0.01, zero, low, 127, torch.int8)
        return rounded(torch.matmul(a, b.transpose(2, 3)), 0.1, 90, 0, 255, torch.uint8)

    model = Body(forward)
    native = same_bits(taken(model))
    assert (native(X) - model(X)).abs().max() <= 0.1001
    assert native.coverage.macs == macs
    reasons = [part.reason for part in native.coverage.floats if "its second operand has the range" in part.reason]
    assert len(reasons) == 1 - macs


@pytest.mark.slow(reason="operators that stay as they are written are above")
def test_float_operators_between_quantized_values_stay_float():
    def forward(m, x):
        y = torch.softmax(rounded(F.conv2d(rounded(x, *U8), m.w()), *U8), 1)
        return F.conv2d(rounded(y, 1 / 256, 0, 0, 255, torch.uint8), m.v())

    model = Body(forward, w=Weight((4, 3, 3, 3)), v=Weight((2, 4, 1, 1)))
    native = same_bits(taken(model))
    parts = [*native.coverage.floats, *native.coverage.loops]
    assert {part.operator.split(".")[1] for part in parts} == {"softmax"} or {p.operator for p in parts} == {
        "aten._softmax.default"
    }
    assert native.coverage.macs == 1


def dynamic(x):
    scale, zero = OPS.choose_qparams(x, 0, 255, 1e-5, torch.uint8)
    levels = OPS.quantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)
    return OPS.dequantize_per_tensor.tensor(levels, scale, zero, 0, 255, torch.uint8)


@pytest.mark.parametrize(
    ("body", "operator"),
    [
        (dynamic, "choose_qparams"),
        (lambda x: rounded(x, 0.1, 0, -448, 448, torch.float8_e4m3fn), "quantize_per_tensor"),
    ],
)
def test_unsupported_quantization_is_refused_by_name(body, operator):
    model = Body(lambda m, x: m.c(body(x)), c=nn.Conv2d(3, 4, 3))
    for verb in (stages.from_qdq, lambda m, x: intaglio.quantize(m, [x], progress=False)):
        with pytest.raises(UnsupportedError, match=operator) as raised:
            verb(model.eval(), X)
        assert "int8_dynamic" in raised.value.remedy


def test_scales_in_constant_tensors_become_numbers():
    def forward(m, x):
        given = m.scale, m.zero, 0, 255, torch.uint8
        levels = OPS.quantize_per_tensor.tensor(x, *given)
        return rounded(F.conv2d(OPS.dequantize_per_tensor.tensor(levels, *given), m.w()), *U8)

    model = Body(forward, w=Weight((4, 3, 3, 3)))
    model.register_buffer("scale", torch.tensor(0.04))
    model.register_buffer("zero", torch.tensor(120))
    assert same_bits(taken(model)).coverage.operators == 1


def test_a_float_model_is_refused():
    with pytest.raises(UnsupportedError, match="quantize_per_tensor") as raised:
        stages.from_qdq(randomize(nn.Sequential(nn.Conv2d(3, 4, 3))), X)
    assert "quantize(model, data)" in raised.value.remedy
