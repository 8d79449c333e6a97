"""Linear layers of floats whose weights are float16 or integers: reference, kernel, models, files, what is refused.

Weights as integers alone are in end_to_end/test_layers.py too.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import intaglio
from intaglio import Recipe, Setting, stages
from intaglio.errors import UnsupportedError
from intaglio.ir import DType, Graph, Op, QParams, TensorType, symbol
from intaglio.numerics import float_math
from intaglio.ops import check_graph
from intaglio.runtime.calls.threads import segment_costs
from support.float_loops import LoopGraph, equal
from support.lowering import kinds, quantized
from support.matmul_library import CPP_ISA_PARAMS, RUNNABLE_ISAS
from support.nets import Body, randomize
from support.programs import threads
from support.slow_params import slow_params, slow_params_except

F16, F32, S8 = DType.F16, DType.F32, DType.S8
HALF = Recipe.of({}, Setting(activations="float", weights_dtype="f16"))
INT8 = Recipe.of({}, Setting(activations="float"))
SIZES = ((1, 1), (3, 64), (70, 131), (33, 10))
"""Inputs and outputs: less than a panel, a whole one, two and a part of a vector."""


def every_layer() -> LoopGraph:
    """Both element types, with and without a bias."""
    draw, net = np.random.default_rng(0), LoopGraph(**{f"x{k}": TensorType((symbol("n"), k), F32) for k, _ in SIZES})
    for k, n in SIZES:
        half, q_values = (
            draw.standard_normal((n, k)).astype(np.float16),
            draw.integers(-127, 128, (n, k)).astype(np.int8),
        )
        half[0, 0] = 2.0**-24  # the least there is
        bias = net.constant(draw.standard_normal(n).astype(np.float32))
        integers = net.constant(q_values, S8)
        scales = tuple(map(float, draw.uniform(0.001, 0.02, n).astype(np.float32)))
        net.types[integers] = TensorType((n, k), S8, QParams(scales, (0,) * n, -127, 127, 0))
        for weight in (net.constant(half, F16), integers):
            for more in ((), (bias,)):
                name = f"y{len(net.outputs)}"
                net.types[name] = TensorType((symbol("n"), n), F32)
                net.ops.append(Op("linear_f32", (f"x{k}", weight, *more), (name,)))
                net.outputs.append(name)
    return net


@pytest.fixture(scope="module", params=CPP_ISA_PARAMS)
def every(request):
    graph = every_layer().lowered()
    return graph, stages.compile(graph, isa=request.param)


@settings(max_examples=15)
@given(st.integers(1, 120), st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_weight_only_kernels_match_the_interpreter_and_torch(every, rows, seed, workers):
    graph, model = every
    draw = np.random.default_rng(seed)
    call = [torch.from_numpy(draw.standard_normal((rows, k)).astype(np.float32)) for k, _ in SIZES]
    expected = graph(*call)
    with threads(workers):
        found = model(*call)
    assert all(equal(*pair) for pair in zip(found, expected, strict=True))
    for op, one in zip(graph.graph.ops, expected, strict=True):
        x, (weight, *bias) = call[graph.graph.inputs.index(op.inputs[0])], op.inputs[1:]
        real, q = graph.graph.constants[weight].astype(np.float32), graph.graph.types[weight].q
        real = real if q is None else real * np.array(q.scales, np.float32)[:, None]
        wanted = F.linear(x, torch.from_numpy(real), *[torch.from_numpy(graph.graph.constants[name]) for name in bias])
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.0, 1e38, 1e-45])
def test_weight_only_kernels_are_bit_identical_for_special_values(every, value):
    graph, model = every
    call = [torch.ones(7, k) for k, _ in SIZES]
    for x in call:
        x[1:3, -1] = value
    assert all(equal(*pair) for pair in zip(model(*call), graph(*call), strict=True))


def test_products_are_summed_in_the_order_of_the_inputs():
    """By hand, in scalars; another order gives other bits."""
    draw = np.random.default_rng(3)
    x, weight = draw.standard_normal(40).astype(np.float32), draw.standard_normal((9, 40)).astype(np.float16)
    scales, bias = draw.uniform(0.5, 2, (2, 9)).astype(np.float32)

    def by_hand(order):
        found = []
        for row, scale, start in zip(weight.astype(np.float32), scales, bias, strict=True):
            total = np.float32(0)
            for k in order:
                total += x[k] * row[k]
            found.append(total * scale + start)
        return np.array(found, np.float32)

    found = float_math.linear(x, weight, scales, bias)
    np.testing.assert_array_equal(found, by_hand(range(40)))
    assert (found != by_hand(reversed(range(40)))).any()


@pytest.mark.parametrize("isa", CPP_ISA_PARAMS)
def test_every_float16_becomes_the_float32_it_is(isa):
    halves = np.arange(2**16).astype(np.uint16).view(np.float16)
    net = LoopGraph(x=TensorType((symbol("n"), 1), F32))
    net.types["y"] = TensorType((symbol("n"), len(halves)), F32)
    net.ops.append(Op("linear_f32", ("x", net.constant(halves[:, None], F16)), ("y",)))
    net.outputs.append("y")
    (found,) = stages.compile(net.lowered(), isa=isa)(torch.ones(1, 1))
    np.testing.assert_array_equal(found[0].numpy(), halves.astype(np.float32))


# ---- models


@pytest.mark.slow(reason="quantizes a model of two layers; a float16 layer is compared with the float layer below")
@pytest.mark.usefixtures("without_avx512")
@pytest.mark.case("frontends C4")
@pytest.mark.parametrize(
    "kind", [torch.float32, *slow_params(torch.bfloat16, reason="another type of the same weights")]
)
def test_weights_may_be_float16(kind, tmp_path):
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval().to(kind)
    x = torch.randn(16, 64).to(kind)
    reference, graph = quantized(model, x, recipe=HALF)
    calls = [str(node.target) for node in reference.module.graph.nodes if node.op == "call_function"]
    assert not any("quantize" in call for call in calls)
    halves = [value for value in reference.module.buffers() if value.dtype is torch.float16]
    assert sorted(value.shape for value in halves) == [(64, 128), (128, 64)]
    assert max(value.numel() for value in reference.module.buffers() if value.dtype is torch.float32) == 128
    assert not graph.islands
    compiled = stages.compile(graph)
    found, exact = compiled(x), model(x)
    assert found.dtype is kind
    assert equal(found, graph(x))
    torch.testing.assert_close(found.float(), exact.float(), rtol=1e-2, atol=1e-2 * exact.abs().max().item())
    assert compiled.coverage.bytes_after < 0.6 * 4 * sum(p.numel() for p in model.parameters())
    reasons = [part.reason for part in compiled.coverage.loops if "weight-only" in part.reason]
    assert reasons == ["weight-only quantization (f16): activations stay in float"] * 2
    compiled.save(tmp_path / "model.intaglio", example=x, library=False)
    assert (tmp_path / "model.intaglio").stat().st_size < 2.2 * sum(p.numel() for p in model.parameters()) + 20_000
    loaded = intaglio.load(tmp_path / "model.intaglio")
    loaded.verify()
    assert equal(loaded(x), found)


@pytest.mark.case("frontends C4")
def test_a_float16_layer_is_the_float_layer_of_rounded_weights():
    """Those beyond the largest float16 become that one, as torch's fp16 linear has it."""
    layer = nn.Linear(8, 5)
    with torch.no_grad():
        layer.weight[0, :3] = torch.tensor([1e6, -1e6, 65519.0])
        layer.weight[1] = 1e-7
    x = torch.randn(4, 8)
    reference, graph = quantized(layer, x, recipe=HALF)
    rounded = layer.weight.detach().clamp(-65504, 65504).half().float()
    wanted = F.linear(x, rounded, layer.bias)
    assert torch.equal(reference(x), wanted)
    torch.testing.assert_close(graph(x), wanted, rtol=1e-6, atol=1e-6 * wanted.abs().max().item())


OTHER_KIND = pytest.mark.slow(reason="each kind of weight runs on one set of instructions, portable code among them")


@pytest.mark.parametrize(
    ("recipe", "isa"),
    [
        pytest.param(recipe, isa, marks=[OTHER_KIND] * (isa != fast), id=f"{kind}-{isa}")
        for recipe, kind, fast in ((HALF, "f16", RUNNABLE_ISAS[-2:][0]), (INT8, "s8", "portable"))
        for isa in RUNNABLE_ISAS
    ],
)
def test_weight_only_layers_take_any_axes_and_shared_weights(recipe, isa):
    def body(m, x):
        y = m.a(x)
        return m.a(F.gelu(y)) + y, m.a(x.mean(0).mean(0).mean(0)), m.a(x[:, 1]).transpose(1, 2), m.a(x[..., 0, :])

    model = randomize(Body(body, a=nn.Linear(12, 12, bias=False)))
    x = torch.randn(3, 2, 5, 12)
    _, graph = quantized(model, x, recipe=recipe)
    assert not graph.islands
    assert kinds(graph).count("linear_f32") == 5
    assert len({op.inputs[1] for op in graph.graph.ops if op.kind == "linear_f32"}) == 1
    compiled = stages.compile(graph, isa=isa)
    for batch in (x, x[:1], torch.randn(3, 2, 12, 5).transpose(2, 3)):
        for found, expected, exact in zip(compiled(batch), graph(batch), model(batch), strict=True):
            assert equal(found, expected)
            assert (found - exact).norm() <= 2e-2 * exact.norm()


@pytest.mark.slow(reason="one model for one layout")
@pytest.mark.parametrize(
    "isa",
    slow_params_except(*RUNNABLE_ISAS[-1:], of=RUNNABLE_ISAS, reason="the layout is the same on every processor"),
)
def test_a_linear_layer_between_images_uses_row_major_layout(isa):
    """Of a convolution's result, whose channels lie together, along a line; what follows is a convolution again."""

    def body(m, x):
        y = torch.relu(m.c(x))
        return m.d(m.a(torch.sigmoid(y)) + y)

    model = randomize(Body(body, c=nn.Conv2d(3, 8, 3, padding=1), a=nn.Linear(12, 12), d=nn.Conv2d(8, 4, 3)))
    x = torch.randn(2, 3, 9, 12)
    _, graph = quantized(model, x, recipe=Recipe.of({"a": {"activations": "float", "weights_dtype": "f16"}}))
    assert not graph.islands
    compiled = stages.compile(graph, isa=isa)
    for batch in (x, x[:1]):
        assert equal(compiled(batch), graph(batch))
    assert (compiled(x) - model(x)).norm() <= 0.1 * model(x).norm()


@pytest.mark.case("frontends C4")
def test_convolutions_keep_float16_in_pytorch(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3)).eval()
    x = torch.randn(2, 3, 12, 12)
    compiled = intaglio.quantize(model, [x], recipe=HALF)
    assert compiled.coverage.bytes_after < 0.6 * 4 * sum(p.numel() for p in model.parameters())
    assert {part.reason for part in compiled.coverage.floats} == {
        "weight-only quantization (f16): activations stay in float"
    }
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-2, atol=1e-2)
    compiled.save(tmp_path / "m", library=False)
    assert equal(intaglio.load(tmp_path / "m")(x), compiled(x))


@pytest.mark.usefixtures("without_avx512")
@pytest.mark.parametrize(
    ("setting", "bits"),
    [
        *slow_params(
            ({"weights_dtype": "s4", "weights": "group:8"}, 4),
            reason="groups of four bits have kernels and tests of their own",
        ),
        ({"weights": "tensor"}, 8),
        ({"weights_dtype": "s2"}, 2),
    ],
)
def test_weight_only_quantization_supports_few_bits_groups_and_one_scale(setting, bits, tmp_path):
    model = nn.Sequential(nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 9)).eval()
    x = torch.randn(16, 48)
    reference, graph = quantized(model, x, recipe=Recipe.of({}, Setting(activations="float", **setting)))
    torch.testing.assert_close(graph(x), reference(x), rtol=1e-5, atol=1e-5)
    assert (graph(x) - model(x)).norm() <= {8: 0.02, 4: 0.1, 2: 0.9}[bits] * model(x).norm()
    weights = [graph.graph.types[op.inputs[1]] for op in graph.graph.ops if op.kind == "linear_f32"]
    assert [kind.packing.bits if kind.packing else 8 for kind in weights] == [bits] * 2
    compiled = stages.compile(graph)
    compiled.save(tmp_path / "m", library=False)
    assert equal(intaglio.load(tmp_path / "m")(x), graph(x))


def test_the_texts_of_a_weight_only_layer_are_golden(golden):
    layer = nn.Linear(2, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -2], [0.5, 4], [127, -127]]))
        layer.bias.fill_(0.5)
    for name, recipe in (("f16", HALF), ("s8", INT8)):
        reference, graph = quantized(layer, torch.ones(4, 2), recipe=recipe)
        golden(f"{reference.text()}\n\n{graph.text()}", name)


@pytest.mark.usefixtures("without_avx512")
def test_loading_a_state_dict_replaces_the_weights():
    first, second = (nn.Linear(6, 4).eval() for _ in range(2))
    x = torch.randn(3, 6)
    models = [intaglio.quantize(layer, [x], recipe=HALF) for layer in (first, second)]
    models[0].load_state_dict(models[1].state_dict())
    assert equal(models[0](x), models[1](x))


@pytest.mark.usefixtures("without_avx512")
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(HALF, id="f16", marks=pytest.mark.slow(reason="the same rule as for int8")),
        pytest.param(INT8, id="s8"),
    ],
)
def test_threads_share_what_it_takes_to_read_weights(recipe):
    """Of one row there is hardly any arithmetic."""
    compiled = stages.compile(quantized(nn.Linear(1024, 1024), torch.randn(2, 1024), recipe=recipe)[1])
    (cost,) = segment_costs(compiled.artifact.program, {"n": 1})
    assert cost.threads(2) == 2


# ---- refused


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"weights_dtype": "f16"}, "f16 weights need activations in float"),
        ({"weights_dtype": "f16", "activations": "token"}, "f16 weights need activations in float"),
        ({"weights_dtype": "f8e4m3", "activations": "float"}, "weight-only quantization takes .*, not f8e4m3"),
        ({"weights": "group:8", "activations": "float"}, "in groups, not s8 weights"),
        ({"weights_dtype": "f16", "weights": "group:8", "activations": "float"}, "in groups, not f16 weights"),
    ],
)
def test_settings_that_fit_no_kernel_are_errors_that_name_the_layer(setting, reason):
    with pytest.raises(UnsupportedError, match=reason):
        intaglio.quantize(nn.Sequential(nn.Linear(8, 8)), [torch.randn(4, 8)], recipe={"0": setting})


def changed(graph: Graph, types: dict[str, TensorType] | None = None, **fields) -> Graph:
    (op,) = graph.ops
    again = Op(op.kind, **{"inputs": op.inputs, "outputs": op.outputs} | fields)
    return Graph(graph.inputs, graph.outputs, {**graph.types, **(types or {})}, (again,), graph.constants)


@pytest.mark.parametrize("recipe", [HALF, INT8], ids=["f16", "s8"])
def test_weight_only_graphs_with_invalid_operands_are_refused(recipe):
    graph = quantized(nn.Linear(8, 8), torch.randn(4, 8), recipe=recipe)[1].graph
    check_graph(graph)
    (op,) = graph.ops
    x, weight, bias = op.inputs
    few = QParams((1.0,) * 7, (0,) * 7, -127, 127, 0)
    for bad in (
        changed(graph, inputs=(x, x, bias)),
        changed(graph, inputs=(x, weight, x)),
        changed(graph, types={x: TensorType((4, 9), F32)}),
        changed(graph, types={bias: TensorType((7,), F32)}),
        changed(graph, types={weight: TensorType((8, 8), S8, few)}),
        changed(graph, attrs={"k": 1}),
        changed(graph, types={weight: TensorType((8, 8), S8)}),
        changed(graph, types={op.output: TensorType((4, 9), F32)}),
        Graph((*graph.inputs, weight), graph.outputs, graph.types, graph.ops, {bias: graph.constants[bias]}),
    ):
        with pytest.raises(ValueError, match=r"linear_f32|constant"):
            check_graph(bad)
