"""Linear layers whose activations are quantized while the model runs: law, kernels, one program, recipe, files."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import intaglio
from intaglio import numerics, stages
from intaglio.errors import UnsupportedError
from intaglio.ir import Op, TensorType
from intaglio.native.compile import build, load
from intaglio.ops import check_graph
from intaglio.ops.dynamic_quant import ROW_MODES, quantize_dynamic
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe, Setting
from support.integer_graphs import Net
from support.lowering import kinds, quantized, sqnr
from support.matmul_library import BEST_ISA_PARAMS, RUNNABLE_ISAS, Memory
from support.nets import Body, randomize
from support.programs import threads
from support.slow_params import slow_params_except

DYNAMIC = Recipe.named("int8_dynamic")
BY = {mode: Recipe.of({}, Setting(activations=mode)) for mode in ROW_MODES}
STRANGE = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 2.0**-101, 1e-38, 3e38, -3.4e38)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(np.ascontiguousarray(a).view(np.int32), np.ascontiguousarray(b).view(np.int32))


def rows_of(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Rows of any magnitude, some with strange numbers."""
    draw = np.random.default_rng(seed)
    x = (draw.normal(size=shape) * np.exp(draw.uniform(-60, 60, (*shape[:-1], 1)))).astype(np.float32)
    some = draw.random(x.shape) < 0.3 / max(1, shape[-1])
    x[some] = draw.choice(np.float32(STRANGE), int(some.sum()))
    return x


# ---- numbers


def test_a_token_has_127_quantized_values_on_each_side():
    x = np.float32([[-254, 254, 1, 3, 5, -1, -3]])
    q_values, scales = quantize_dynamic(x, "token")
    assert scales.tolist() == [[2.0]]
    assert (q_values.astype(int) - 128).tolist() == [[-127, 127, 0, 2, 2, 0, -2]]  # ties to even


def test_a_row_of_zeros_is_zero_and_one_that_is_not_finite_is_nan():
    x = np.float32([[0, 0], [1e-45, 0], [np.nan, 1], [np.inf, 1], [-np.inf, np.nan]])
    q_values, scales = quantize_dynamic(x, "token")
    assert (q_values == 128).all()
    assert (scales[:2] == np.float32(2.0**-100) / np.float32(127)).all()
    assert np.isnan(scales[2:]).all()
    found = numerics.dequantize_rows(np.zeros((5, 2), np.int32), scales, np.float32([1, 2]), np.float32([3, 4]))
    assert found[:2].tolist() == [[3, 4], [3, 4]]
    assert np.isnan(found[2:]).all()


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 40), st.integers(0, 2**32 - 1), st.sampled_from(ROW_MODES))
def test_quantized_values_do_not_depend_on_other_samples_of_the_batch(batch, rows, count, seed, mode):
    x = rows_of((batch, rows, count), seed)
    q_values, scales = quantize_dynamic(x, mode)
    for entry in range(batch):
        alone = quantize_dynamic(x[entry : entry + 1], mode)
        assert np.array_equal(alone[0], q_values[entry : entry + 1])
        assert same_bits(alone[1], scales[entry : entry + 1])
    if mode == "tensor":
        assert all(len(set(entry.ravel().tolist())) == 1 for entry in scales if np.isfinite(entry).all())


TWIN = """
#include "sequences/rows.h"
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void rows(const float* from, const int64_t* strides, int64_t images, int64_t height, int64_t width,
                 int64_t pixel, int64_t alike, uint8_t* to, float* scales, int threads) {
    const struct Image out = image(to, images, height, width, pixel, 0, 0);
    for (int thread = 0; thread < threads; ++thread)
        quantize_rows(from, strides, &out, scales, alike, 0, thread, threads);
}
"""


@pytest.fixture(scope="module", params=RUNNABLE_ISAS)
def twin(request):
    return load(build(TWIN, name="rows_twin", isa=request.param))


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def in_c(twin, x: np.ndarray, mode: str, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantized values and scales of [images, height, width, K] in any strides, by the kernel; what it writes ends at a
    guard page."""
    steps = [stride // 4 for stride in x.strides]
    strides = (ctypes.c_int64 * 4)(steps[0], steps[3], steps[1], steps[2])
    memory, scales = Memory(1 << 16), np.full((*x.shape[:3], 1), 7, np.float32)
    q_values = memory.end(x.size)
    alike = x.shape[1] * x.shape[2] if mode == "tensor" else 1
    sizes = map(ctypes.c_int64, (*x.shape, alike))
    twin.rows(pointer(x), strides, *sizes, pointer(q_values), pointer(scales), threads)
    return q_values.reshape(x.shape), scales


@given(
    shape=st.tuples(*[st.integers(0, 3)] * 3, st.integers(1, 70)),
    order=st.permutations(range(4)),
    seed=st.integers(0, 2**32 - 1),
    mode=st.sampled_from(ROW_MODES),
    threads=st.integers(1, 4),
)
def test_the_kernel_gives_quantized_values_and_scales(twin, shape, order, seed, mode, threads):
    """Whatever lies fastest in memory."""
    x = rows_of(shape, seed)
    x = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
    q_values, scales = in_c(twin, x, mode, threads)
    expected = quantize_dynamic(x, mode)
    assert np.array_equal(q_values, expected[0])
    assert same_bits(scales, expected[1])


def test_the_comparison_detects_a_difference_of_one(twin):
    x = rows_of((2, 2, 2, 33), 0)
    q_values, _ = in_c(twin, x, "token", 1)
    x[1, 1, 1, 32] *= np.float32(-1.02)
    assert not np.array_equal(q_values, quantize_dynamic(x, "token")[0])


# ---- programs


class Rows(nn.Module):
    """Linear layers of odd sizes, with and without bias, on values of every rank, two on one value."""

    def __init__(self, inputs: int = 37, width: int = 130):
        super().__init__()
        self.wide, self.bare = nn.Linear(inputs, width), nn.Linear(inputs, 5, bias=False)
        self.narrow, self.one = nn.Linear(width, 1), nn.Linear(1, 19)

    def forward(self, x):
        y = F.gelu(self.wide(x))
        return self.bare(x), self.one(self.narrow(y)), y


def assert_bits(compiled, lowered, x: torch.Tensor) -> None:
    for a, b in zip(compiled(x), lowered(x), strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("mode", ROW_MODES)
@pytest.mark.parametrize(
    "shape",
    slow_params_except(
        (2, 3, 2, 2, 37), of=[(3, 37), (2, 7, 37), (2, 3, 4, 37), (2, 3, 2, 2, 37)], reason="fewer axes"
    ),
)
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_kernels_have_the_bits_of_the_interpreter(mode, shape, isa):
    x = torch.from_numpy(rows_of(shape, 5)).clamp(-1e6, 1e6)
    reference, lowered = quantized(randomize(Rows()), x.nan_to_num(), recipe=BY[mode])
    assert kinds(lowered).count("quantize_rows") == 3
    compiled = stages.compile(lowered, isa=isa)
    for batch in (x, x[:1], x.flip(-1), x.transpose(0, -2).contiguous().transpose(0, -2), x[:0]):
        for count in (1, 3):
            with threads(count):
                assert_bits(compiled, lowered, batch)
    for a, b in zip(reference(x), lowered(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.nan_to_num().abs().max().item(), equal_nan=True)


@given(st.integers(1, 40), st.integers(1, 90), st.integers(1, 70), st.booleans(), st.integers(0, 2**32 - 1))
def test_a_per_token_product_is_exact_before_scaling(rows, inputs, outputs, tensor, seed):
    """By the reference of the graph: no compile an example."""
    net = Net(seed)
    x = net.input(rows, inputs)
    q_values, scales = net.quantize_rows(x, "tensor" if tensor else "token")
    y = net.linear_rows(q_values, scales, outputs)
    real = (net.value[q_values].astype(np.float64) - 128) * net.value[scales]
    op = net.ops[-1]
    weight = net.value[net.ops[-2].inputs[1]].astype(np.float64) * net.value[op.inputs[2]].reshape(-1, 1)
    exact = real @ weight.T + net.value[op.inputs[3]]
    np.testing.assert_allclose(net.value[y], exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


@pytest.mark.case("backend 29")
@pytest.mark.parametrize("mode", ROW_MODES)
def test_a_dynamic_linear_layer_is_the_dynamic_reference(mode):
    """Case 29: parameters of every call are its own."""
    layer, x = randomize(nn.Linear(20, 6)), torch.randn(4, 5, 20)
    model = intaglio.quantize(layer, example_inputs=(x,), recipe=BY[mode])
    w_scale = layer.weight.detach().abs().amax(1) / 127
    weight = (layer.weight / w_scale[:, None]).round() * w_scale[:, None]
    for factor in (1.0, 100.0):
        given = x * factor
        peak = given.abs().amax(-1, keepdim=True) if mode == "token" else given.abs().amax((1, 2), keepdim=True)
        q_values = (given * (127 / peak)).round() * (peak / 127)
        expected = F.linear(q_values, weight, layer.bias)
        torch.testing.assert_close(model(given), expected, rtol=1e-4, atol=1e-4 * factor)


@pytest.mark.slow(reason="quantizes and calls a model for each entry; quantized values are compared above")
@pytest.mark.parametrize(
    "mode", slow_params_except("token", of=ROW_MODES, reason="numbers of each batch entry are tested above")
)
def test_results_depend_on_no_other_entry_of_the_batch(mode):
    x = torch.randn(4, 7, 37) * torch.tensor([1e-3, 1, 50, 1e4]).reshape(4, 1, 1)
    model = intaglio.quantize(randomize(Rows()), x, recipe=BY[mode], progress=False)
    for entry in range(4):
        for together, alone in zip(model(x), model(x[entry : entry + 1]), strict=True):
            assert torch.equal(together[entry], alone[0])


@pytest.mark.case("frontends A11")
def test_two_linear_layers_share_one_quantize():
    """One quantize a value, whatever was calibrated; another mode has one of its own."""

    def body(m, x):
        return (m.a(x), m.b(x), m.c(x))

    model = randomize(Body(body, a=nn.Linear(8, 4), b=nn.Linear(8, 5), c=nn.Linear(8, 3)))
    x = torch.randn(2, 3, 8)
    _, lowered = quantized(model, x, recipe=DYNAMIC)
    assert kinds(lowered) == ["quantize_rows", *["linear", "dequantize_rows"] * 3]
    again = [quantized(model, data, recipe=DYNAMIC)[1] for data in (x, x * 1000)]
    assert all(torch.equal(a, b) for a, b in zip(*(other(x) for other in again), strict=True))
    _, both = quantized(model, x, recipe=Recipe.of({"c": {"activations": "tensor"}}, Setting(activations="token")))
    assert kinds(both).count("quantize_rows") == 2


def test_every_token_has_its_own_scale():
    """What a loud one does not cost the others."""
    x = torch.randn(2, 16, 37, generator=torch.Generator().manual_seed(0))
    x[:, 0] *= 1000
    model = randomize(nn.Linear(37, 20))
    noise = {}
    for mode in ROW_MODES:
        quiet = intaglio.quantize(model, x, recipe=BY[mode], progress=False)(x)[:, 1:]
        noise[mode] = sqnr(quiet, model(x)[:, 1:])
    assert noise["token"] > 35
    assert noise["tensor"] < 10


# ---- recipe


def test_a_dynamic_model_needs_no_calibration():
    model, x = randomize(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))), torch.randn(3, 8)
    captured = stages.capture(model, x)
    prepared = prepare(captured, Quantizer(DYNAMIC))
    assert not prepared.observers
    stepwise = stages.compile(stages.convert(prepared))
    whole = intaglio.quantize(model, example_inputs=x, recipe="int8_dynamic")
    assert torch.equal(stepwise(x), whole(x))
    nearest = {"*": {"activations": "token", "rounding": "nearest"}}
    assert torch.equal(intaglio.quantize(model, x, recipe=nearest)(x), whole(x))
    assert sqnr(whole(x), model(x)) > 30


def test_data_decides_how_the_weights_of_a_dynamic_model_are_rounded():
    model = randomize(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    without = intaglio.quantize(model, example_inputs=x, recipe="int8_dynamic")
    fitted = intaglio.quantize(model, [x], recipe="int8_dynamic")
    assert "gptq" in fitted.text("corrections")
    assert sqnr(fitted(x), model(x)) >= sqnr(without(x), model(x))


@pytest.mark.slow(reason="quantizes a model with both kinds; a dynamic layer's result is a static site below")
def test_one_model_may_have_static_and_dynamic_layers():
    """A value may be quantized in both ways; corrections leave out what is quantized while the model runs."""

    def body(m, x):
        return m.last(F.relu(m.first(x))) + m.other(x)

    model = randomize(Body(body, first=nn.Linear(12, 20), last=nn.Linear(20, 6), other=nn.Linear(12, 6)))
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
    recipe = {"last": {"activations": "token", "bias": "outputs"}, "other": {"activations": "tensor"}}
    quick = intaglio.quantize(model, [x[:32], x[32:]], recipe=recipe, progress=False)
    text = quick.text("integer")
    assert text.count("= quantize_rows(") == 2
    assert text.count("= quantize(") == 1
    assert text.count("= loop(") == 2  # the rectifier and the sum, between floats
    assert sqnr(quick(x), model(x)) > 30
    parameters = stages.convert(
        prepare(stages.capture(model, x), Quantizer(Recipe.of(recipe))),
        stages.calibrate(prepare(stages.capture(model, x), Quantizer(Recipe.of(recipe))), x),
    ).parameters
    assert not any("last" in name and "weight" not in name for name in parameters.entries)


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_a_dynamic_layers_result_may_be_a_static_site(isa):
    model = randomize(nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 6)))
    x = torch.randn(32, 12)
    _, lowered = quantized(model, x, recipe=Recipe.of({"0": {"activations": "token"}}))
    assert kinds(lowered) == ["quantize_rows", "linear", "dequantize_rows", "loop", "linear", "dequantize"]
    assert lowered.graph.ops[3].output == lowered.graph.ops[4].inputs[0]  # floats clamped and quantized in one pass
    assert torch.equal(stages.compile(lowered, isa=isa)(x), lowered(x))


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"bits": 7}, "u7 activations and s8 weights"),
        ({"weights_dtype": "f8e4m3"}, "u8 activations and f8e4m3 weights"),
    ],
)
def test_layers_that_cannot_be_dynamic_say_why(setting, reason):
    with pytest.raises(UnsupportedError, match=reason):
        prepare(
            stages.capture(nn.Linear(4, 4), torch.randn(2, 4)),
            Quantizer(Recipe.of({}, Setting(activations="token", **setting))),
        )


def test_convolutions_stay_in_float_and_say_why():
    model = randomize(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 5)))
    quick = intaglio.quantize(model, torch.randn(2, 3, 6, 6), recipe="int8_dynamic", progress=False)
    assert "supported for linear and recurrent layers only" in str(quick.coverage)


def test_weights_may_have_few_bits_and_groups():
    model, x = randomize(nn.Linear(64, 9)), torch.randn(3, 64)
    recipe = Recipe.of({}, Setting(activations="token", weights_dtype="s4", weights="group:16"))
    reference, lowered = quantized(model, x, recipe=recipe)
    torch.testing.assert_close(reference(x), lowered(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(stages.compile(lowered)(x), lowered(x))


# ---- files


def test_a_model_with_dynamic_layers_is_saved_and_loaded(tmp_path):
    model, x = randomize(Rows()), torch.randn(2, 7, 37)
    quick = intaglio.quantize(model, x, recipe="int8_dynamic", progress=False)
    quick.save(tmp_path / "rows.intaglio")
    loaded = intaglio.load(tmp_path / "rows.intaglio")
    assert all(torch.equal(a, b) for a, b in zip(loaded(x), quick(x), strict=True))


def changed(graph, kind: str, **fields):
    """The first operator of a kind with other inputs or attributes."""
    index = next(i for i, op in enumerate(graph.ops) if op.kind == kind)
    ops = list(graph.ops)
    op = ops[index]
    given = {"inputs": op.inputs, "outputs": op.outputs, "attrs": dict(op.attrs)} | fields
    ops[index] = Op(op.kind, origin=op.origin, **given)
    return replace(graph, ops=tuple(ops))


def test_dynamic_linear_graphs_with_invalid_operands_are_refused():
    _, lowered = quantized(randomize(nn.Linear(8, 6)), torch.randn(2, 3, 8), recipe=DYNAMIC)
    graph = lowered.graph
    check_graph(graph)
    acc, scales, columns, bias = next(op.inputs for op in graph.ops if op.kind == "dequantize_rows")
    short = replace(graph, types={**graph.types, scales: TensorType((1,), graph.types[scales].dtype)})
    for bad in (
        changed(graph, "quantize_rows", attrs={"mode": "batch"}),
        short,
        changed(graph, "dequantize_rows", inputs=(acc, graph.inputs[0], columns, bias)),
        changed(graph, "dequantize_rows", inputs=(acc, scales, columns, columns[:0] + graph.ops[1].inputs[1])),
    ):
        with pytest.raises(ValueError, match=r"rows|accumulator|columns|f32"):
            check_graph(bad)
