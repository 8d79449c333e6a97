"""Conformance cases of layers and loops: a whole residual net, quantize that is not lifted, functions, smoothing,
weights alone."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import intaglio
from intaglio import Recipe, Setting, stages
from intaglio.plan import plan_graph
from intaglio.stages import capture, compile, convert, equalize, prepare, requantize
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.slow_params import slow_params, slow_params_except

DRAW = torch.Generator().manual_seed(3)


def all_stages(model: nn.Module, *inputs: Tensor, recipe: Recipe | None = None):
    prepared = prepare(capture(model.eval(), inputs), stages.Quantizer(recipe or Recipe()))
    prepared(*inputs)
    reference = convert(prepared)
    return reference, requantize(reference)


def partitions(lowered) -> list[list[str]]:
    return [[op.kind for op in step.partition.ops] for step in plan_graph(lowered.graph).steps]


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(*sizes, bias=False)
            for sizes in ((inputs, width, 1), (width, width, 3, stride, 1), (width, 4 * width, 1))
        )
        self.na, self.nb, self.nc = nn.BatchNorm2d(width), nn.BatchNorm2d(width), nn.BatchNorm2d(4 * width)
        self.down = nn.Conv2d(inputs, 4 * width, 1, stride) if stride > 1 or inputs != 4 * width else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.nb(self.b(F.relu(self.na(self.a(x))))))
        return F.relu(self.nc(self.c(y)) + (x if self.down is None else self.down(x)))


@pytest.mark.slow(reason="a network of sixteen convolutions; smaller residual networks are in codegen")
@pytest.mark.case("backend 5")
def test_a_residual_net_is_int8_from_end_to_end():
    torch.manual_seed(0)
    blocks = [Bottleneck(16, 8, 1), Bottleneck(32, 8, 1), Bottleneck(32, 16, 2), Bottleneck(64, 16, 1)]
    model = randomize(
        nn.Sequential(
            nn.Conv2d(3, 16, 7, 2, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
    )
    x = torch.randn(64, 3, 32, 32, generator=DRAW)
    reference, lowered = all_stages(model, x)
    kinds = [kind for step in partitions(lowered) for kind in step]
    assert kinds.count("conv2d") == 15
    assert not {"island", "loop"} & set(kinds)
    assert [step for step in partitions(lowered) if step[0] == "conv2d" and len(step) < 2] == []
    found, wanted = compile(lowered)(x), reference(x)
    assert (found.argmax(1) == wanted.argmax(1)).float().mean() >= 0.99


@pytest.mark.slow(reason="one model for one rule; golden texts show where values are quantized")
@pytest.mark.case("backend 13")
def test_quantize_is_not_propagated_over_a_view_that_a_float_sum_reads():
    def body(m, x, y):
        turned = m.first(x).permute(0, 2, 1)
        return m.second(turned), turned + y

    model = Body(body, first=nn.Linear(8, 12), second=nn.Linear(6, 4))
    x, y = torch.randn(2, 6, 8, generator=DRAW), torch.randn(2, 12, 6, generator=DRAW)
    reference, lowered = all_stages(model, x, y, recipe=Recipe.named("transformer"))
    assert ["linear", "requantize"] not in partitions(lowered), "the first layer gives floats"
    for found, wanted, exact in zip(compile(lowered)(x, y), reference(x, y), model(x, y), strict=True):
        assert (found - wanted).abs().max() <= 0.02 * exact.abs().max()
    assert all(map(torch.equal, compile(lowered)(x, y), lowered(x, y)))


ENDS = {
    "dequantize, op": lambda m, x: torch.exp(m.c(x)),
    "op, quantize": lambda m, x: m.c(torch.tanh(x)),
    "dequantize, op, quantize": lambda m, x: m.d(m.c(x) * torch.sigmoid(m.c(x)) + 0.5),
}


@pytest.mark.case("frontends C1")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
@pytest.mark.parametrize("name", slow_params_except("dequantize, op, quantize", of=ENDS, reason="a part of the chain"))
def test_a_chain_between_quantized_values_is_one_exact_loop(name, isa):
    width = 16 * 3 + 3
    model = Body(ENDS[name], c=nn.Linear(width, width), d=nn.Linear(width, 5))
    x = torch.randn(3, width, generator=DRAW)
    x[0, :4] = torch.tensor([1e30, -1e30, 0.5, -0.5])
    _, lowered = all_stages(model, x, recipe=Recipe.of({}, Setting(residual="float", functions="table")))
    assert sum(step == ["loop"] for step in partitions(lowered)) <= 1
    assert torch.equal(compile(lowered, isa=isa)(x), lowered(x))


UNARY = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.7),
    "hardswish": F.hardswish,
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.case("frontends C2")
@pytest.mark.parametrize(
    "quantized", [*slow_params(False, reason="the same fusion to floats, which every program has at its end"), True]
)
@pytest.mark.parametrize(
    "name", slow_params_except("relu", "gelu", of=UNARY, reason="every function has a test of its table")
)
def test_functions_after_layers_are_fused_with_and_without_quantization(name, quantized):
    after = nn.Linear(21, 4) if quantized else nn.Identity()
    model = Body(lambda m, x: m.after(UNARY[name](m.c(x))), c=nn.Linear(12, 21), after=after)
    x = torch.randn(9, 12, generator=DRAW)
    _, lowered = all_stages(model, x)
    found, exact = compile(lowered)(x), model(x)
    assert not lowered.islands
    assert torch.equal(found, lowered(x))
    assert (found - exact).abs().max() <= 0.03 * exact.abs().max()


@pytest.mark.slow(reason="compiles layers with weights alone, which ops/products has in many forms")
@pytest.mark.case("frontends C4")
@pytest.mark.parametrize(
    "kind", [torch.float32, *slow_params(torch.bfloat16, reason="another type of the same weights")]
)
def test_weights_may_be_integers_with_float_activations(kind, tmp_path):
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).eval().to(kind)
    x = torch.randn(16, 64, generator=DRAW).to(kind)
    quantized = intaglio.quantize(model, [x], recipe=Recipe.of({}, Setting(activations="float")))
    found, exact = quantized(x), model(x)
    assert found.dtype is kind
    assert (found - exact).float().norm() <= 1e-2 * exact.float().norm()
    reasons = [part.reason for part in quantized.coverage.loops if "weight-only" in part.reason]
    assert reasons == ["weight-only quantization (s8): activations stay in float"] * 2
    assert quantized.coverage.islands == 0
    assert quantized.coverage.bytes_after < 0.4 * 4 * sum(p.numel() for p in model.parameters())
    quantized.save(tmp_path / "model.intaglio")
    assert torch.equal(intaglio.load(tmp_path / "model.intaglio")(x), found)


@pytest.mark.slow(reason="quantizes layers for one entry of a recipe; selectors have tests in quant/recipes")
@pytest.mark.usefixtures("without_avx512")
@pytest.mark.case("frontends C4")
def test_one_of_several_layers_can_be_selected():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    x = torch.randn(16, 16, generator=DRAW)
    mixed = intaglio.quantize(model, [x], recipe={"0": {"activations": "float"}})
    assert [op.kind for op in mixed.graph.ops].count("linear") == 1
    exact = model(x)
    assert (mixed(x) - exact).norm() <= 2e-2 * exact.norm()


@pytest.mark.slow(reason="quantizes twice; smoothing has tests in quant/correct")
@pytest.mark.case("frontends C5")
def test_smoothing_is_more_accurate_with_an_outlier_channel():
    torch.manual_seed(1)

    def body(m, x):
        return m.layer(F.layer_norm(x, (32,)) * m.size)

    size = torch.ones(32)
    size[[3, 17]] = 60
    model = Body(body, layer=nn.Linear(32, 24), size=nn.Parameter(size)).eval()
    with torch.no_grad():
        model.layer.weight[:, [3, 17]] /= 60
    x, exact = torch.randn(32, 10, 32, generator=DRAW), None
    exact = model(x)
    errors = []
    for smooth in (False, True):
        prepared = prepare(capture(model, (x,)), stages.Quantizer(Recipe.named("transformer")))
        prepared = equalize(prepared, [x]) if smooth else prepared
        prepared(x)
        lowered = requantize(convert(prepared))
        errors.append(((compile(lowered)(x) - exact).norm() / exact.norm()).item())
        assert [step for step in partitions(lowered) if "linear" in step] == [["linear", "dequantize"]]
    assert errors[1] < 0.4 * errors[0]
    assert np.isfinite(errors).all()


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
@pytest.mark.parametrize(
    ("groups", "affine", "residual"),
    [
        *slow_params((3, True, "float"), reason="the same loop to floats"),
        (3, True, "int8"),
        *slow_params((1, False, "float"), reason="one group without factors, in the same loop"),
    ],
)
def test_group_norm_runs_as_a_row_norm_loop(groups, affine, residual, isa):
    norm = nn.GroupNorm(groups, 12, affine=affine)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    model = Body(lambda m, x: m.d(F.silu(m.norm(m.c(x)))), c=nn.Conv2d(3, 12, 3), d=nn.Conv2d(12, 4, 3), norm=norm)
    x = torch.randn(4, 3, 9, 11, generator=DRAW)
    _, lowered = all_stages(model, x, recipe=Recipe.of({}, Setting(residual=residual)))
    program, exact = compile(lowered, isa=isa), model(x)
    assert not lowered.islands
    assert torch.equal(program(x), lowered(x))
    assert torch.equal(program(x[:1]), lowered(x[:1]))
    assert (program(x) - exact).norm() <= 0.06 * exact.norm()


@pytest.mark.parametrize(
    "layers",
    [
        *slow_params(((nn.Linear(16, 0),),), reason="two such layers run in the same way"),
        (nn.Linear(16, 0), nn.Linear(0, 4)),
    ],
    ids=["one", "two"],
)
def test_layers_without_weights_stay_in_float(layers):
    model = nn.Sequential(nn.Linear(16, 16), *layers).eval()
    x = torch.randn(4, 16)
    quantized = intaglio.quantize(model, [x], progress=False)
    assert quantized(x).shape == model(x).shape
    assert all("the weight has no elements" in part.reason for part in quantized.coverage.floats)
    with pytest.raises(intaglio.errors.UnsupportedError, match="the weight has no elements"):
        intaglio.quantize(layers[0], [x], progress=False)
