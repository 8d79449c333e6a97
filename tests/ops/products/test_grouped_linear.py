"""Linear layers of mixtures of experts: groups of rows, kernels, whole experts, recipes, files, training."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import intaglio
from intaglio import build, stages
from intaglio.errors import UnsupportedError
from intaglio.fxgraph.grouped_operator import grouped_linear
from intaglio.ir import DType
from intaglio.lower import Lowered
from intaglio.ops import check_graph
from intaglio.ops.products.grouped_linear import of_each_row, rows_of_groups
from intaglio.quant.recipes.recipe import Recipe, Setting
from support.integer_graphs import N, Net
from support.lowering import assert_equal_quantized, kinds, quantized, sqnr
from support.matmul_library import BEST_ISA_PARAMS, RUNNABLE_ISAS
from support.nets import Body, randomize
from support.programs import assert_same_bits, assert_stays_inside, threads
from support.slow_params import slow_params, slow_params_except

LAYERS = {  # (inputs, outputs, groups)
    "one panel": (16, 16, 3),
    "the last panel is narrower": (20, 75, 4),
    "few outputs": (33, 5, 9),
    "several panels": (64, 200, 2),
    "one group": (12, 24, 1),
}
ANY_END = st.one_of(st.integers(-3, 45), st.sampled_from([-(2**63), 2**63 - 1]))


# ---- groups


@given(st.lists(ANY_END, min_size=1, max_size=6), st.integers(0, 40))
def test_groups_never_overlap_and_never_leave_the_rows(ends, rows):
    groups = rows_of_groups(np.array(ends), rows)
    edges = [0, *(edge for group in groups for edge in (group.start, group.stop))]
    assert len(groups) == len(ends)
    assert edges == sorted(edges)
    assert edges[-1] <= rows
    if ends == sorted(ends) and ends[0] >= 0 and ends[-1] <= rows:
        assert [group.stop for group in groups] == ends


def test_rows_behind_all_groups_have_no_group():
    values = of_each_row(np.float32([1, 2, 3, 4]), np.array([2, 3]), 5)
    assert values.tolist() == [[1, 2], [1, 2], [3, 4], [0, 0], [0, 0]]


@given(st.lists(ANY_END, min_size=3, max_size=3), st.booleans())
def test_the_operator_of_pytorch_multiplies_each_group_and_has_gradients(ends, has_bias):
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=draw, dtype=torch.float64) for s in ((7, 4), (6, 4), (6,)))
    given_bias = bias if has_bias else None
    found = grouped_linear()(x, weight, given_bias, torch.tensor(ends))
    expected = torch.zeros(7, 2, dtype=torch.float64)
    for group, rows in enumerate(rows_of_groups(np.array(ends), 7)):
        own = slice(2 * group, 2 * group + 2)
        expected[rows] = F.linear(x[rows], weight[own], bias[own] if has_bias else None)
    torch.testing.assert_close(found, expected)
    leaves = [leaf.requires_grad_() for leaf in (x, weight, bias)]

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return grouped_linear()(x, weight, bias if has_bias else None, torch.tensor(ends))

    assert torch.autograd.gradcheck(function, tuple(leaves))


# ---- kernels


@cache
def layers() -> tuple[Net, Lowered]:
    """Every layer on quantized values and on rows with scales of their own."""
    net, found = Net(), []
    for inputs, outputs, groups in LAYERS.values():
        x, ends = net.input(N, inputs), net.input(groups, dtype=DType.I64)
        rows, scales = net.quantize_rows(x)
        found.append(net.grouped_linear(net.quantize(x, 7), ends, outputs))
        found.append(net.grouped_linear(rows, ends, outputs, scales))
    found.append(net.grouped_linear(net.quantize(x), ends, outputs, single=True))
    found.append(net.grouped_linear(rows, ends, outputs, scales, single=True))
    return net, net.lowered(*found)


@pytest.fixture(scope="module", params=RUNNABLE_ISAS)
def compiled(request):
    return build.compile(layers()[1], isa=request.param)


@settings(max_examples=20)
@given(st.data(), st.integers(0, 40), st.integers(1, 3))
def test_kernels_have_the_bits_of_the_interpreter_whatever_the_ends(compiled, data, rows, count):
    net, lowered = layers()
    inputs = net.batch(rows, seed=rows)
    for place, (_, _, groups) in enumerate(LAYERS.values()):
        drawn = data.draw(st.lists(ANY_END, min_size=groups, max_size=groups))
        inputs[2 * place + 1] = torch.tensor(sorted(drawn) if data.draw(st.booleans()) else drawn)
    with threads(count):
        found = compiled(*inputs)
    assert_same_bits(found, lowered(*inputs))


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_nothing_outside_of_the_operands_is_read_or_written(isa):
    """The ends of a batch are integers from -9 to 9; there are 3 rows."""
    net, lowered = layers()
    assert_stays_inside(net, lowered, build.compile(lowered, isa=isa).artifact)


def test_a_file_with_other_groups_is_refused():
    """Scales are of the groups by which rows were multiplied."""
    _, lowered = layers()
    graph = lowered.graph
    check_graph(graph)
    places = [i for i, op in enumerate(graph.ops) if op.kind in ("grouped_linear", "dequantize_groups")]
    for place in places[:2]:
        op, other = graph.ops[place], graph.inputs[3]
        changed = replace(op, inputs=(*op.inputs[:-1], other))
        ops = (*graph.ops[:place], changed, *graph.ops[place + 1 :])
        with pytest.raises(ValueError, match="groups"):
            check_graph(replace(graph, ops=ops))


# ---- experts


class Experts(nn.Module):
    """Two layers of experts: each row has an expert, and rows are sorted by it, as in transformers."""

    def __init__(self, width: int = 16, hidden: int = 24, count: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(count, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(count, width, hidden))
        self.router = nn.Linear(width, count)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        gates, expert = self.router(x).softmax(-1).topk(2)
        order = torch.sort(expert.flatten(), stable=True)
        counts = torch.histc(order.values.float(), len(self.up), 0, len(self.up) - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = x[order.indices // 2]
        gate, value = F.grouped_mm(rows, self.up.transpose(1, 2), offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * value, self.down.transpose(1, 2), offs=ends)
        y = y * gates.flatten()[order.indices][:, None]
        back = torch.empty_like(order.indices)
        back[order.indices] = torch.arange(back.shape[0])
        return self.last(y[back].reshape(x.shape[0], 2, -1).sum(1))


class SplitExperts(Experts):
    """Layers of experts that split the rows at the counts of them, as in JetMoE."""

    def forward(self, x: Tensor) -> Tensor:
        gates, expert = self.router(x).softmax(-1).topk(2)
        chosen = torch.zeros(x.shape[0], len(self.up)).scatter(1, expert, 1)
        sizes = chosen.long().sum(0).tolist()
        order = torch.sort(expert.flatten(), stable=True).indices
        token = order.div(2, rounding_mode="trunc")
        gate, value = multiplied(x[token], self.up, sizes).chunk(2, -1)
        y = multiplied(F.silu(gate) * value, self.down, sizes) * gates.flatten()[order][:, None]
        return self.last(torch.zeros(x.shape[0], self.down.shape[1]).index_add(0, token, y))


def multiplied(x: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
    """The rows of each group times its weight."""
    return torch.cat([F.linear(part, weight) for part, weight in zip(x.split(sizes), weights, strict=True)])


X = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))


def experts(kind: type[Experts] = Experts, **sizes: int) -> Experts:
    model = kind(**sizes)
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
    return model.eval()


RECIPES = {
    "default": None,
    "transformer": Recipe.named("transformer"),
    "dynamic": Recipe.named("int8_dynamic"),
    "one scale": Recipe.of({}, Setting(weights="tensor")),
    "int8 results": Recipe.of({}, Setting(results="int8")),
    "4 bits": Recipe.of({}, Setting(weights_dtype="s4", weights="group:8")),
}


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
@pytest.mark.parametrize(
    "name",
    slow_params_except(
        "default",
        "int8 results",
        of=RECIPES,
        reason="one scale is tested with the kernels, and the recipe of transformers with the interpreter",
    ),
)
def test_experts_run_in_int8_without_an_island(name, isa, tmp_path):
    model = experts()
    reference, lowered = quantized(model, X, recipe=RECIPES[name])
    assert not lowered.islands
    assert lowered.macs[0] == lowered.macs[1] > 0
    assert kinds(lowered).count("grouped_linear") == 2
    program = stages.compile(lowered, isa=isa)
    program.save(tmp_path / "experts")
    for run in (program, intaglio.load(tmp_path / "experts", isa=isa)):
        for batch in (X, X[:1], -X[:5]):
            for count in (1, 2):
                with threads(count):
                    assert_same_bits([run(batch)], [lowered(batch)])
    assert sqnr(program(X), reference(X)) > 40
    assert sqnr(program(X), model(X)) > (10 if name == "4 bits" else 20)


@pytest.mark.slow(reason="quantizes experts that are written in another way")
@pytest.mark.parametrize(
    "train", [False, *slow_params(True, reason="prepared experts are trained below, and their graph is the same")]
)
def test_rows_that_are_split_at_their_counts_are_experts_too(train):
    model, recipe = experts(SplitExperts), Recipe.named("transformer")
    captured = stages.capture(model, (X,), train=train)
    prepared = stages.prepare(captured, stages.Quantizer(recipe=recipe), qat=train)
    prepared(X)
    lowered = stages.requantize(stages.convert(prepared))
    whole = quantized(experts(), X, recipe=recipe)[1]
    assert not lowered.islands
    assert lowered.macs == whole.macs
    assert kinds(lowered).count("grouped_linear") == 2
    assert sqnr(lowered(X), experts()(X)) > 20
    for batch in (X, X[:1], -X[:5]):
        assert sqnr(lowered(batch), whole(batch)) > 30


def test_the_interpreter_agrees_with_the_reference_operator_by_operator():
    reference, lowered = quantized(experts(), X, recipe=Recipe.named("transformer"))
    assert_equal_quantized(reference, lowered, X)


@pytest.mark.slow(reason="quantizes three experts to count scales that the results above depend on")
def test_scales_are_those_of_every_output_of_every_expert():
    reference, _ = quantized(experts(count=3), X)
    q = reference.qparams["up"]
    assert (len(q.scales), q.axis) == (3 * 48, 0)
    assert len(set(q.scales)) > 100


@pytest.mark.slow(reason="quantizes experts twice for one count")
def test_multiply_accumulates_are_those_of_the_chosen_experts():
    """Two of the experts compute each row, however many there are."""
    few, many = (quantized(experts(count=count), X)[1].macs[1] for count in (4, 8))
    assert many - few == 4 * 16  # the router
    assert few == 2 * (48 * 16 + 24 * 16) + 4 * 16 + 16 * 16


@pytest.mark.slow(reason="compiles a further model; grouped layers run alone above")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_a_function_behind_a_grouped_layer_runs_on_its_tiles(isa):
    """Of rows behind all groups too, whose results are zeros."""

    def body(m: Body, x: Tensor, ends: Tensor) -> Tensor:
        return m.last(F.grouped_mm(m.first(x), m.experts, offs=ends.int()).exp() * 0.5 + x[:, :1])

    matrices = nn.Parameter(torch.randn(3, 16, 72))
    model = randomize(Body(body, first=nn.Linear(16, 16), last=nn.Linear(72, 8), experts=matrices))
    ends = torch.tensor([2, 2, 12])
    _, lowered = quantized(model, X, ends)
    program = stages.compile(lowered, isa=isa)
    assert "product_epilogue" in stages.plan(lowered).text()
    for given_ends in (ends, torch.tensor([0, 1, 9]), torch.tensor([12, 12, 12]), torch.tensor([-5, 40, 1])):
        for count in (1, 2, 3):
            with threads(count):
                assert_same_bits([program(X, given_ends)], [lowered(X, given_ends)])


@pytest.mark.slow(reason="compiles and saves experts again; int8 ones are run and loaded above")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
@pytest.mark.parametrize(
    "kind", ["s8", *slow_params("f16", reason="programs with weights of 16 bits are compared with PyTorch below")]
)
def test_weights_alone_are_stored_in_fewer_bits_without_an_island(kind, isa, tmp_path):
    model, recipe = experts(hidden=36), Recipe.of({}, Setting(activations="float", weights_dtype=kind))
    reference, lowered = quantized(model, X, recipe=recipe)
    assert not lowered.islands
    assert kinds(lowered).count("grouped_linear_f32") == 2
    program = stages.compile(lowered, isa=isa)
    program.save(tmp_path / "experts")
    for run in (program, intaglio.load(tmp_path / "experts", isa=isa)):
        for batch in (X, X[:1], -X[:5]):
            for count in (1, 2, 3):
                with threads(count):
                    assert_same_bits([run(batch)], [lowered(batch)])
    assert sqnr(program(X), reference(X)) > 100
    assert sqnr(program(X), model(X)) > (25 if kind == "s8" else 60)


def ends_alone(recipe: Recipe | None) -> tuple[nn.Module, Lowered]:
    """A model whose second input has the ends of the groups, which need not fit the rows."""

    def body(m: Body, x: Tensor, ends: Tensor) -> Tensor:
        return m.last(F.grouped_mm(m.first(x), m.experts, offs=ends.int()))

    matrices = nn.Parameter(torch.randn(3, 16, 24, generator=torch.Generator().manual_seed(2)))
    model = randomize(Body(body, first=nn.Linear(16, 16), last=nn.Linear(24, 8), experts=matrices))
    return model, quantized(model, X, torch.tensor([2, 2, 12]), recipe=recipe)[1]


LEFT_IN_FLOAT = Recipe.of({"op:aten._grouped_mm": Setting(quantize=False)})


@pytest.mark.parametrize(
    "recipe",
    [
        LEFT_IN_FLOAT,
        *slow_params(
            Recipe.of({}, Setting(activations="float", weights_dtype="f16")),
            reason="a recipe that keeps the layers in float, too",
        ),
    ],
)
def test_ends_that_do_not_fit_give_the_same_in_float(recipe, tmp_path):
    model, lowered = ends_alone(recipe)
    program = stages.compile(lowered)
    program.save(tmp_path / "experts")
    loaded = intaglio.load(tmp_path / "experts")
    for ends in ([2, 2, 12], [0, 5, 9], [12, 12, 12], [-5, 40, 1], [7, 3, -1]):
        found, expected = loaded(X, torch.tensor(ends)), torch.zeros(12, 24)
        for group, rows in enumerate(rows_of_groups(np.array(ends), 12)):
            expected[rows] = model.first(X)[rows] @ model.experts[group]
        assert torch.equal(found, program(X, torch.tensor(ends)))
        torch.testing.assert_close(found, model.last(expected).detach(), atol=0.3, rtol=0.05)


@pytest.mark.slow(reason="compiles and saves experts again")
def test_experts_that_a_recipe_leaves_in_float_can_be_saved(tmp_path):
    model = experts()
    reference, lowered = quantized(model, X, recipe=LEFT_IN_FLOAT)
    assert len(lowered.islands) == 2
    reasons = {skip.reason for skip in lowered.skipped if skip.origin.operator == "aten._grouped_mm.default"}
    assert reasons == {"the recipe leaves it in float"}
    program = stages.compile(lowered)
    program.save(tmp_path / "experts")
    assert torch.equal(intaglio.load(tmp_path / "experts")(X), program(X))
    torch.testing.assert_close(program(X), reference(X), rtol=1e-4, atol=1e-4)


@pytest.mark.slow(reason="the same experts in another type")
def test_experts_of_half_precision_are_quantized_too():
    model = experts().bfloat16()
    _, lowered = quantized(model, X.bfloat16())
    assert not lowered.islands
    assert lowered.macs[0] == lowered.macs[1]
    assert sqnr(lowered(X.bfloat16()).float(), experts()(X)) > 20


@pytest.mark.slow(reason="trains twenty steps; gradients of the operator are tested above")
def test_experts_are_trained_with_fake_quantization():
    model = experts().train()
    prepared = stages.prepare(stages.capture(model, (X,), train=True), qat=True)
    optimizer, losses = torch.optim.SGD(prepared.parameters(), 0.02), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (prepared(X) - X).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = {name: parameter.grad for name, parameter in prepared.named_parameters()}
    assert all(gradients[name].any() for name in ("up", "down"))
    assert losses[-1] < 0.8 * losses[0]
    lowered = stages.requantize(stages.convert(prepared))
    assert not lowered.islands
    assert sqnr(lowered(X), prepared.eval()(X)) > 30


@pytest.mark.slow(reason="reads the operators of ONNX; test_onnx.py has the same refusal")
@pytest.mark.usefixtures("operators_read_once")
def test_onnx_has_no_operators_for_experts_and_says_so(tmp_path):
    reference, _ = quantized(experts(), X)
    with pytest.raises(UnsupportedError, match=r"intaglio\.grouped_linear\.default\): no ONNX operators"):
        stages.compile(reference, backend="onnx", path=tmp_path / "experts.onnx")
