"""Functions behind a layer computed in float32 on its accumulator: twins, accuracy, kernels, recipe, files."""

import ctypes
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

import intaglio
from intaglio import numerics as nm
from intaglio import stages
from intaglio.ir import DType, Op, QParams
from intaglio.ir.verify import VerifyError
from intaglio.native.compile import build, load
from intaglio.ops import OPS, PRECISE_FUNCTIONS, check_graph, verify
from intaglio.ops.fused_activations import PRECISE
from intaglio.plan.partitioning import partition_ops
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe, Setting
from support.integer_graphs import Net
from support.lowering import ROUNDED, assert_equal_quantized, kinds, lowered, quantized, sqnr, tensors
from support.matmul_library import BEST_ISA_PARAMS, CPP_ISA_PARAMS
from support.nets import Body, randomize
from support.programs import threads
from support.slow_params import slow_params

ALL = Recipe.of({}, Setting(functions="precise", results="int8"))
SLOPE = {"slope": 0.2}
TORCH = {
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

# ---- numbers

CALLS = {name: f"{name}(x)" for name in PRECISE}
CALLS |= {"leaky_relu": "leaky_relu(x, 0.2f)", "tanh": "tanh_f32(x)"}
CALLS |= {"exp_negative": "exp_negative(-absolute(x))", "expm1_negative": "expm1_negative(-absolute(x))"}
CALLS |= {"gelu_approx": "gelu_approx(x)"}
MEANINGS = {name: lambda x, name=name: PRECISE[name](x, SLOPE) for name in PRECISE}
MEANINGS |= {"gelu": nm.gelu, "gelu_approx": nm.gelu_approx}
MEANINGS |= {name: lambda x, name=name: getattr(nm, name)(-np.abs(x)) for name in ("exp_negative", "expm1_negative")}
TWIN = '#include "base/functions.h"\n' + "".join(
    f"""
extern "C" __attribute__((visibility("default"))) void each_{name}(int64_t n, const float* from, float* to) {{
    for (int64_t i = 0; i < n; i += FLOATS) {{
        Reals x;
        memcpy(&x, from + i, sizeof x);
        x = {call};
        memcpy(to + i, &x, sizeof x);
    }}
}}
"""
    for name, call in CALLS.items()
)
NUMBERS = st.floats(width=32, allow_nan=False)


@pytest.fixture(scope="module", params=CPP_ISA_PARAMS)
def twin(request):
    library = load(build(TWIN, name="functions_twin", isa=request.param))

    def call(name: str, x: np.ndarray) -> np.ndarray:
        found = np.empty_like(x)
        ends = [ctypes.c_void_p(array.ctypes.data) for array in (x, found)]
        getattr(library, f"each_{name}")(ctypes.c_int64(x.size), *ends)
        return found

    return call


def spread() -> np.ndarray:
    """Every magnitude, denormals and infinities too, more of them where functions bend; a multiple of 16."""
    draw = np.random.default_rng(0)
    magnitudes = np.exp(draw.uniform(-100, 88, 20000)) * draw.choice([-1, 1], 20000)
    edge = [0, 1e-45, 1e-40, 3, 6, 16, 86.99999, 87, 87.00001, 88, 3e38, np.inf]
    near = [draw.normal(size=20000) * 3, draw.uniform(-90, 90, 20000), magnitudes, edge, np.negative(edge)]
    x = np.concatenate(near).astype(np.float32)
    return np.resize(x, -(-x.size // 16) * 16)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return not np.isnan(a).any() and np.array_equal((a + 0).view(np.int32), (b + 0).view(np.int32))


@pytest.mark.parametrize("name", CALLS)
def test_cpp_functions_are_bit_identical_for_all_float32_values(twin, name):
    x = spread()
    assert same_bits(twin(name, x), MEANINGS[name](x))


@given(hnp.arrays(np.float32, 16, elements=NUMBERS))
def test_cpp_functions_are_bit_identical_for_random_values(twin, x):
    for name in CALLS:
        assert same_bits(twin(name, x), MEANINGS[name](x)), name


@given(hnp.arrays(np.int32, 16), st.sampled_from(["exp_negative", "gelu_approx"]))
def test_loop_functions_propagate_nan_only_to_their_own_element(twin, bits, name):
    """Any bits, of which every third is a NaN of any payload."""
    bits[::3] |= 0x7F800001
    x = bits.view(np.float32)
    found, unknown = twin(name, x), np.isnan(x)
    assert np.array_equal(np.isnan(found), unknown)
    assert same_bits(found[~unknown], MEANINGS[name](x[~unknown]))


def test_the_comparison_with_cpp_detects_a_change_of_the_last_bit(twin):
    x = spread()
    assert not same_bits(twin("gelu", x), np.nextafter(nm.gelu(x), np.float32(1)))


def exact_sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x)))


erfc = np.vectorize(math.erfc)
EXACT = {
    "leaky_relu": lambda x: np.where(x > 0, x, x * float(np.float32(0.2))),
    "hardsigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "sigmoid": exact_sigmoid,
    "silu": lambda x: x * exact_sigmoid(x),
    "tanh": np.tanh,
    "gelu": lambda x: x * erfc(-x / math.sqrt(2)) / 2,
    "gelu_approx": lambda x: x * erfc(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x * exact_sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
}
WITHIN = {
    "leaky_relu": lambda x, y: 1e-7 * abs(y),
    "hardsigmoid": lambda x, y: 1e-7,
    "hardswish": lambda x, y: 2e-7 * abs(y),
    "sigmoid": lambda x, y: np.where(x < -87, 1e-37, 2e-7 * y),
    "tanh": lambda x, y: 2e-7 * abs(y),
    "silu": lambda x, y: np.where(x < -87, 1e-35, 3e-7 * abs(y)),
    "gelu": lambda x, y: 3e-7 * abs(x),
    "gelu_approx": lambda x, y: 3e-6 * abs(x),
    "gelu_tanh": lambda x, y: 2e-7 * abs(x),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_error_is_within_what_the_docstring_says(name):
    """And what one denormal step is."""
    x = spread()
    x = x[np.abs(x) < 1e12]
    wide = x.astype(np.float64)
    exact = EXACT[name](wide)
    error = np.abs(MEANINGS[name](x) - exact)
    assert (error <= WITHIN[name](wide, exact) + 2.0**-149).all()


def test_quantized_values_are_rounded_once_ties_to_even():
    acc = np.array([-5, -3, -1, 1, 3, 5, 2**31 - 1, -(2**31)], np.int32)
    found = nm.activate(acc, np.float32(0.5), lambda x: x, 1.0, 10, 0, 255)
    np.testing.assert_array_equal(found, [8, 8, 10, 10, 12, 12, 255, 0])
    assert nm.activate(acc, np.float32(3e38), nm.silu, 1e-30, 7, 0, 255).tolist() == [7, 7, 7, 255, 255, 255, 255, 7]


# ---- kernels


def every_layer(*pairs):
    """Convolutions, depthwise ones of two strides and with columns apart, groups, transposed, linear; odd channels.

    The layers of a network have two functions in turn, for each pair of them.
    """

    def one(m, x, first, second):
        y = first(m.wide(x))
        z = first(m.grouped(second(m.deep(y))))
        w = first(m.up(second(m.five(z)) + first(m.apart(z))))
        joined = torch.cat([second(m.point(y)), m.point(y)], 1)
        return first(m.last(second(m.line(w.mean((2, 3)))))), m.read(joined)

    layers = {
        "wide": nn.Conv2d(3, 81, 3, padding=1),
        "deep": nn.Conv2d(81, 81, 3, 2, 1, groups=81),
        "grouped": nn.Conv2d(81, 72, 3, padding=1, groups=9),
        "five": nn.Conv2d(72, 72, 5, padding=2, groups=72),
        "apart": nn.Conv2d(72, 72, 3, padding=2, dilation=2, groups=72),
        "up": nn.ConvTranspose2d(72, 20, 3, 2),
        "line": nn.Linear(20, 33),
        "last": nn.Linear(33, 7),
        "point": nn.Conv2d(81, 17, 1),
        "read": nn.Conv2d(34, 5, 3, padding=1),
    }
    return randomize(Body(lambda m, x: [one(m, x, *pair) for pair in pairs], **layers))


def assert_same_bits(compiled, integer, x: torch.Tensor) -> None:
    assert all(torch.equal(*pair) for pair in zip(tensors(compiled(x)), tensors(integer(x)), strict=True))


@pytest.mark.slow(reason="a program of nine layers with two functions; layers of several widths run below")
@pytest.mark.parametrize(
    "pairs",
    [
        (("leaky_relu", "gelu"),),
        *slow_params(
            (tuple((name, name) for name in TORCH),), reason="nine layers of every function; two show the layers"
        ),
    ],
    ids=["two", "all"],
)
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_every_layer_has_the_bits_of_the_interpreter(pairs, isa):
    """No hidden site, within one step of the reference, on every instruction set, batch and number of threads."""
    functions = [[TORCH[name] for name in pair] for pair in pairs]
    model, x = every_layer(*functions), torch.randn(3, 3, 11, 39, generator=torch.Generator().manual_seed(1))
    reference, integer = quantized(model, x, recipe=ALL)
    assert not integer.islands
    assert kinds(integer).count("activate") == 9 * len(functions)
    assert "table" not in kinds(integer)
    assert assert_equal_quantized(reference, integer, x).rate < 1e-4
    compiled = stages.compile(integer, isa=isa)
    with threads(3):
        assert_same_bits(compiled, integer, x)
    with threads(1):
        assert_same_bits(compiled, integer, x[:1])
    assert not any(part.numel() for part in tensors(compiled(x[:0])))


def channels_of(count: int):
    """A layer of so many channels and a depthwise one."""
    each = nn.Conv2d(count, count, 3, padding=1, groups=count)
    return nn.Sequential(nn.Conv2d(4, count, 1), nn.Hardswish(), each, nn.SiLU())


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
@pytest.mark.parametrize(
    "counts",
    [(8, 33, 130), *slow_params(((16, 24, 64, 97),), reason="other numbers of full panels and channels beside them")],
    ids=["few", "others"],
)
def test_float32_layers_take_any_number_of_channels(counts, isa):
    """Panels and blocks that are part full, rows longer than what is held as floats."""
    layers = {f"of{count}": channels_of(count) for count in counts}
    model = randomize(Body(lambda m, x: [getattr(m, name)(x) for name in layers], **layers))
    captured = stages.capture(model, torch.randn(2, 4, 3, 150))
    _, integer = lowered(captured, torch.randn(4, 4, 3, 150), recipe=ALL)
    compiled = stages.compile(integer, isa=isa)
    for size in (1, 4):
        assert_same_bits(compiled, integer, torch.randn(size, 4, 3, 150))


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_a_requantize_after_the_function_becomes_a_table(isa):
    """A table in the kernel of a function: the function first."""
    net = Net()
    acc = net.quantize(net.input(2, 3, 9, 9))
    unit = net._constant(np.float32([0.01]), DType.F32)
    weight = net._constant(net.draw.integers(-127, 128, (20, 3, 3, 3)).astype(np.int8), DType.S8)
    bias = net._constant(net.draw.integers(-3000, 3000, 20).astype(np.int32), DType.I32)
    geometry = {"stride": (1, 1), "padding": (0,) * 4, "dilation": (1, 1), "groups": 1}
    unit_q = QParams((0.01,), (0,), -(2**31), 2**31 - 1)
    conv = net._op("conv2d", [acc, weight, bias], DType.I32, unit_q, **geometry)
    q_values = net._op("activate", [conv, unit], DType.U8, net._q(60.0, 30), function="tanh")
    integer = net.lowered(net.dequantize(net.table(q_values)))
    assert [len(partition.ops) for partition in partition_ops(integer.graph)] == [1, 3, 1]
    x = torch.randn(2, 3, 9, 9)
    assert torch.equal(stages.compile(integer, isa=isa)(x)[0], integer(x)[0])


@pytest.mark.slow(reason="the oracle of the comparison above, which is slow, too")
def test_the_comparison_detects_another_slope():
    model, x = every_layer([TORCH["leaky_relu"]] * 2), torch.randn(2, 3, 11, 13)
    _, integer = quantized(model, x, recipe=ALL)
    ((before, _),) = integer(x)
    for op in integer.graph.ops:
        if op.kind == "activate":
            object.__setattr__(op, "attrs", {**op.attrs, "slope": 0.21})
    assert not torch.equal(integer(x)[0][0], before)


# ---- what the recipe says


def two(**modules) -> nn.Module:
    named = {"conv": nn.Conv2d(3, 8, 3), "act": nn.SiLU(), "last": nn.Conv2d(8, 4, 1), **modules}
    return randomize(Body(lambda m, x: torch.relu(m.last(m.act(m.conv(x)))), **named))


X = (2, 3, 7, 6)


@pytest.mark.parametrize(
    ("entries", "precise"),
    [
        ({}, False),
        ({"*": {"functions": "precise"}}, True),
        ({"type:SiLU": {"functions": "precise"}}, True),
        ({"act": {"functions": "precise"}}, True),
        ({"op:aten.silu": {"functions": "precise"}}, True),
        ({"conv": {"functions": "precise"}}, False),
        ({"*": {"functions": "precise"}, "act": {"functions": "table"}}, False),
        ({"act": {"functions": "precise", "method": "minmax"}}, False),
    ],
)
def test_the_setting_of_the_function_selects_its_method(entries, precise):
    """A sum, clamp or function still joins a layer that differs in this alone."""
    _, integer = quantized(two(), torch.randn(*X), recipe=Recipe.of(entries, ROUNDED.default))
    first = ["conv2d", "activate"] if precise else ["conv2d", "requantize", "table"]
    assert kinds(integer) == ["quantize", *first, "conv2d", "requantize", "dequantize"]


def test_the_input_of_a_precise_function_is_not_a_site():
    captured = stages.capture(two(), torch.randn(*X))
    assert "conv#0/conv2d.0" in prepare(captured).observers
    prepared = prepare(captured, Quantizer(ALL))
    assert "conv#0/conv2d.0" not in prepared.observers
    assert "act#0/silu.0" in prepared.observers


def test_functions_after_other_operators_are_lookup_tables():
    for body in (lambda m, x: m.last(F.silu(F.max_pool2d(m.conv(x), 2))), lambda m, x: m.last(F.mish(m.conv(x)))):
        model = randomize(Body(body, conv=nn.Conv2d(3, 8, 3), last=nn.Conv2d(8, 4, 1)))
        _, integer = quantized(model, torch.randn(*X), recipe=ALL)
        assert kinds(integer).count("table") == 1
        assert "activate" not in kinds(integer)


def test_an_accumulator_with_other_readers_has_no_precise_function():
    def body(m, x):
        return m.last(F.silu(y := m.conv(x))), m.last(y)

    model = randomize(Body(body, conv=nn.Conv2d(3, 8, 3), last=nn.Conv2d(8, 4, 1)))
    reference, integer = quantized(model, torch.randn(*X), recipe=ALL)
    assert kinds(integer).count("table") == 1
    assert_equal_quantized(reference, integer, torch.randn(*X))


@pytest.mark.slow(reason="quantizes two layers for one note")
def test_coverage_notes_name_precise_functions():
    data = [torch.randn(*X)]
    model = intaglio.quantize(two(), data, recipe=ALL, progress=False)
    assert "note: functions computed in float32: silu x 1; all others are lookup tables of 256 entries" in str(
        model.coverage
    )
    assert "conv2d + activate" in model.text("plan")
    assert not intaglio.quantize(two(), data, recipe=ROUNDED, progress=False).coverage.notes


def test_a_precise_function_loses_less_than_a_lookup_table():
    """Quantized values before the function cost accuracy, most where it is steep."""
    model, x = two(), torch.randn(64, *X[1:], generator=torch.Generator().manual_seed(0))
    table, precise = (quantized(model, x, recipe=recipe)[1](x) for recipe in (ROUNDED, ALL))
    assert sqnr(precise, model(x)) > sqnr(table, model(x))


def test_every_name_is_a_function_of_the_vocabulary():
    records = [OPS[name] for name in PRECISE_FUNCTIONS]
    assert all(record.function is not None for record in records)
    assert {record.precise({})["function"] for record in records} | {"gelu_tanh"} == set(PRECISE)
    assert OPS["leaky_relu"].precise({"negative_slope": 1e300})["slope"] == float(nm.LARGEST)


# ---- graphs and files


def integer_graph(**attrs):
    _, integer = quantized(two(act=nn.LeakyReLU(0.3)), torch.randn(*X), recipe=ALL)
    ops = [
        Op(op.kind, op.inputs, op.outputs, {**op.attrs, **attrs} if op.kind == "activate" else op.attrs)
        for op in integer.graph.ops
    ]
    return integer.graph.replace(ops=tuple(ops))


def test_the_verifier_wants_an_accumulator_and_its_unit():
    graph = verify(integer_graph())
    index = next(i for i, op in enumerate(graph.ops) if op.kind == "activate")
    op, ops = graph.ops[index], list(graph.ops)
    ops[index] = Op(op.kind, op.inputs[:1], op.outputs, op.attrs)
    with pytest.raises(VerifyError, match="expects 2 operands, but has 1"):
        verify(graph.replace(ops=tuple(ops)))
    ops[index] = Op(op.kind, (op.inputs[1], op.inputs[1]), op.outputs, op.attrs)
    with pytest.raises(VerifyError, match="is f32"):
        verify(graph.replace(ops=tuple(ops)))


@pytest.mark.parametrize(
    "attrs",
    [
        {"function": "leaky_relu(x)"},
        {"function": "softplus"},
        {"function": "silu"},
        {"slope": math.inf},
        {"slope": 1e39},
        {"slope": math.nan},
        {"slope": "0"},
        {"function": None},
        {"function": ("silu",)},
    ],
)
def test_a_graph_with_another_function_is_refused(attrs):
    check_graph(integer_graph())
    with pytest.raises(ValueError, match="activate expects"):
        check_graph(integer_graph(**attrs))


def test_a_graph_with_an_infinite_unit_is_refused():
    graph = integer_graph()
    op = next(op for op in graph.ops if op.kind == "activate")
    graph.constants[op.inputs[1]][0] = np.inf
    with pytest.raises(ValueError, match="must be finite constants"):
        check_graph(graph)


@pytest.mark.slow(reason="compiles nine layers once more, to save them")
def test_a_saved_model_with_precise_functions_is_loaded(tmp_path):
    model, x = every_layer([TORCH["leaky_relu"]] * 2), torch.randn(2, 3, 11, 13)
    _, integer = quantized(model, x, recipe=ALL)
    compiled = stages.compile(integer)
    compiled.save(tmp_path / "m.intaglio")
    loaded = intaglio.load(tmp_path / "m.intaglio")
    assert_same_bits(loaded, integer, x)
    assert loaded.text("integer") == compiled.text("integer")
