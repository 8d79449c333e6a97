"""Transformers as int8 programs: what is quantized and what stays float, the reference, the program, every length."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from intaglio import Recipe, Setting, quantize
from intaglio.fxgraph.node_info import info
from intaglio.fxgraph.nodes import operator
from intaglio.fxgraph.passes.canonicalize_matmul import constant_matmul_to_linear, split_linear_by_slices
from intaglio.ir import evaluate, symbol
from intaglio.ir.dims import divide
from intaglio.plan import plan_graph
from intaglio.stages import Quantizer, calibrate, capture, compile, convert, equalize, prepare, requantize
from support.lowering import assert_equal_quantized
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body
from support.slow_params import slow_params

WIDTH, HEADS, DRAW = 32, 4, torch.Generator().manual_seed(7)
BATCHES = [torch.randn(3, 11, WIDTH, generator=DRAW) for _ in range(3)]


class Block(nn.Module):
    """Attention and two layers around a residual stream; one channel of it is large."""

    def __init__(self, heads: int = HEADS, together: bool = False) -> None:
        super().__init__()
        self.heads, self.together = heads, together
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.first, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        with torch.no_grad():
            self.first.weight[3] = 25
            self.wide.weight[:, 3] /= 25

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        n, length, _ = x.shape
        made = self.qkv(x).split(WIDTH, 2) if self.together else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.view(n, length, self.heads, -1).transpose(1, 2) for part in made)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(n, length, WIDTH)
        x = self.first(x + self.o(y))
        return self.last(x + self.narrow(F.gelu(self.wide(x))))


def all_stages(model: nn.Module, *, smooth: bool = False, free: bool = False):
    """Reference and integer graph, calibrated with the batches."""
    auto = torch.export.Dim.AUTO
    captured = capture(model.eval(), (BATCHES[0],), dynamic_shapes={"x": {0: auto, 1: auto}} if free else None)
    prepared = prepare(captured)
    if smooth:
        prepared = equalize(prepared, BATCHES)
    for batch in BATCHES:
        prepared(batch)
    reference = convert(prepared)
    return prepared, reference, requantize(reference)


def levels_apart(found: Tensor, wanted: Tensor) -> float:
    return (found - wanted).norm().item() / wanted.norm().item()


@pytest.fixture(scope="module")
def block():
    torch.manual_seed(0)
    return Block().eval()


def test_products_are_int8_and_sums_are_not(block):
    prepared, _, lowered = all_stages(block)
    kinds = [op.kind for op in lowered.graph.ops]
    assert kinds.count("linear") == 6
    assert kinds.count("attention") == 1
    assert "add" not in kinds
    assert "layer_norm" not in kinds
    assert not lowered.islands
    reasons = {skip.reason for skip in prepared.annotations.skipped}
    assert reasons == {"the recipe leaves operators between matrix products in float"}


def test_keys_and_values_are_quantized_symmetrically(block):
    prepared, reference, _ = all_stages(block)
    for name, symmetric in (("q", False), ("k", True), ("v", True)):
        q = reference.qparams[f"{name}#0/linear.0"]
        assert ((q.zero, q.qmin) == (128, 1)) is symmetric
    attention = next(site for site in prepared.annotations.sites if "scaled_dot" in site.name)
    assert attention.qmin == 0


def test_the_reference_of_attention_quantizes_its_exponentials(block):
    _, reference, _ = all_stages(block)
    nodes = [node for node in reference.module.graph.nodes if info(node).composite is not None]
    assert [operator(node).split(".")[1] for node in nodes] == [
        "transpose",
        "matmul",
        "mul",
        "amax",
        "clamp",
        "sub",
        "exp",
        "quantize_per_tensor",
        "dequantize_per_tensor",
        "sum",
        "clamp",
        "matmul",
        "div",
    ]


def test_the_interpreter_is_near_the_reference_and_the_reference_near_the_model(block):
    _, reference, lowered = all_stages(block)
    x = BATCHES[1]
    assert levels_apart(lowered(x), reference(x)) < 0.01
    assert levels_apart(reference(x), block(x)) < 0.03


@pytest.mark.slow(reason="a program with smoothing for many lengths; programs of sequences run in codegen")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_the_program_has_the_interpreters_bits_at_every_length_and_batch(block, isa):
    _, _, lowered = all_stages(block, smooth=True, free=True)
    model = compile(lowered, isa=isa)
    for n, length in ((3, 11), (1, 1), (2, 5), (4, 40), (0, 4), (3, 11)):
        x = torch.randn(n, length, WIDTH, generator=DRAW)
        assert torch.equal(model(x), lowered(x)), (n, length)


def test_attention_reads_and_writes_strided_operands(block):
    """No step moves heads: reshapes and permutations are strides."""
    _, _, lowered = all_stages(block, free=True)
    steps = plan_graph(lowered.graph)
    assert not {"reshape", "permute"} & {op.kind for step in steps.steps for op in step.partition.ops}
    assert [step.partition.anchor.kind for step in steps.steps].count("attention") == 1


@pytest.mark.parametrize(
    "kind",
    [
        "float",
        *slow_params("closed", reason="a mask that hides a whole row has tests in fxgraph"),
        *slow_params("bool", reason="boolean masks have tests in fxgraph"),
    ],
)
def test_a_mask_is_an_operand(block, kind):
    mask = torch.rand(3, 1, 1, 11, generator=DRAW) > 0.4
    mask[..., 0] = kind != "closed"
    if kind == "closed":
        mask[1] = False
    given = mask if kind != "float" else torch.randn(3, 1, 11, 11, generator=DRAW)
    captured = capture(block, (BATCHES[0], given))
    prepared = prepare(captured)
    prepared(BATCHES[0], given)
    lowered = requantize(convert(prepared))
    model = compile(lowered)
    found = model(BATCHES[0], given)
    assert not lowered.islands
    assert torch.equal(found, lowered(BATCHES[0], given))
    assert levels_apart(found, block(BATCHES[0], given)) < 0.03


def test_smoothing_gives_large_channels_to_the_weights(block):
    plain, smooth = (all_stages(block, smooth=smooth)[1] for smooth in (False, True))
    errors = [levels_apart(one(BATCHES[2]), block(BATCHES[2])) for one in (plain, smooth)]
    assert errors[1] < 0.8 * errors[0]
    assert "smooth: " in smooth.model_info.texts["corrections"]


def test_smoothing_changes_no_value(block):
    prepared = equalize(prepare(capture(block, (BATCHES[0],))), BATCHES)
    assert prepared.equalization.factors
    torch.testing.assert_close(prepared(BATCHES[0]), block(BATCHES[0]), rtol=1e-4, atol=1e-4)


@pytest.mark.slow(reason="smooths another block")
def test_factors_after_a_function_run_in_the_epilogue_of_the_layer():
    torch.manual_seed(1)
    model = Block().eval()
    with torch.no_grad():  # one neuron of the wide layer sticks out, and its weights say little
        model.wide.weight[5] *= 30
        model.wide.bias[5] = 20
        model.narrow.weight[:, 5] /= 100
    prepared, _, lowered = all_stages(model, smooth=True)
    assert any("gelu" in site for site in prepared.equalization.factors)
    (activate,) = [op for op in lowered.graph.ops if op.kind == "activate"]
    assert len(activate.inputs) == 3
    assert torch.equal(compile(lowered)(BATCHES[0]), lowered(BATCHES[0]))


def test_parameters_contain_the_equalization_factors(block):
    prepared, reference, _ = all_stages(block, smooth=True)
    again = convert(prepare(capture(block, (BATCHES[0],))), reference.parameters)
    assert again.text() == reference.text()
    assert torch.equal(again(BATCHES[0]), reference(BATCHES[0]))
    assert prepared.equalization.factors.keys() == reference.parameters.corrected.equalization.factors.keys()


# ---- the recipe


def test_the_default_recipe_depends_on_the_operators_of_the_model(block):
    for model, residual in ((block, "float"), (nn.Sequential(nn.Linear(WIDTH, WIDTH)), "int8")):
        found = prepare(capture(model.eval(), (BATCHES[0],))).quantizer.recipe.default
        assert found.residual == residual
        assert found.method == ("minmax" if residual == "float" else "mse")
        assert found.rounding == "gptq"


def test_a_user_setting_overrides_what_the_model_suggests(block):
    quantizer = Quantizer(Recipe.named("convolutional"))
    assert prepare(capture(block, (BATCHES[0],)), quantizer).quantizer.recipe.default.residual == "int8"
    mixed = prepare(capture(block, (BATCHES[0],)), Quantizer(Recipe.of({"first": {"residual": "int8"}})))
    assert mixed.quantizer.recipe.default.method == "minmax"


def test_quantize_runs_a_transformer_block_entirely_in_int8(block):
    model = quantize(block, BATCHES)
    assert model.coverage.macs == 1.0
    assert model.coverage.islands == 0
    assert levels_apart(model(BATCHES[0]), block(BATCHES[0])) < 0.02
    model.assert_int8(macs=1.0)


# ---- one layer for several, and how sizes divide


@pytest.mark.slow(reason="quantizes another block; joint layers are split in fxgraph")
def test_a_layer_for_queries_keys_and_values_becomes_three():
    torch.manual_seed(2)
    model = Block(together=True).eval()
    _, reference, lowered = all_stages(model)
    assert [op.kind for op in lowered.graph.ops].count("linear") == 6
    assert len({reference.qparams[f"qkv#0/linear.{i}"].step for i in range(3)}) == 3
    assert levels_apart(reference(BATCHES[0]), model(BATCHES[0])) < 0.03


def test_a_joint_projection_that_is_also_read_whole_is_not_split():

    def body(m, x):
        both, one = m.both(x), m.one(x)
        return both[:, :4], both[:, 4:], one[:, :4], one.sum(1)

    model = Body(body, both=nn.Linear(6, 8), one=nn.Linear(6, 8)).eval()
    module = prepare(capture(model, (torch.randn(2, 6),))).annotations.module
    shapes = [info(node).type.shape[-1] for node in module.graph.nodes if operator(node).startswith("aten.linear")]
    assert sorted(shapes) == [4, 4, 8]


def test_products_with_a_constant_matrix_become_linear_layers():
    weight, bias = torch.randn(6, 5, generator=DRAW), torch.randn(5, generator=DRAW)
    model = Body(lambda m, x: (torch.addmm(m.b, x, m.w), x @ m.w), w=nn.Parameter(weight), b=nn.Parameter(bias)).eval()
    captured = capture(model, (torch.randn(3, 6),))
    prepared = prepare(captured)
    x = torch.randn(3, 6)
    for found, wanted in zip(prepared(x), model(x), strict=True):
        torch.testing.assert_close(found, wanted)
    kinds = [operator(node) for node in prepared.annotations.module.graph.nodes if operator(node)]
    assert "aten.linear.default" in kinds
    assert (
        constant_matmul_to_linear(prepared.annotations.module)
        == split_linear_by_slices(prepared.annotations.module)
        == 0
    )


def test_symbolic_sizes_are_divided_only_without_remainder():
    n, m = symbol("n"), symbol("m")
    assert divide(n * m * 12, n * 3) == m * 4
    assert divide(n * 6 + 12, 6) == n + 2
    assert divide((n + 1) * (m + 2), n + 1) == m + 2
    assert divide(n * 6 + 12, n + 2) == 6
    assert divide(n + 1, n) is None
    assert divide(7, 2) is None
    assert divide(n, 0) is None
    for a, b in ((n * 12, 4), ((n + 3) * m, m), (n * n * 2, n)):
        assert evaluate(divide(a, b), {"n": 5, "m": 7}) * evaluate(b, {"n": 5, "m": 7}) == evaluate(a, {"n": 5, "m": 7})


def test_the_comparison_detects_another_multiplier_of_keys(block):
    _, _, lowered = all_stages(block)
    spoiled = {
        name: array * np.float32(1.1) if name == "k_multiplier" else array
        for name, array in lowered.graph.constants.items()
    }
    assert "k_multiplier" in spoiled
    other = replace(lowered, graph=lowered.graph.replace(constants=spoiled))
    assert not torch.equal(lowered(BATCHES[0]), other(BATCHES[0]))


@pytest.mark.parametrize(
    "body",
    [
        *slow_params(lambda m, x: m.c(x)[0], reason="other slices of the same axis"),
        lambda m, x: m.c(x)[1:],
        *slow_params(lambda m, x: m.c(x)[-1] + 1, reason="other slices of the same axis"),
    ],
)
def test_slices_of_a_dynamic_batch_are_data_movement(body):
    model = Body(body, c=nn.Conv2d(3, 8, 3)).eval()
    prepared = prepare(capture(model, (torch.randn(4, 3, 8, 8),)))
    prepared(torch.randn(4, 3, 8, 8))
    lowered = requantize(convert(prepared))
    assert not lowered.islands
    program = compile(lowered)
    for n in (1, 2, 5):
        x = torch.randn(n, 3, 8, 8)
        assert torch.equal(program(x), lowered(x))
        assert program(x).shape == model(x).shape


@pytest.mark.parametrize("setting", [{"bits": 7}, {"activations_dtype": "u4"}])
def test_low_bit_keys_and_values_have_zero_point_128_and_loadable_parameters(setting):
    def attend(m, x):
        q, k, v = (part(x).unflatten(2, (2, 4)).transpose(1, 2) for part in (m.q, m.k, m.v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    model = Body(attend, **{name: nn.Linear(8, 8) for name in "qkv"}).eval()
    x, recipe = torch.randn(3, 6, 8), Recipe.of({}, Setting(**setting))
    prepared = prepare(capture(model, x), Quantizer(recipe))
    reference = convert(prepared, calibrate(prepared, [x]))
    half = 63 if "bits" in setting else 7
    keys = reference.qparams["k#0/linear.0"]
    assert (keys.zeros, keys.qmin, keys.qmax) == ((128,), 128 - half, 128 + half)
    assert_equal_quantized(reference, requantize(reference), x)
    assert dict(convert(prepared, reference.parameters).qparams) == dict(reference.qparams)
