"""Loops of a fixed count with a body of their own, `scan` and `map`: their bodies are quantized as top level is."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import map as torch_map
from torch._higher_order_ops.scan import scan

import intaglio
from intaglio import stages
from intaglio.errors import CaptureError
from intaglio.lower import Lowered
from intaglio.quant.annotate.sites import Observed
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.qdq.convert import Reference, convert
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.settings import Setting
from intaglio.tracing import Captured, capture
from intaglio.tracing.loops import unroll_scans as scans
from support.int8_models import assert_same
from support.lowering import assert_equal_quantized, tensors
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.slow_params import slow_params_except


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def drawn(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=draw) for shape in shapes)


def cell(m, x, h):
    def step(carry, y):
        carry = torch.tanh(m.a(carry) + m.b(y))
        return carry, carry.clone()

    return scan(step, h, x)


def blocks(m, x, h):
    """A linear layer, a convolution with a batch norm, a layer norm."""

    def step(carry, y):
        carry = torch.relu(m.bn(m.conv(m.a(carry) + y)))
        return carry, m.norm(carry)

    return scan(step, h, x)


def two(m, x, h):
    first, rows = scan(lambda c, y: (torch.relu(m.a(c) + y), m.a(y)), h, x)
    return scan(lambda c, y: (torch.sigmoid(m.a(c) + y), c.clone()), first, rows)


def nested(m, x, h):
    def inner(carry, y):
        carry = torch.relu(m.a(carry) + y)
        return carry, carry.clone()

    def step(carry, y):
        carry, rows = scan(inner, carry, y)
        return m.b(carry), rows

    return scan(step, h, x)


def unread(m, x, h):
    """The last carry is read by nobody."""
    return scan(lambda c, y: (torch.relu(m.a(c) + y), m.b(c)), h, x)[1]


def backwards(m, x, h):
    return scan(lambda c, y: (torch.relu(m.a(c) + y), m.b(c)), h, x, reverse=True, dim=1)


def mapped(m, x, h):
    return torch_map(lambda y, h: torch.relu(m.a(y)) + h, x, h), m.b(h)


def one(m, x, h):
    return scan(lambda c, y: (torch.relu(m.a(c) + y), m.b(c)), h, x[:1])


def linears() -> dict[str, nn.Module]:
    return {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}


def layers() -> dict[str, nn.Module]:
    return {
        "a": nn.Linear(8, 8),
        "conv": nn.Conv2d(3, 3, 3, padding=1),
        "bn": nn.BatchNorm2d(3),
        "norm": nn.LayerNorm(8),
    }


X, H = (2, 3, 8), (3, 8)
MODELS = {
    "cell": (cell, linears, (X, H)),
    "linear, convolution, norms": (blocks, layers, ((2, 2, 3, 8, 8), (2, 3, 8, 8))),
    "two that share a weight": (two, linears, (X, H)),
    "nested": (nested, linears, ((2, *X), H)),
    "the last carry is not read": (unread, linears, (X, H)),
    "backwards": (backwards, linears, ((3, 2, 8), H)),
    "one iteration": (one, linears, (X, H)),
    "map": (mapped, linears, (X, H)),
}


def model_of(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    function, modules, shapes = MODELS[name]
    return randomize(Body(function, **modules())), drawn(*shapes)


@cache
def captured_of(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Captured]:
    model, given = model_of(name)
    return model, given, capture(model, given)


def lowered_of(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Reference, Lowered]:
    model, given, captured = captured_of(name)
    prepared = prepare(captured)
    reference = convert(prepared, calibrate(prepared, [given]))
    return model, given, reference, stages.requantize(reference)


@pytest.mark.case("frontends C8")
@pytest.mark.parametrize(
    "name",
    slow_params_except(
        "cell",
        of=MODELS,
        reason="loops over the same operators; a shared weight is tested below, norms and convolutions in while loops",
    ),
)
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_loop_bodies_are_quantized_like_top_level_models(name, isa, tmp_path):
    """C8: the reference within the contract, the same bits on every instruction set, and from a file."""
    model, given, reference, lowered = lowered_of(name)
    assert_equal_quantized(reference, lowered, *given)
    assert lowered.macs[0] == lowered.macs[1] > 0
    assert not lowered.islands
    expected = lowered(*given)
    for value, exact in zip(tensors(expected), tensors(model(*given)), strict=True):
        assert (value - exact).abs().max() < 0.1 * exact.abs().max()
    compiled = stages.compile(lowered, isa=isa)
    assert_same(compiled(*given), expected)
    compiled.save(tmp_path / "m")
    assert_same(intaglio.load(tmp_path / "m")(*given), expected)


@pytest.mark.case("frontends C8")
def test_one_site_has_the_values_of_all_iterations():
    model, (x, h), captured = captured_of("cell")
    prepared = prepare(captured, Quantizer(Recipe(default=Setting(method="minmax", results="int8"))))
    ranges = calibrate(prepared, [(x, h)])
    owners = [site for site in prepared.annotations.sites if isinstance(site.spec, Observed)]
    assert [site.name for site in owners if site.role == "activation"] == [
        "#0/input.args_0",
        "#0/input.args_1",
        "a#scan[0]/linear.0",
        "#scan[0]/add.0",
        "#scan[0]/tanh.0",
    ]
    rows = model(x, h)[1]
    found = ranges.statistics["#scan[0]/tanh.0"]
    assert found.count == rows.numel()
    assert (found.low, found.high) == (rows.min().item(), rows.max().item())
    qparams = convert(prepared, ranges).qparams
    assert len({qparams[f"#scan[{i}]/tanh.0"] for i in range(2)}) == 1
    assert qparams["#0/input.args_1"] != qparams["#scan[0]/tanh.0"]


@pytest.mark.slow(reason="captures a second scan; that values of all iterations share a site is tested below")
@pytest.mark.case("frontends C8")
def test_weights_are_not_copied():
    lowered = lowered_of("two that share a weight")[3]
    weights = {name for op in lowered.graph.ops if op.kind == "linear" for name in op.inputs[1:2]}
    assert len(weights) == 1
    assert sum(op.kind == "linear" for op in lowered.graph.ops) == 6


@pytest.mark.case("frontends C8")
def test_selectors_reach_the_modules_of_a_body():
    prepared = prepare(captured_of("cell")[2], Quantizer(Recipe().with_selection(skip="b")))
    assert {skip.origin.path.partition("@")[0] for skip in prepared.annotations.skipped} >= {"b"}
    assert not any(site.value.startswith("b") for site in prepared.annotations.sites)


@pytest.mark.slow(reason="torch compiles the scan once more")
@pytest.mark.case("frontends C8")
def test_the_batch_may_be_dynamic_beside_the_time_steps():
    model, (x, h), _ = captured_of("cell")  # what torch compiles of it, for one batch, is not used again
    free = torch.export.Dim.DYNAMIC
    captured = capture(model, (x, h), dynamic_shapes={"args": ({1: free}, {0: free})})
    prepared = prepare(captured)
    compiled = stages.compile(stages.requantize(convert(prepared, calibrate(prepared, [(x, h)]))))
    assert_same([r[..., :1, :] for r in compiled(x, h)], compiled(x[:, :1], h[:1]))


@pytest.mark.slow(reason="captures nested scans for one refusal")
@pytest.mark.case("frontends C8")
def test_too_many_operators_are_refused_with_the_limit(monkeypatch):
    model, given = model_of("nested")
    monkeypatch.setattr(scans, "MAX_UNROLLED_OPERATORS", 20)
    with pytest.raises(CaptureError, match=r"scan.*22 operators; the limit is 20") as raised:
        capture(model, given)
    assert raised.value.operator == "torch.ops.higher_order.scan"
    assert "quantize the modules in the body" in raised.value.remedy


@pytest.mark.case("frontends C8")
def test_a_scan_over_no_elements_is_refused_as_in_torch():
    model, (x, h) = model_of("cell")
    with pytest.raises(CaptureError, match="scan dimension > 0"):
        capture(model, (x[:0], h))


@pytest.mark.slow(reason="captures the scan for training")
@pytest.mark.case("frontends C8")
def test_training_sees_one_fake_quantize_for_all_iterations():
    model, (x, h) = model_of("cell")
    trained = stages.prepare(capture(model, (x, h), train=True), qat=True)
    stages.calibrate(trained, [(x, h)])
    with torch.enable_grad():
        trained.train()(x, h)[1].square().sum().backward()
    assert all(p.grad is not None for name, p in trained.named_parameters() if name.endswith("weight"))
    lowered = stages.requantize(stages.convert(trained.eval()))
    assert_same(stages.compile(lowered)(x, h), lowered(x, h))
