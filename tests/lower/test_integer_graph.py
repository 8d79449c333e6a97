"""Reference -> integer graph: which operators, which islands, nothing in float between integer neighbours."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from intaglio import stages
from intaglio.errors import UnsupportedError
from intaglio.fxgraph.nodes import operator
from intaglio.ir import DType, graph_text
from intaglio.ops import OPS
from intaglio.plan.graph_passes.integer_passes import INTEGER_PASSES
from intaglio.quant.recipes.recipe import Recipe
from intaglio.tracing.sizes import requested_sizes
from support import nets
from support.lowering import assert_equal_quantized, kinds, quantized, tensors
from support.nets import Body
from support.slow_params import slow_params

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def conv(inputs: int = 3, outputs: int = 8, kernel: int = 3, padding: int = 1, **rest) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=padding, **rest)


def run(body, *args: torch.Tensor, recipe=None, **modules):
    model = nets.randomize(Body(body, **modules))
    reference, lowered = quantized(model, *args, recipe=recipe)
    assert_equal_quantized(reference, lowered, *args)
    return model, reference, lowered


BORDERS = ("quantize", "dequantize")


def inside(lowered) -> list[str]:
    """Operators but those at the borders."""
    found = kinds(lowered)
    assert found[0] == "quantize"
    assert found[-1] == "dequantize"
    assert not set(found[1:-1]) & set(BORDERS), found
    return found[1:-1]


@pytest.mark.case("backend 1")
@pytest.mark.parametrize("weights", ["channel", "tensor"])
@pytest.mark.parametrize("bits", [7, 8])
@pytest.mark.parametrize("bias", [True, False])
def test_a_single_convolution_runs_with_every_setting(weights, bits, bias):
    recipe = Recipe.of({"*": {"weights": weights, "bits": bits}})
    c = conv(6, 8, 3, 2, stride=2, dilation=2, groups=2, bias=bias)
    _, reference, lowered = run(lambda m, x: m.c(x), torch.cat([X, -X], 1), c=c, recipe=recipe)
    assert inside(lowered) == ["conv2d"]
    assert reference.qparams["#0/input.args_0"].qmax == 2**bits - 1
    assert len(reference.qparams["c.weight"].scale) == (8 if weights == "channel" else 1)


@pytest.mark.case("backend 1")
@pytest.mark.parametrize("bias", [True, False])
def test_a_single_linear_layer_runs_in_int8(bias):
    assert inside(run(lambda m, x: m.a(x), X, a=nn.Linear(8, 5, bias=bias))[2]) == ["linear"]


@pytest.mark.case("backend 2")
def test_a_residual_sum_with_relu_is_three_kernels():
    _, reference, lowered = run(lambda m, x: m.e(F.relu(m.c(x) + m.d(x))), X, c=conv(), d=conv(), e=conv(8, 4))
    assert inside(lowered) == ["conv2d", "requantize", "conv2d", "add", "conv2d"]
    add = next(op for op in lowered.graph.ops if op.kind == "add")
    assert add.attrs["low"] == lowered.graph.types[add.output].q.zero_point[0]
    quantizes = [n for n in reference.module.graph.nodes if operator(n).startswith("quantized_decomposed.quantize")]
    assert len(quantizes) == 3, "the input, one summand, the sum after its relu"


@pytest.mark.case("backend 3")
def test_a_sum_operand_may_also_be_returned():
    _model, reference, lowered = run(
        lambda m, x: (lambda a: (m.e(F.relu(a + m.d(x))), a))(m.c(x)), X, c=conv(), d=conv(), e=conv(8, 4)
    )
    first = tensors(lowered(X))[1]
    assert torch.equal(first, tensors(reference(X))[1])
    assert kinds(lowered).count("add") == 1
    assert kinds(lowered).count("quantize") == 1


@pytest.mark.case("backend 4")
def test_tensors_of_the_caller_are_not_changed():
    def body(m, x0):
        x = m.a(x0)
        x = x0 * (x @ m.w) + x
        return x, x0

    model = nets.randomize(Body(body, a=nn.Linear(8, 8), w=nn.Parameter(torch.randn(8, 8))))
    reference, lowered = quantized(model, X.clone())
    x = X.clone()
    result = lowered(x)
    assert torch.equal(x, X)
    assert torch.equal(result[1], X)
    torch.testing.assert_close(result, reference(x))


@pytest.mark.case("backend 6")
def test_repeated_and_reordered_batches_give_the_same_results():
    model = nets.randomize(nets.Residual())
    _, lowered = quantized(model, nets.example(model, 1))
    x = nets.example(model, 7, seed=2)
    whole = lowered(x)
    for size in (1, 3, 7, 1):
        torch.testing.assert_close(lowered(x[:size]), whole[:size], rtol=0, atol=0)


@pytest.mark.case("backend 7", "problem 25")
def test_a_chain_of_linears_stays_in_integers():
    _model, _, lowered = run(lambda m, x: m.b(F.relu(m.a(x))), X, a=nn.Linear(8, 6), b=nn.Linear(6, 5))
    assert inside(lowered) == ["linear", "requantize", "linear"]


@pytest.mark.case("backend 8", "frontends B15")
def test_three_linear_layers_and_a_float_reader_share_one_tensor():
    _, reference, lowered = run(
        lambda m, x: (lambda y: (m.q(y), m.k(y), m.v(y), torch.erf(y)))(m.a(x)),
        X,
        a=nn.Linear(8, 6),
        q=nn.Linear(6, 5),
        k=nn.Linear(6, 5),
        v=nn.Linear(6, 5),
    )
    nodes = reference.module.graph.nodes
    (q_values,) = [n for n in nodes if "quantize_per_tensor" in n.name and n.args[0].name == "linear"]
    assert len(q_values.users) == 4
    assert all(len(user.users) == 1 for user in q_values.users)
    assert kinds(lowered).count("requantize") == 1
    assert kinds(lowered).count("linear") == 4


@pytest.mark.case("calibration 30")
def test_a_float_reader_of_the_input_reads_the_float_value():
    _, _reference, lowered = run(lambda m, x: (m.a(x), m.b(x), torch.erf(x)), X, a=conv(), b=conv())
    assert kinds(lowered).count("quantize") == 1
    assert torch.equal(lowered(X)[2], torch.erf(X))


@pytest.mark.case("backend 9", "frontends B22", "problem 3")
@pytest.mark.parametrize("net", [nets.SharedConv, nets.SharedConvBn])
def test_a_shared_weight_is_stored_once(net):
    model = nets.randomize(net())
    reference, lowered = quantized(model, nets.example(model, 4))
    weights = [n for n in lowered.graph.constants if lowered.graph.types[n].dtype is DType.S8]
    convs = [op for op in lowered.graph.ops if op.kind == "conv2d"]
    assert len(weights) == 1
    assert len(convs) == 2
    assert {op.inputs[1] for op in convs} == set(weights)
    assert_equal_quantized(reference, lowered, nets.example(model, 4, seed=5))


@pytest.mark.case("calibration 28", "frontends A13", "problem 3")
def test_a_module_called_twice_has_a_range_per_call():
    def body(m, x):
        y = F.relu(m.c(x))
        return m.c(y * 100)

    _model, reference, _lowered = run(body, torch.cat([X, X, X[:, :2]], 1), c=conv(8, 8))
    inputs = [q.scale[0] for name, q in reference.qparams.items() if name == "#0/input.args_0" or "mul" in name]
    assert len(inputs) == 2
    assert inputs[1] > 20 * inputs[0]
    assert {"c#0/conv2d.0:bias", "c#1/conv2d.0:bias"} <= set(reference.qparams)


@pytest.mark.case("backend 10")
def test_edited_parameters_are_kept():
    """conv -> q(s1) -> dq(s1) -> relu -> q(s2): a recipe that parts conv and relu keeps the rounding to s1."""
    recipe = Recipe.of({"op:aten.relu": {"bits": 7}})
    _, reference, lowered = run(lambda m, x: m.d(F.relu(m.c(x))), X, c=conv(), d=conv(8), recipe=recipe)
    assert inside(lowered)[:3] == ["conv2d", "requantize", "clamp"]
    assert reference.qparams["c#0/conv2d.0"] == reference.qparams["#0/relu.0"]


def test_a_clamp_left_in_float_by_the_recipe_is_not_rounded():
    recipe = Recipe.of({"op:aten.hardtanh": None})
    _, reference, lowered = run(lambda m, x: F.hardtanh(F.max_pool2d(m.c(x), 2), 0.0, 0.7), X, c=conv(), recipe=recipe)
    assert "clamp" not in kinds(lowered)
    assert torch.equal(lowered(X), reference(X))
    assert lowered(X).max() == torch.tensor(0.7)


@pytest.mark.case("calibration 44")
def test_equal_parameters_need_no_operator():
    _, _, lowered = run(lambda m, x: m.d(F.relu(F.relu(m.c(x)))), X, c=conv(), d=conv(8))
    assert inside(lowered) == ["conv2d", "requantize", "conv2d"]


@pytest.mark.case("backend 14")
def test_conv_pool_flatten_linear_is_integer_throughout():
    _, reference, lowered = run(lambda m, x: m.a(F.max_pool2d(m.c(x), 2).flatten(1)), X, c=conv(), a=nn.Linear(128, 5))
    assert inside(lowered) == ["conv2d", "requantize", "max_pool2d", "reshape", "linear"]
    shared = {reference.qparams[n] for n in ("c#0/conv2d.0", "#0/max_pool2d.0", "#0/view.0") if n in reference.qparams}
    assert len(shared) == 1


@pytest.mark.case("backend 17", "frontends B14")
@pytest.mark.parametrize("other", [lambda m, y: m.bias, lambda m, y: y.mean(1, keepdim=True)])
def test_sums_with_broadcast_are_loops_in_float(other):
    model, _, lowered = run(
        lambda m, x: (lambda y: m.d(F.relu(y + other(m, y))))(m.c(x)),
        X,
        c=conv(),
        d=conv(8),
        bias=nn.Parameter(torch.ones(X.shape[2], 1)),
    )
    assert "add" not in kinds(lowered)
    assert "loop" in kinds(lowered)
    assert not lowered.islands
    torch.testing.assert_close(lowered(X), model(X), atol=0.1 * model(X).abs().max().item(), rtol=0)


@pytest.mark.case("frontends B14")
def test_a_sum_operand_may_have_other_readers():
    _, _, lowered = run(
        lambda m, x: (lambda a, b: (m.e(a + b), m.f(a)))(m.c(x), m.d(x)), X, c=conv(), d=conv(), e=conv(8), f=conv(8)
    )
    add = next(op for op in lowered.graph.ops if op.kind == "add")
    assert add.inputs[0] == "d_acc"
    assert lowered.graph.types["c"].dtype is DType.U8


@pytest.mark.case("backend 19")
def test_a_convolution_may_be_returned_and_read_by_a_relu():
    _, reference, lowered = run(lambda m, x: (lambda y: (y, m.d(F.relu(y))))(m.c(x)), X, c=conv(), d=conv(8))
    assert torch.equal(lowered(X)[0], reference(X)[0])
    assert "clamp" in kinds(lowered)


@pytest.mark.case("backend 21")
def test_an_unsupported_operator_gets_a_plain_float_tensor():
    seen = []
    _, _, lowered = run(lambda m, x: m.e(torch.erf(F.relu(m.c(x) + m.d(x)))), X, c=conv(), d=conv(), e=conv(8))
    island = lowered.islands["island0"]
    island.module.register_forward_pre_hook(lambda module, args: seen.extend(args))
    lowered(X)
    (found,) = seen
    assert (type(found), found.dtype, found.shape) == (Tensor, torch.float32, (4, 8, 8, 8))
    assert found.is_contiguous(memory_format=torch.channels_last)  # as the program has it
    assert island.operators == ("aten.erf.default",)


def test_scalar_results_have_no_axis():
    model, _, lowered = run(lambda m, x: m.c(x).mean(), X, c=conv())
    assert lowered(X).shape == model(X).shape == ()


def test_islands_take_free_dimensions():
    model, _, lowered = run(lambda m, x: m.c(x).view(x.shape[0] * 2, -1).sin().view(x.shape[0], -1), X, c=conv())
    assert lowered(X[:3]).shape == model(X[:3]).shape


def test_float_work_between_the_same_neighbours_is_one_island():
    _, _, lowered = run(lambda m, x: m.d(torch.tan(m.c(x)).atan2(torch.atan(m.e(x)))), X, c=conv(), d=conv(8), e=conv())
    assert [island.operators for island in lowered.islands.values()] == [
        ("aten.tan.default", "aten.atan.default", "aten.atan2.default")
    ]


@pytest.mark.parametrize(
    "net",
    [nets.MaxPoolNet, nets.InplaceMutations, *slow_params(nets.OptionA, reason="a larger network")],
    ids=lambda net: net.__name__,
)
def test_lowering_passes_are_idempotent(net):
    model = nets.randomize(net())
    _, lowered = quantized(model, nets.example(model, 4))
    for step in INTEGER_PASSES:
        graph, count = step(lowered.graph)
        assert count == 0
        assert graph_text(graph) == graph_text(lowered.graph)


@pytest.mark.slow(reason="lowers a larger network twice")
def test_lowering_twice_gives_the_same_text_and_every_kind_has_a_record():
    model = nets.randomize(nets.OptionA())
    first, second = (quantized(model, nets.example(model, 4))[1] for _ in "ab")
    assert first.text() == second.text()
    assert set(kinds(first)) <= set(OPS)
    assert all(np.array_equal(first.graph.constants[k], second.graph.constants[k]) for k in first.graph.constants)


def test_an_int8_table_whose_rows_are_rounded_to_16_bits_is_read_by_the_program():
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4)).eval()
    recipe = Recipe.of({"0": {"embeddings": "int8"}, "1": {"activations_dtype": "s16"}})
    ids = torch.randint(9, (3, 5), generator=torch.Generator().manual_seed(0))
    prepared = stages.prepare(stages.capture(model, ids), stages.Quantizer(recipe))
    lowered = stages.requantize(stages.convert(prepared, stages.calibrate(prepared, [ids])))
    assert not any("aten.embedding.default" in island.operators for island in lowered.islands.values())
    assert torch.equal(stages.compile(lowered)(ids), lowered(ids))


def test_sizes_that_hold_for_the_example_only_are_refused(monkeypatch):
    """torch.export takes the one pixel of the example for the size of all calls."""
    monkeypatch.setattr(requested_sizes, "disagreement", lambda *call: None)
    model, x = Body(lambda m, x: F.hardswish(m.c(x)), c=nn.Conv1d(2, 2, 3, stride=8)), torch.ones(3, 2, 5)
    captured = stages.capture(model.eval(), (x,), dynamic_shapes={"args": ({2: Dim.AUTO},)})
    prepared = stages.prepare(captured)
    reference = stages.convert(prepared, stages.calibrate(prepared, [x], progress=False))
    with pytest.raises(UnsupportedError, match=r"the shape \[3, 2, .*, but torch.export states \[3, 2, 1\]"):
        stages.requantize(reference)
