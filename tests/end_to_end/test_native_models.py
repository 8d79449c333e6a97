"""Whole models on the native backend: shapes, threads, caches, extreme numbers, models that others quantized."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import (
    DeQuantStub,
    QuantStub,
    get_default_qconfig,
    get_default_qconfig_mapping,
    prepare,
    quantize_dynamic,
)
from torch.ao.quantization.quantize_fx import _convert_to_reference_decomposed_fx, prepare_fx

import intaglio
from intaglio import stages
from intaglio.errors import IntaglioError, SelectorError, UnsupportedError
from intaglio.fxgraph.nodes import operator
from intaglio.ir import DType
from intaglio.ops import OPS, interpret
from intaglio.plan import plan_graph
from intaglio.quant.qdq.convert import Reference
from intaglio.quant.qdq.qdq_normalize import QUANTIZE_TENSOR
from support import nets
from support.int8_models import assert_same, compiled
from support.lowering import ROUNDED, assert_equal_quantized, kinds, quantized, sqnr
from support.matmul_library import BEST_ISA_PARAMS, RUNNABLE_ISAS
from support.nets import Body
from support.slow_params import slow_params, slow_params_except

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def conv(inputs: int = 3, outputs: int = 4, kernel: int = 3, **rest) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **rest)


def concatenation():
    def body(m, x):
        return m.e(torch.cat([m.c(x), m.d(x)], 1))

    return nets.randomize(Body(body, c=conv(), d=conv(), e=conv(8)))


@pytest.mark.case("backend 15", "problem 25")
def test_a_concatenation_of_equal_scales_has_no_requantize():
    """Case 15."""
    reference, lowered = quantized(concatenation(), X)
    assert kinds(lowered) == ["quantize", "conv2d", "requantize", "conv2d", "requantize", "cat", "conv2d", "dequantize"]
    assert_equal_quantized(reference, lowered, X)


@pytest.mark.case("backend 16")
def test_operands_of_other_scales_are_requantized_before_a_concatenation():
    """Case 16: ours always share; a reference in which they do not is lowered as it says."""
    reference, _ = quantized(concatenation(), X)
    site = next(site for site in reference.annotations.sites if site.name == "d#0/conv2d.0")
    quantizes = [node for node in reference.module.graph.nodes if operator(node) == QUANTIZE_TENSOR]
    (q_values,) = [node for node in quantizes if node.args[0].name == site.value]
    for node in (q_values, *q_values.users):
        node.args = (node.args[0], node.args[1] * 1.7, node.args[2] - 9, *node.args[3:])
    reference.module.recompile()
    lowered = stages.requantize(reference)
    assert kinds(lowered).count("table") == 1
    assert not lowered.islands
    assert_equal_quantized(reference, lowered, X)


IDLE = {
    "times one": lambda x: x * 1,
    "one times": lambda x: 1.0 * x,
    "plus zero": lambda x: x + 0,
    "minus zero": lambda x: x - 0.0,
    "by one": lambda x: x / 1.0,
}


@pytest.mark.case("backend 18")
@pytest.mark.parametrize(
    "name", slow_params_except("plus zero", "one times", of=IDLE, reason="the same rule for other operators")
)
def test_arithmetic_with_a_neutral_number_vanishes(name):
    """Case 18."""
    reference, lowered = quantized(nets.randomize(Body(lambda m, x: m.d(IDLE[name](m.c(x))), c=conv(), d=conv(4))), X)
    assert kinds(lowered) == ["quantize", "conv2d", "requantize", "conv2d", "dequantize"]
    assert reference(X).dtype is torch.float32


@pytest.mark.case("backend 18")
@pytest.mark.parametrize(
    "number",
    [
        *slow_params(10, reason="another number of the same element type"),
        0.4,
        torch.tensor(2.5),
        *slow_params(torch.tensor([2.5]), reason="another number of the same element type"),
    ],
    ids=str,
)
def test_numbers_and_tensors_of_one_element_keep_the_element_type(number):
    """Case 18: no promotion, and no float part: they are functions of one value."""

    def body(m: nn.Module, x: Tensor) -> Tensor:
        return m.d(m.c(x) / number + number)

    model = nets.randomize(Body(body, c=conv(), d=conv(4)))
    reference, lowered = quantized(model, X)
    assert lowered(X).dtype is torch.float32
    assert not lowered.islands
    assert_equal_quantized(reference, lowered, X)
    assert sqnr(lowered(X), model(X)) > 25


@pytest.mark.slow(reason="masked attention is one partition in test_transformer_blocks.py")
@pytest.mark.case("backend 18")
def test_a_scaled_and_masked_product_of_two_activations_is_one_partition():
    """Case 18: ``bmm / 0.4 + mask``. The number goes into the unit of the product, the mask is added in its kernel."""

    def body(m: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        q, k = m.q(x), m.k(x)
        return m.out(torch.bmm(q, k.transpose(1, 2)) / 0.4 + mask)

    model = nets.randomize(Body(body, q=nn.Linear(8, 8), k=nn.Linear(8, 8), out=nn.Linear(5, 3)))
    x, mask = torch.randn(2, 5, 8), torch.zeros(2, 5, 5)
    reference, lowered = quantized(model, x, mask)
    partitions = [[op.kind for op in step.partition.ops] for step in plan_graph(lowered.graph).steps]
    assert ["bmm", "dequantize", "loop"] in partitions
    assert not lowered.islands
    assert lowered(x, mask).dtype is torch.float32
    assert_equal_quantized(reference, lowered, x, mask)
    assert torch.equal(stages.compile(lowered)(x, mask), lowered(x, mask))
    assert sqnr(lowered(x, mask), model(x, mask)) > 25


@pytest.mark.case("backend 22")
def test_a_returned_inner_value_is_the_dequantized_input_of_the_next_layer():
    """Case 22: what leaves as float is exactly ``(quantized value - zero_point) * scale`` of the integers inside."""
    model = nets.randomize(Body(lambda m, x: (lambda y: (m.d(y), y))(F.relu(m.c(x))), c=conv(), d=conv(4)))
    reference, lowered = quantized(model, X, recipe=ROUNDED)
    inner = next(op for op in lowered.graph.ops if op.kind == "requantize").output
    kind = lowered.graph.types[inner]
    assert kind.dtype is DType.U8
    returned = lowered(X)[1].numpy()
    q_values = np.rint(returned / np.float32(kind.qparams.step)) + kind.qparams.zero
    assert q_values.min() >= 0
    assert q_values.max() <= 255
    again = (q_values - kind.qparams.zero).astype(np.float32) * np.float32(kind.qparams.step)
    assert np.array_equal(again, returned)
    assert torch.equal(stages.compile(lowered)(X)[1], lowered(X)[1])
    assert_equal_quantized(reference, lowered, X)


@pytest.mark.case("backend 23")
@pytest.mark.parametrize(
    "net",
    [
        *slow_params(nets.ConvBnRelu, reason="the residual network has the same operators"),
        nets.Residual,
        *slow_params(nets.MaxPoolNet, reason="the residual network has the same operators"),
    ],
    ids=lambda net: net.__name__,
)
def test_channels_last_inputs_give_bit_identical_channels_last_results(net):
    """Case 23: for cases 1, 2 and 14."""
    model, lowered = compiled(net)
    x = nets.example(net(), 5)
    last = x.to(memory_format=torch.channels_last)
    found, expected = model(last), lowered(x)
    assert_same(found, expected)
    if found.dim() == 4:
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert model(x).is_contiguous()
    assert torch.equal(last, x)


@pytest.mark.case("backend 27", "problem 14")
@pytest.mark.parametrize("bits", [7, 8])
@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_extreme_weights_and_inputs_are_exact_on_every_instruction_set(bits, isa):
    """Case 27: every product is 255 x +-127, pairs of them leave 16 bits, and no instruction set saturates."""
    model = nn.Sequential(nn.Linear(68, 20, bias=False), nn.ReLU(), nn.Linear(20, 3))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].weight[::2] = -1
        model[0].weight[1::4, ::2] = -1
    x = torch.ones(9, 68)
    x[::3] = 0
    x[1::3, ::2] = 0
    _, lowered = quantized(model.eval(), x, recipe=intaglio.Recipe.of({"*": {"bits": bits, "method": "minmax"}}))
    weight = next(array for array in lowered.graph.constants.values() if array.dtype == np.int8)
    assert set(np.unique(weight)) == {-127, 127}
    q_values = stages.compile(lowered, isa=isa)
    assert torch.equal(q_values(x), lowered(x))


def saturating(q_values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """``q_values @ weight.T`` as vpmaddubsw computes it: the two products of neighbours are added in 16 bits,
    which saturate, and pairs of these in 32."""
    products = q_values[:, None, :].astype(np.int64) * weight[None].astype(np.int64)
    pairs = products.reshape(*products.shape[:2], -1, 2).sum(-1)
    return pairs.clip(-(2**15), 2**15 - 1).sum(-1)


@pytest.mark.case("frontends B26")
@pytest.mark.parametrize("bits", [7, 8])
def test_seven_bits_do_not_saturate_pairs_of_products_and_eight_are_not_computed_so(bits):
    """B26: integers of a converted model, the largest there are. With 8 bits the emulated hardware is wrong, and our
    kernel for processors without VNNI, which widens to 16 bits first, is not: it gives the bits of the interpreter."""
    model = nn.Linear(68, 20)
    with torch.no_grad():
        model.weight.copy_(torch.where(torch.rand(20, 68) < 0.5, -1.0, 1.0))
        model.weight[:2] = torch.tensor([[1.0], [-1.0]])
    x = torch.rand(9, 68)
    x[:2], x[2, ::2] = 1.0, 0.0
    _, lowered = quantized(model.eval(), x, recipe=intaglio.Recipe.of({"*": {"bits": bits, "method": "minmax"}}))
    seen: dict[str, np.ndarray] = {}
    found = interpret(lowered.graph, [x.numpy()], OPS, watch=seen.__setitem__)[0]
    (op,) = (op for op in lowered.graph.ops if op.kind == "linear")
    q_values, weight = seen[op.inputs[0]], lowered.graph.constants[op.inputs[1]]
    assert (q_values.max(), weight.min(), weight.max()) == (2**bits - 1, -127, 127)
    exact = q_values.astype(np.int64) @ weight.T.astype(np.int64)
    assert np.array_equal(saturating(q_values, weight), exact) == (bits == 7)
    for isa in RUNNABLE_ISAS:
        assert np.array_equal(stages.compile(lowered, isa=isa)(x).numpy(), found)


@pytest.mark.case("backend 32")
def test_weights_are_those_of_their_own_model():
    """Case 32: a weight changed in place afterwards reaches no int8 model, and a new one has the new weight."""
    float_model = nets.randomize(nets.Linears())
    x = torch.randn(4, 16)
    first = stages.compile(quantized(float_model, x)[1])
    before = first(x)
    with torch.no_grad():
        float_model[0].weight.mul_(-2)
    second = stages.compile(quantized(float_model, x)[1])
    assert torch.equal(first(x), before)
    assert sqnr(second(x), float_model(x)) > 25
    assert not torch.equal(second(x), before)


@pytest.mark.case("backend 32")
def test_a_second_call_packs_no_weights():
    """Case 32: constants are packed once, when the program is made."""
    model, _ = compiled(nets.Residual)
    x = nets.example(nets.Residual(), 2)
    model(x)
    address, content = model.artifact.constants.ctypes.data, model.artifact.constants.copy()
    model(x)
    model(x[:1])
    assert model.artifact.constants.ctypes.data == address
    assert np.array_equal(model.artifact.constants, content)


@pytest.mark.case("backend 32")
def test_a_cache_without_room_gives_the_same_bits(fresh_programs, monkeypatch):
    """Case 32: capacity 0."""
    monkeypatch.setenv("INTAGLIO_CACHE_MB", "0")
    _, lowered = compiled(nets.Linears)
    x = torch.randn(3, 16)
    for _ in range(2):
        assert torch.equal(stages.compile(lowered, isa="portable")(x), lowered(x))


@pytest.mark.slow(reason="compiles a program anew, as every test with an empty cache does")
@pytest.mark.case("backend 32")
def test_a_cleared_cache_is_filled_again(fresh_cache):
    """Case 32: clear. A model that runs keeps its program; the next one is built anew."""
    _, lowered = compiled(nets.Linears)
    x = torch.randn(3, 16)
    first = stages.compile(lowered, isa="portable")
    shutil.rmtree(fresh_cache / "kernels")
    second = stages.compile(lowered, isa="portable")
    assert second.artifact.path.exists()
    assert_same((first(x), second(x)), (lowered(x),) * 2)


CALLERS = 8


@pytest.mark.case("backend 33")
@pytest.mark.slow(reason="stress of threads, with kernels compiled anew; building at once is tested in native")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_that_compile_and_call_at_once_get_what_one_gets(threads, fresh_cache, many_threads, counting_compiler):
    """Case 33: one text, compiled once however many ask; two models in between, shapes of their own."""
    many_threads(threads)
    pair = (nets.Residual, nets.ConvThenUnsupported)
    graphs = [compiled(net)[1] for net in pair]
    inputs = [(i % 2, nets.example(pair[i % 2](), 1 + i % 5, i)) for i in range(5 * CALLERS)]
    expected, before = [graphs[which](x) for which, x in inputs], len(counting_compiler.read_text().split())
    with ThreadPoolExecutor(CALLERS) as pool:
        models = list(pool.map(lambda i: stages.compile(graphs[i % 2], isa="portable"), range(CALLERS)))
        assert_same(list(pool.map(lambda call: models[call[0]](call[1]), inputs)), expected)
    assert len(counting_compiler.read_text().split()) - before == len({model.artifact.path for model in models}) == 2


@pytest.mark.slow(reason="sixty calls in threads; test_quantized_model.py has threads with different shapes")
@pytest.mark.case("backend 33")
def test_concurrent_calls_share_one_plan_per_set_of_shapes():
    """Case 33: calls of one set of shapes share its plan, and no two calls at once share memory."""
    lowered = compiled(nets.Residual)[1]
    model, inputs = stages.compile(lowered), [nets.example(nets.Residual(), 1 + i % 3, i) for i in range(60)]
    for x in inputs[:3]:
        model(x)
    plans = dict(model._plans)
    with ThreadPoolExecutor(CALLERS) as pool:
        assert_same(list(pool.map(model, inputs)), [lowered(x) for x in inputs])
    assert dict(model._plans) == plans
    assert len({frame.arena.data_ptr() for frame in model._frames}) == len(model._frames) <= CALLERS


@pytest.mark.case("backend 34")
@pytest.mark.parametrize("net", [nets.Residual, nets.ConvThenUnsupported], ids=lambda net: net.__name__)
def test_every_call_may_use_another_number_of_threads(net, many_threads):
    """Case 34: more than there are cores among them, while another thread calls too."""
    model, lowered = compiled(net)
    x = nets.example(net(), 3)
    expected = lowered(x)

    def call(threads: int) -> Tensor:
        many_threads(threads)
        return model(x)

    counts = [1, 2, 3, 7, 64, 2, 1, 5]
    assert_same([call(count) for count in counts], [expected] * len(counts))
    with ThreadPoolExecutor(2) as pool:
        assert_same(list(pool.map(call, counts * 5)), [expected] * 5 * len(counts))


# -- models that are quantized already --------------------------------------------------------------------------------


class Residual(nn.Module):
    """What torch.fx can trace symbolically."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.l = conv(), conv(4), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.a(x)), 2)
        return self.l(F.relu(self.b(y) + y).flatten(1))


def by_fx(backend: str) -> nn.Module:
    """A residual network as PyTorch's own flow quantizes it: weights are floats behind quantize and dequantize."""
    prepared = prepare_fx(nets.randomize(Residual()).eval(), get_default_qconfig_mapping(backend), (X,))
    prepared(X)
    return _convert_to_reference_decomposed_fx(prepared)


@pytest.mark.slow(reason="PyTorch quantizes a model; references are taken over in quant/frontends")
@pytest.mark.case("backend 35")
@pytest.mark.parametrize("backend", ["x86", *slow_params("qnnpack", reason="other ranges in the same operators")])
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_a_reference_from_pytorch_is_fused(backend, isa):
    """Case 35: 7 and 8 bits, weights by channel and by tensor."""
    given = by_fx(backend)
    reference = stages.from_qdq(given, X)
    lowered = stages.requantize(reference)
    assert kinds(lowered) == [
        "quantize",
        "conv2d",
        "requantize",
        "max_pool2d",
        "conv2d",
        "requantize",
        "add",
        "reshape",
        "linear",
        "requantize",
        "dequantize",
    ]
    step = [q.step for q in reference.qparams.values()][-1]
    assert ((reference(X) - given(X)).abs() / step).max() < 2.01
    native = stages.compile(lowered, isa=isa)
    assert torch.equal(native(X), lowered(X))
    assert native.coverage.operators == 1
    assert "quantized by another tool" in str(native.coverage)


def from_an_exported_program() -> Reference:
    given = by_fx("qnnpack")
    free = {"input": {0: torch.export.Dim.AUTO}}
    reference = stages.from_qdq(torch.export.export(nn.Sequential(given), (X,), dynamic_shapes=free))
    assert torch.equal(reference(X), stages.from_qdq(given, X)(X))
    return reference


@pytest.mark.slow(reason="exports to ONNX, which has tests of its own")
@pytest.mark.usefixtures("operators_read_once")
@pytest.mark.case("backend 35")
def test_a_program_brings_its_example_and_goes_to_onnx(tmp_path):
    """The same reference from an exported program; ONNX Runtime computes what it does."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    reference = from_an_exported_program()
    step = [q.step for q in reference.qparams.values()][-1]
    session = onnxruntime.InferenceSession(stages.compile(reference, backend="onnx", path=tmp_path / "model.onnx").path)
    (found,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    assert np.abs(found - reference(X).numpy()).max() <= 2.01 * step


@pytest.mark.slow(reason="Inductor compiles for half a minute; backends/test_inductor.py runs it on other references")
@pytest.mark.case("backend 35")
def test_a_program_brings_its_example_and_goes_to_inductor():
    reference = from_an_exported_program()
    step = [q.step for q in reference.qparams.values()][-1]
    inductor = stages.compile(reference, backend="inductor", example_inputs=X)
    assert (inductor(X) - reference(X)).abs().max() <= 2.01 * step


@pytest.mark.slow(reason="PyTorch quantizes a part; a part of ours is unchanged by the same rule")
@pytest.mark.case("backend 35")
def test_submodules_quantized_by_pytorch_are_unchanged():
    """Case 35: its quantized values are those it has, and are not rounded again for what reads them."""
    part = by_fx("x86")
    whole = nn.Sequential(part, nn.Linear(5, 3)).eval()
    reference, lowered = quantized(whole, X)
    assert [kinds(lowered).count(kind) for kind in ("quantize", "table", "dequantize")] == [1, 0, 1]
    assert not lowered.islands
    taken = stages.from_qdq(part, X)
    assert list(taken.qparams.values())[-1] in reference.qparams.values()
    assert_equal_quantized(reference, lowered, X)


def packed(prepared: bool = False) -> nn.Module:
    model = nn.Sequential(QuantStub(), nn.Linear(8, 4), DeQuantStub()).eval()
    model.qconfig = get_default_qconfig("x86")
    model = prepare(model)
    model(torch.randn(4, 8))
    return model if prepared else torch.ao.quantization.convert(model)


def by_us(stage: str):
    captured = stages.capture(nn.Sequential(nn.Linear(8, 4)), torch.randn(4, 8))
    prepared = stages.prepare(captured)
    prepared(torch.randn(4, 8))
    reference = stages.convert(prepared)
    return {
        "captured": captured,
        "reference": reference,
        "lowered": stages.requantize(reference),
        "part": nn.Sequential(stages.compile(reference), nn.ReLU()),
        "module": reference.as_module(),
    }[stage]


def define_by_run() -> nn.Module:
    prepared = intaglio.eager.prepare(nn.Sequential(nn.Linear(8, 4)).eval(), torch.randn(4, 8))
    prepared(torch.randn(4, 8))
    return intaglio.eager.convert(prepared)


ALREADY = {
    "a program of ours": (lambda: by_us("part"), "0 (QuantizedModel): this part is quantized already", "float model"),
    "a reference": (lambda: by_us("reference"), "Reference", "compile(reference)"),
    "an integer graph": (lambda: by_us("lowered"), "Lowered", "compile(lowered)"),
    "a captured graph": (lambda: by_us("captured"), "Captured", "prepare(captured)"),
    "a module of a reference": (lambda: by_us("module"), "quantized already", "from_qdq"),
    "define-by-run": (define_by_run, "by intaglio.eager", "eager.rewrite"),
    "packed weights": (packed, "Quantize): this module is quantized already", "float model"),
    "packed and dynamic": (lambda: quantize_dynamic(nn.Sequential(nn.Linear(8, 4))), "0 (Linear)", "float model"),
    "scripted": (lambda: torch.jit.script(nn.Sequential(nn.Linear(8, 4)).eval()), "is TorchScript", "nn.Module"),
    "traced": (lambda: torch.jit.trace(nn.Linear(8, 4), torch.zeros(1, 8)), "is TorchScript", "nn.Module"),
    "prepared elsewhere": (lambda: packed(True), "HistogramObserver", "from_qdq"),
}


@pytest.mark.case("backend 35")
@pytest.mark.parametrize("name", ALREADY)
def test_already_quantized_models_are_refused_with_the_call_that_takes_them(name):
    """Case 35: never quantized again in silence."""
    make, problem, remedy = ALREADY[name]
    with pytest.raises(IntaglioError) as raised:
        intaglio.quantize(make(), [torch.randn(4, 8)], progress=False)
    assert problem in str(raised.value)
    assert remedy in raised.value.remedy


@pytest.mark.slow(reason="PyTorch quantizes a model; other quantized models are refused above")
@pytest.mark.case("backend 35")
def test_graphs_with_quantized_operators_of_pytorch_are_refused():
    """Case 35."""
    with pytest.raises(UnsupportedError, match="quantized already") as raised:
        intaglio.quantize(by_fx("x86"), [X], progress=False)
    assert "from_qdq" in raised.value.remedy


# -- recipes -----------------------------------------------------------------------------------------------------------

PLACES = {
    "convolution + convolution": (lambda m, x: m.c(x) + m.d(x), {"c": conv(outputs=3), "d": conv(outputs=3)}, 3),
    "convolution + input": (lambda m, x: m.c(x) + x, {"c": conv(outputs=3)}, 2),
    "linear + input": (lambda m, x: m.a(x) + x, {"a": nn.Linear(8, 8)}, 2),
    "a sum of functions": (lambda m, x: (m.c(x), torch.sigmoid(x) + torch.tanh(x)), {"c": conv()}, 1),
    "a sum of sums": (lambda m, x: m.c((x.exp() + x.sin()) + (x.cos() + x)), {"c": conv()}, 1),
    "a pool alone": (lambda m, x: (m.c(x), F.max_pool2d(x.exp(), 2)), {"c": conv()}, 1),
    "a pool behind a layer": (lambda m, x: F.max_pool2d(m.c(x), 2), {"c": conv()}, 3),
    "flatten and concatenation": (
        lambda m, x: m.e(torch.cat([m.c(x).flatten(2), m.d(x).flatten(2)], 2).transpose(1, 2)),
        {"c": conv(outputs=3), "d": conv(outputs=3), "e": nn.Linear(3, 3)},
        7,
    ),
}
"""Model, and how many values become quantized values. As in IPEX's recipe a layer's result is not one of them before it
is added, the other operand is, and sums and pools are quantized values only among layers. Unlike there a sum gives
quantized values, also behind linear layers, whose other operand may stay float by ``residual="float"``. These are the
numbers if results are quantized too: by default they are not."""


@pytest.mark.case("backend 37")
@pytest.mark.parametrize(
    "name",
    slow_params_except(
        "convolution + input",
        "a sum of functions",
        "a sum of sums",
        "a pool alone",
        "a pool behind a layer",
        of=PLACES,
        reason="other places of the same rules",
    ),
)
def test_a_recipe_inserts_the_expected_number_of_quantizes(name):
    body, layers, expected = PLACES[name]
    reference, _ = quantized(nets.randomize(Body(body, **layers)), torch.randn(2, 3, 8, 8), recipe=ROUNDED)
    assert sum(operator(node) == QUANTIZE_TENSOR for node in reference.module.graph.nodes) == expected


@pytest.mark.slow(reason="quantizes three times; files of recipes have tests of their own")
@pytest.mark.case("backend 36")
def test_a_recipe_goes_to_a_file_and_back_and_can_be_edited_there(tmp_path):
    body, layers, _ = PLACES["flatten and concatenation"]
    model = nets.randomize(Body(body, **layers)).eval()
    prepared = stages.prepare(stages.capture(model, (X,)))
    first = stages.convert(prepared, stages.calibrate(prepared, [X]))
    intaglio.Recipe().with_parameters(first.parameters).save(tmp_path / "once.toml")
    intaglio.Recipe.load(tmp_path / "once.toml").save(tmp_path / "twice.toml")
    assert (tmp_path / "once.toml").read_bytes() == (tmp_path / "twice.toml").read_bytes()
    again = intaglio.quantize(model, example_inputs=X * 0, recipe=tmp_path / "twice.toml")
    assert torch.equal(again(X), stages.compile(first)(X))
    intaglio.Recipe().with_selection(skip="d").save(tmp_path / "edited.toml")
    fewer = intaglio.quantize(model, [X], recipe=tmp_path / "edited.toml")
    assert "skipped d (aten.conv2d.default): the recipe leaves it in float" in fewer.text("sites")
    with pytest.raises(SelectorError, match="nowhere"):
        intaglio.quantize(model, [X], skip="nowhere")


# -- integers alone ----------------------------------------------------------------------------------------------------

INTEGERS = {
    "linear": (lambda m, x: m.f(m.a(x)), {"a": nn.Linear(8, 8), "f": nn.Linear(8, 5)}),
    "convolution": (lambda m, x: m.d(m.c(x)), {"c": conv(), "d": conv(4)}),
    "sum": (lambda m, x: m.e(m.c(x) + m.d(x)), {"c": conv(), "d": conv(), "e": conv(4)}),
    "sum, relu": (lambda m, x: m.e(F.relu(m.c(x) + m.d(x))), {"c": conv(), "d": conv(), "e": conv(4)}),
    "max pool": (lambda m, x: m.d(F.max_pool2d(m.c(x), 2)), {"c": conv(), "d": conv(4)}),
}


@pytest.mark.case("frontends B27")
@pytest.mark.parametrize(
    "name",
    slow_params_except("sum", "convolution", "max pool", of=INTEGERS, reason="the same arithmetic of another layer"),
)
def test_integer_arithmetic_matches_quantize_and_dequantize(name):
    """B27 allows two steps; ours is one, on the same integers. Biases are int32."""
    body, layers = INTEGERS[name]
    reference, lowered = quantized(nets.randomize(Body(body, **layers)), X)
    assert_equal_quantized(reference, lowered, X)
    kinds_of = {lowered.graph.types[n].dtype for op in lowered.graph.ops for n in op.outputs if op.kind != "dequantize"}
    assert kinds_of <= {DType.U8, DType.I32}
    anchors = [op for op in lowered.graph.ops if op.kind in ("conv2d", "linear")]
    assert [lowered.graph.constants[op.inputs[2]].dtype for op in anchors] == [np.int32] * len(anchors)


def outlier() -> nn.Module:
    """A classifier by small differences: in front of `head`, one channel is ten thousand times the others and counts
    for nothing, so with one scale for all the others vanish."""
    size = torch.ones(16)
    size[0] = 1e4

    def body(m: nn.Module, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.stem(x)) * size)

    model = nets.randomize(Body(body, stem=nn.Linear(12, 16), head=nn.Linear(16, 5)))
    with torch.no_grad():
        model.head.weight[:, 0] = 0
    return model


@pytest.mark.case("backend 38")
@pytest.mark.slow(reason="a search of many trials; a search finds the damaged operator of a smaller model below")
def test_the_operator_with_the_largest_damage_is_left_in_float():
    """Case 38: whatever the function measures, an operator in int8 that it does not bear is found."""

    def body(m, x):
        return m.d(F.relu(m.c(F.relu(m.b(F.relu(m.a(x)))))))

    model = nets.randomize(Body(body, a=conv(), b=conv(4), c=conv(4), d=conv(4)))

    def evaluate(m: nn.Module) -> float:
        return 0.5 if isinstance(m, intaglio.QuantizedModel) and "skipped b " not in m.text("sites") else 0.8

    found = intaglio.search(model, [X], evaluate, max_drop=0.01, minimize="size", candidates={"float": None})
    assert found.chosen.metric >= (1 - 0.01) * found.baseline
    assert "b" in found.changes
    assert {part.path for part in found.model.coverage.floats} <= {*found.changes, ""}


@pytest.mark.slow(reason="measures a transformer with five recipes; coarse values have tests in quant/precision")
@pytest.mark.case("backend 38")
def test_an_outlier_beyond_the_quantized_range_is_found():
    """Case 38, measured: accuracy is that of the float model again. The layer that reads the values is float, so
    they are not rounded, and nothing else is float."""
    model = outlier()
    x = torch.randn(512, 12, generator=torch.Generator().manual_seed(2))
    label = model(x).argmax(1)

    def accuracy(m):
        return (m(x).argmax(1) == label).float().mean()

    found = intaglio.search(model, [x[:64]], accuracy, max_drop=0.01, minimize="size", candidates={"float": None})
    assert found.trials[0].metric < 0.9
    assert found.chosen.metric >= 0.99
    assert "head" in found.changes
