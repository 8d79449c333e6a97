"""`while_loop`, which runs as long as the data says: its body is quantized as top level is, a program of its own."""

import copy
import pickle
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.scan import scan

import intaglio
from intaglio import stages
from intaglio.errors import CalibrationError, CaptureError, UnsupportedError
from intaglio.lower import Lowered
from intaglio.ops import OPS
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.qdq.convert import Reference, convert
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.settings import Setting
from intaglio.tracing import Captured, capture
from support.int8_models import assert_same
from support.lowering import ROUNDED, largest_differences
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.slow_params import slow_params_except

STEPS = (0, 1, 5)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def start() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def steps(m, x, n):
    """As often as a tensor says, with layers around the loop."""
    i, y = while_loop(lambda i, y: i < n, lambda i, y: (i + 1, torch.tanh(m.b(y) + y)), (start(), m.a(x)))
    return m.c(y), i


def until(m, x, n):
    """As long as what is carried says."""
    return while_loop(lambda i, y: (y.abs().sum() > 1) & (i < n), lambda i, y: (i + 1, m.b(y) * 0.5), (start(), m.a(x)))


def same_weight(m, x, n):
    """A layer inside the loop and in front of it; a value that stays; one that is carried and never read."""
    z = torch.relu(m.b(x))

    def step(i, y, u):
        return (i + 1, torch.relu(m.b(y) + z), u.clone())

    return while_loop(lambda i, y, u: i < n, step, (start(), x, x.clone()))[1]


def images(m, x, n):
    """A convolution with its batch norm, and a layer norm."""

    def step(i, y):
        return (i + 1, torch.relu(m.norm(m.bn(m.conv(y)))))

    return while_loop(lambda i, y: i < n, step, (start(), torch.sigmoid(x)))


def of_scan(m, x, n):
    def step(i, y):
        return i + 1, scan(lambda carry, row: (torch.relu(m.a(carry) + row), m.b(carry)), y[0], y)[1]

    return while_loop(lambda i, y: i < n, step, (start(), x))


def linears() -> dict[str, nn.Module]:
    return {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 3)}


def layers() -> dict[str, nn.Module]:
    return {"conv": nn.Conv2d(3, 3, 3, padding=1), "bn": nn.BatchNorm2d(3), "norm": nn.LayerNorm(8)}


MODELS = {
    "a count": (steps, linears, (4, 8)),
    "what is carried": (until, linears, (4, 8)),
    "a weight that is outside too": (same_weight, linears, (4, 8)),
    "convolution and norms": (images, layers, (2, 3, 8, 8)),
    "a scan in its body": (of_scan, linears, (3, 2, 8)),
}


def model_of(name: str) -> tuple[nn.Module, Tensor]:
    function, modules, shape = MODELS[name]
    return randomize(Body(function, **modules())), torch.randn(shape, generator=torch.Generator().manual_seed(0))


@cache
def captured_of(name: str) -> tuple[nn.Module, Tensor, Captured]:
    model, x = model_of(name)
    return model, x, capture(model, (x, torch.tensor(3)))


def prepared_of(name: str, recipe: Recipe | None = None):
    model, x, captured = captured_of(name)
    return model, x, prepare(captured, Quantizer(recipe or Recipe()))


def lowered_of(name: str) -> tuple[nn.Module, Tensor, Reference, Lowered]:
    model, x, prepared = prepared_of(name)
    reference = convert(prepared, calibrate(prepared, [(x, torch.tensor(3))]))
    return model, x, reference, stages.requantize(reference)


@pytest.mark.case("frontends C8")
@pytest.mark.parametrize(
    "name",
    slow_params_except(
        "convolution and norms",
        of=MODELS,
        reason="loops around linear layers are tested below, scans and conditions in tests of their own",
    ),
)
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_a_loop_body_runs_in_int8_a_data_dependent_number_of_times(name, isa, tmp_path):
    """C8: any count, none among them; the same bits on every instruction set, and from a file."""
    model, x, reference, lowered = lowered_of(name)
    assert lowered.bodies["while_loop"].macs[0] == lowered.bodies["while_loop"].macs[1] > 0
    calls = [(x, torch.tensor(n)) for n in STEPS]
    expected = [lowered(*call) for call in calls]
    for call, found in zip(calls, expected, strict=True):
        for value, other in zip(pairs(found), pairs(reference(*call)), strict=True):
            torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-4)
    for value, exact in zip(pairs(lowered(x, torch.tensor(3))), pairs(model(x, torch.tensor(3))), strict=True):
        assert (value - exact).abs().max() <= 0.1 * exact.abs().max()
    compiled = stages.compile(lowered, isa=isa)
    assert compiled.coverage.macs == 1.0
    assert compiled.text("integer") == lowered.text()
    for call, found in zip(calls, expected, strict=True):
        assert_same(compiled(*call), found)
    compiled.save(tmp_path / "m")
    for one in (
        intaglio.load(tmp_path / "m"),
        intaglio.load(tmp_path / "m", trust=True),
        pickle.loads(pickle.dumps(compiled)),
        copy.deepcopy(compiled),
    ):
        assert one.coverage == compiled.coverage
        for call, found in zip(calls, expected, strict=True):
            assert_same(one(*call), found)


def pairs(result) -> list[Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


@pytest.mark.slow(reason="compares a body operator by operator; its integers run above")
@pytest.mark.case("frontends C8")
def test_loop_bodies_of_a_reference_follow_the_contract():
    _, x, reference, lowered = lowered_of("a count")
    body, inner = reference.bodies["while_loop"], lowered.bodies["while_loop"]
    differences = largest_differences(body, inner, start(), x, torch.tensor(3))
    kinds = {name: op.kind for op in inner.graph.ops for name in op.outputs}
    assert differences.worst
    assert not {name: worst for name, worst in differences.worst.items() if worst > OPS[kinds[name]].tolerance}


@pytest.mark.case("frontends C8")
def test_statistics_are_those_of_all_iterations():
    model, x, prepared = prepared_of("a count", Recipe(default=Setting(method="minmax", results="int8")))
    ranges = calibrate(prepared, [(x, torch.tensor(n)) for n in (2, 3)])
    y, seen = model.a(x), []
    for _ in range(3):
        y = torch.tanh(model.b(y) + y)
        seen.append(y)
    found = ranges.statistics["#while_loop/tanh.0"]
    assert found.count == 5 * y.numel()
    assert (found.low, found.high) == (torch.stack(seen).min().item(), torch.stack(seen).max().item())


@pytest.mark.slow(reason="a loop is calibrated and converted twice")
@pytest.mark.case("frontends C8")
def test_ranges_and_parameters_of_bodies_are_kept_and_read_again():
    _, x, prepared = prepared_of("a weight that is outside too")
    call = (x, torch.tensor(3))
    ranges = calibrate(prepared, [call])
    reference = convert(prepared, ranges)
    assert {"b.weight", "b.weight@while_loop"} <= reference.parameters.entries.keys()
    for given in (Ranges.from_json(ranges.to_json()), reference.parameters):
        assert_same(convert(prepared, given)(*call), reference(*call))
    copied = copy.deepcopy(prepared)
    copied(*call)
    counts = [{n: one.observers[n].statistics.count for n in ranges.statistics} for one in (prepared, copied)]
    assert all(counts[1][name] == 2 * count for name, count in counts[0].items())


@pytest.mark.case("frontends C8")
def test_a_loop_body_without_calibration_data_is_refused_by_its_sites():
    _, x, prepared = prepared_of("a count", ROUNDED)
    with pytest.raises(CalibrationError, match=r"#while_loop/.*seen no data"):
        convert(prepared, calibrate(prepared, [(x, torch.tensor(0))]))


@pytest.mark.case("frontends C8")
@pytest.mark.parametrize(("skip", "inside", "outside"), [("a", True, False), ("b", False, True)])
def test_selectors_reach_into_bodies_and_past_them(skip, inside, outside):
    _, _, prepared = prepared_of("a count", Recipe().with_selection(skip=skip))
    body = prepared.bodies["while_loop"]
    assert any(site.name == "b.weight@while_loop" for site in body.annotations.sites) is inside
    assert any(site.name == "a.weight" for site in prepared.annotations.sites) is outside


@pytest.mark.slow(reason="compiles another loop; the loop above runs any number of times")
@pytest.mark.case("frontends C8")
def test_results_of_zero_iterations_do_not_alias_inputs():
    _, x, _, lowered = lowered_of("a weight that is outside too")
    compiled = stages.compile(lowered)
    found = compiled(x, torch.tensor(0))
    assert torch.equal(found, x)
    assert found.data_ptr() != x.data_ptr()


@pytest.mark.slow(reason="torch compiles two loops")
@pytest.mark.case("frontends C8")
def test_loops_in_loops_are_refused():
    def inner(m, i, y):
        return i + 1, while_loop(lambda y: y.sum() > 1, lambda y: (m.b(y),), (y,))[0]

    model = randomize(
        Body(lambda m, x, n: while_loop(lambda i, y: i < n, lambda i, y: inner(m, i, y), (start(), x)), **linears())
    )
    with pytest.raises(CaptureError, match="its condition or body contains a loop or a branch"):
        capture(model, (torch.randn(4, 8), torch.tensor(0)))


@pytest.mark.slow(reason="captures another loop for two refusals")
@pytest.mark.case("frontends C8")
def test_backends_without_while_loops_refuse_them(tmp_path):
    model, x, reference, lowered = lowered_of("a count")
    with pytest.raises(UnsupportedError, match=r"loop\.while_loop.*Inductor"):
        stages.compile(reference, backend="inductor")
    with pytest.raises(UnsupportedError, match=r"loop\.while_loop.*such a loop cannot be trained"):
        stages.prepare(capture(model, (x, torch.tensor(3)), train=True), qat=True)
    with pytest.raises(UnsupportedError, match="float parts run in PyTorch"):
        stages.compile(lowered).export_c(tmp_path)
