"""Reports say why an operator stays in float, list operators on complex numbers, and count casts as no operators."""

import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio import eager, stages
from intaglio.errors import CaptureError, UnsupportedError
from support.nets import Body, randomize
from support.slow_params import slow_params

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def layers(body, width: int = 16) -> nn.Module:
    return randomize(Body(body, a=nn.Linear(16, 16), b=nn.Linear(width, 4)))


def coverage(model: nn.Module, x: Tensor = X):
    return intaglio.quantize(model, [x], progress=False).coverage


def reasons(model: nn.Module) -> dict[str, str]:
    found = coverage(model)
    return {part.operator: part.reason for part in (*found.floats, *found.loops)}


def test_the_reason_names_what_an_operator_reads():
    assert reasons(layers(lambda m, x: m.b(m.a(x).relu() + x)))["aten.add.Tensor"] == (
        "it reads a float input or buffer of the model"
    )
    found = reasons(layers(lambda m, x: m.b(m.a(x).erf() * 2)))
    assert found == {
        "aten.erf.default": "no int8 kernel for this operator",
        "aten.mul.Tensor": "it reads the result of a float operator",
    }


@pytest.mark.slow(reason="quantizes for the reason of a recipe")
def test_an_operator_that_only_follows_products_has_the_recipe_as_reason():
    recipe = intaglio.Recipe(default=intaglio.Setting(residual="float"))
    model = intaglio.quantize(layers(lambda m, x: m.b(m.a(x.tanh()))), [X], recipe=recipe, progress=False)
    (part,) = model.coverage.loops
    assert part.reason == "the recipe leaves operators between matrix products in float"


def test_operators_on_complex_numbers_are_listed():
    found = coverage(layers(lambda m, x: m.b(torch.fft.rfft(m.a(x)).abs()), width=9))
    assert [part.operator for part in found.floats] == ["aten.fft_rfft.default", "aten.abs.default"]
    assert found.operators_total == 4


@pytest.mark.slow(reason="quantizes a layer of complex numbers; operators on them are listed above")
def test_a_layer_of_complex_numbers_counts_as_float():
    weight = torch.randn(16, 16, dtype=torch.complex64)
    found = coverage(layers(lambda m, x: m.b(nn.functional.linear(x.to(weight.dtype), weight).real)))
    layer = next(part for part in found.floats if part.operator == "aten.linear.default")
    assert layer.reason == "its result is complex, or has another type that no kernel computes with"
    assert layer.macs == 256
    assert (found.macs_int8, found.macs_total) == (64, 320)


def in_eager(model: nn.Module, x: Tensor) -> nn.Module:
    prepared = eager.prepare(model, x)
    prepared(x)
    return eager.convert(prepared)


@pytest.mark.parametrize("door", [stages.capture, *slow_params(in_eager, reason="the same error at the other door")])
def test_complex_inputs_are_an_error_that_says_what_to_pass(door):
    model, x = layers(lambda m, x: m.b(m.a(torch.view_as_real(x).flatten(1)))), torch.randn(4, 8, dtype=torch.complex64)
    with pytest.raises((CaptureError, UnsupportedError), match=r"complex64; int8 models take real") as raised:
        door(model, x)
    assert raised.value.remedy == "pass torch.view_as_real(tensor), and call torch.view_as_complex in forward"
    follows = layers(lambda m, x: m.b(m.a(torch.view_as_real(torch.view_as_complex(x)).flatten(1))))
    assert coverage(follows, torch.view_as_real(x)).macs_int8 == 320


@pytest.mark.slow(reason="quantizes a model of half precision for one number")
@pytest.mark.parametrize("dtype", [torch.float16, *slow_params(torch.bfloat16, reason="the other half precision")])
def test_casts_of_half_precision_do_not_count_as_operators(dtype):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval().to(dtype)
    found = coverage(model, X.to(dtype))
    assert found.operators_int8 == found.operators_total == 3
    casts = {(part.operator, part.reason) for part in found.floats}
    reason = "the program computes in float32, and PyTorch casts values of another type"
    assert casts == ({("aten._to_copy.default", reason)} if dtype is torch.float16 else set())
    assert found.islands == len(found.floats)
