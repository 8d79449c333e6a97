"""Functions of one value: a table between two sites, equal to the quantized value of its definition."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import intaglio
from intaglio import numerics, stages
from intaglio.ir import QParams
from intaglio.ops import OPS
from intaglio.ops.unary import UNARY_OPS
from support.activation_calls import CALLS
from support.lowering import assert_equal_quantized, quantized
from support.nets import Body, randomize
from support.side_by_side import SideBySide
from support.slow_params import slow_params, slow_params_except

MORE = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "silu": lambda x: F.silu(x, inplace=True),
    "softplus": F.softplus,
    "constants of one element": lambda x: (torch.tensor([2.5]) - x * torch.tensor(0.5)) / torch.tensor([[3.0]]) + 1,
    "clamp_min": lambda x: x.clamp_min(-0.5),
    "clamp_max": lambda x: torch.clamp_max(x, 0.5),
}
FEW = ("elu", "gelu", "leaky_relu", "mul_number", "rsub_number", "softplus")


def net(function) -> Body:
    def body(m, x):
        return m.last(function(m.first(x)))

    return randomize(Body(body, first=nn.Conv2d(3, 9, 3), last=nn.Conv2d(9, 4, 1)))


def test_every_lookup_function_has_a_test_call():
    assert set(CALLS) == {record.name for record in UNARY_OPS}


@pytest.mark.parametrize("name", [record.name for record in UNARY_OPS])
def test_lookup_tables_match_torch(name):
    """Within one step where torch's float32 rounds the other way; equal almost everywhere."""
    x_q, y_q = QParams((0.031,), (117,), 0, 255), QParams((0.02,), (60,), 0, 255)
    real = torch.from_numpy(numerics.dequantize(np.arange(256), x_q.step, x_q.zero))
    wanted = numerics.quantize(CALLS[name](real).numpy(), y_q.step, y_q.zero, 0, 255)
    attrs = {"alpha": 1}
    attrs |= {
        "elu": {"alpha": 0.7},
        "leaky_relu": {"negative_slope": 0.2},
        "pow_number": {"exponent": 3},
        "celu": {"alpha": 0.6},
        "softplus": {"beta": 2, "threshold": 3},
        "threshold": {"threshold": 0.3, "value": -0.5},
        "softshrink": {"lambd": 0.4},
        "hardshrink": {"lambd": 0.4},
    }.get(name, {})
    numbers = {"add_number": 0.75, "sub_number": 0.3, "rsub_number": 2, "mul_number": 3, "div_number": 0.4}
    attrs["other"] = numbers.get(name, 0)
    table = numerics.function_lut(lambda v: OPS[name].function(v, attrs), x_q, y_q)
    assert np.abs(table.astype(int) - wanted).max() <= 1
    assert (table != wanted).mean() < 0.02


@pytest.mark.parametrize(
    ("name", "attrs", "call"),
    [
        ("celu", {"alpha": -0.6}, lambda x: F.celu(x, -0.6)),
        ("celu", {"alpha": -0.001}, lambda x: F.celu(x, -0.001)),
        ("elu", {"alpha": 0.7, "input_scale": -0.5}, lambda x: torch.ops.aten.elu(x, 0.7, 1, -0.5)),
    ],
)
def test_exponential_units_with_negative_factors_grow_below_zero(name, attrs, call):
    x_q, y_q = QParams((0.031,), (117,), 0, 255), QParams((0.05,), (128,), 0, 255)
    real = torch.from_numpy(numerics.dequantize(np.arange(256), x_q.step, x_q.zero))
    wanted = numerics.quantize(call(real).numpy(), y_q.step, y_q.zero, 0, 255)
    table = numerics.function_lut(lambda v: OPS[name].function(v, attrs), x_q, y_q)
    assert np.abs(table.astype(int) - wanted).max() <= 1


@pytest.mark.slow(reason="a program with several functions; other spellings run below")
@pytest.mark.case("backend 18", "backend 25")
@pytest.mark.parametrize(
    "names",
    [
        FEW,
        *slow_params((tuple(CALLS),), reason="one kernel looks up every function; each has its table compared above"),
    ],
    ids=["few", "all"],
)
def test_functions_between_convolutions_run_in_int8(names, subtests):
    """No island, the interpreter within one step of the reference, the kernel equal to the interpreter."""
    model = SideBySide(
        {name: (net(call), [torch.randn(8, 3, 7, 6)]) for name, call in CALLS.items() if name in names}
    ).eval()
    reference, lowered = quantized(model, *model.inputs)
    assert not lowered.islands
    x = [torch.randn(3, 3, 7, 6) for _ in model.inputs]
    assert_equal_quantized(reference, lowered, *x)
    found, expected = stages.compile(lowered)(*x), lowered(*x)
    for name in names:
        with subtests.test(name=name):
            assert torch.equal(found[name], expected[name])


@pytest.mark.parametrize(
    "name",
    slow_params_except(
        "constants of one element", "clamp_min", "gelu", of=MORE, reason="other functions written otherwise"
    ),
)
def test_other_spellings_of_lookup_functions_run_in_int8(name):
    model = net(MORE[name])
    int8 = intaglio.quantize(model, [torch.randn(8, 3, 7, 6)], progress=False)
    assert int8.coverage.islands == 0
    x = torch.randn(4, 3, 7, 6)
    error, signal = (int8(x) - model(x)).square().sum(), model(x).square().sum()
    assert 10 * torch.log10(signal / error) > 25


@pytest.mark.case("backend 18")
@pytest.mark.parametrize("function", [lambda x: x + 0, lambda x: 1 * x, lambda x: x + 0.0])
def test_functions_with_neutral_constants_are_removed(function):
    """Backend case 18."""
    lowered = stages.requantize(_reference(net(function)))
    assert [op.kind for op in lowered.graph.ops].count("table") == 0
    assert not lowered.islands


def test_a_division_by_zero_and_a_root_stay_in_float():
    for function in (lambda x: x / 0, lambda x: x.abs() ** 0.5):
        prepared = stages.prepare(stages.capture(net(function), torch.randn(2, 3, 7, 6)))
        assert any("zero" in skip.reason or "exponent" in skip.reason for skip in prepared.annotations.skipped)


def _reference(model: nn.Module):
    prepared = stages.prepare(stages.capture(model, torch.randn(2, 3, 7, 6)))
    return stages.convert(prepared, stages.calibrate(prepared, [torch.randn(8, 3, 7, 6)]))
