"""Rotations at run time leave the float function as it was, and rotate int8 caches, with the bits of all kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import intaglio
from intaglio import stages
from intaglio.errors import CalibrationError
from intaglio.fxgraph.nodes import operator
from intaglio.ops.direct.hadamard_blocks import HADAMARD_TARGET
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.recipe import Recipe
from support.generators import batch, calibration, float_model
from support.lowering import assert_equal_quantized, sqnr
from support.nets import Body, randomize
from support.programs import assert_same_bits
from support.slow_params import slow_params

ONLINE = Recipe.of({"*": {"rotate": "online"}, "type:Linear": {"activations": "token"}})
X = torch.randn(8, 6, 32, generator=torch.Generator().manual_seed(0))


def attended(m: Any, x: Tensor, positions: bool = True) -> Tensor:
    """Attention with grouped queries; a sine and a cosine multiply queries and keys if they have positions."""
    q, k, v = (layer(x).unflatten(-1, (-1, 16)).transpose(1, 2) for layer in (m.q, m.k, m.v))
    if positions:
        q, k = (value * m.cosine + value.flip(-1) * m.sine for value in (q, k))
    k, v = (value.repeat_interleave(2, 1) for value in (k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def forward(m: Any, x: Tensor) -> Tensor:
    y = x + m.o(attended(m, x))
    return y + m.down(F.silu(m.gate(y)) * m.up(y))


def block() -> nn.Module:
    """A block of a decoder, in which nothing but the values of attention can be rotated by weights."""
    sizes = {"q": (32, 32), "k": (32, 16), "v": (32, 16), "o": (32, 32), "gate": (32, 96), "up": (32, 96)}
    layers = {name: nn.Linear(*ends) for name, ends in {**sizes, "down": (96, 32)}.items()}
    angles = torch.arange(6)[:, None] * torch.arange(16)
    found = Body(forward, **layers)
    found.register_buffer("cosine", angles.cos())
    found.register_buffer("sine", angles.sin())
    return randomize(found)


def rotated(model: nn.Module, recipe: Recipe = ONLINE, x: Tensor = X) -> stages.Prepared:
    prepared = stages.prepare(stages.capture(model, x), stages.Quantizer(recipe))
    return stages.equalize(prepared, [x[:4], x[4:]])


def products(prepared: stages.Prepared) -> list[torch.fx.Node]:
    return [node for node in prepared.annotations.module.graph.nodes if operator(node) == HADAMARD_TARGET]


def test_the_float_function_stays_as_it_was():
    model = block()
    found = rotated(model)
    assert "rotate: queries and keys of 1 attentions at run time" in found.model_info.texts["corrections"]
    assert sorted(node.args[1] for node in products(found)) == [16, 16, 32, 32, 32]
    torch.testing.assert_close(found(X), model(X).detach(), rtol=0, atol=5e-5)


def test_offline_rotations_insert_no_products():
    assert not products(rotated(block(), Recipe.of({"*": {"rotate": True}})))


def test_heads_of_keys_without_positions_are_rotated_where_rows_are_split_into_them():
    model = block()
    layers = {name: getattr(model, name) for name in ("q", "k", "v", "o")}
    plain = Body(lambda m, x: m.o(attended(m, x, positions=False)), **layers).eval()
    found = rotated(plain)
    assert [node.args[1] for node in products(found)].count(16) == 2
    torch.testing.assert_close(found(X), plain(X).detach(), rtol=0, atol=5e-5)


def test_programs_have_the_bits_of_the_integer_graph():
    found = rotated(block())
    reference = stages.convert(found, stages.calibrate(found, [X]))
    lowered = stages.requantize(reference)
    assert_equal_quantized(reference, lowered, X)
    assert_same_bits((stages.compile(reference)(X),), (lowered(X),))


@pytest.mark.slow(reason="quantizes twice to compare errors")
def test_large_elements_in_a_row_cost_less():
    layers = {"a": nn.Linear(32, 64), "b": nn.Linear(64, 32)}
    model = randomize(Body(lambda m, x: m.b(F.silu(m.a(x))), **layers))
    with torch.no_grad():
        model.a.bias[5] = 200.0
        model.b.weight[:, 5] /= 200
    ratios = []
    for rotate in (False, "online"):
        recipe = Recipe.of({"*": {"rotate": rotate, "activations": "token", "equalize": 0.0}})
        int8 = intaglio.quantize(model, [X], recipe=recipe, progress=False)
        ratios.append(sqnr(int8(X), model(X).detach()))
    assert ratios[1] > ratios[0] + 6
    assert "2 of 3 operators in int8" in str(int8.coverage)


def test_a_file_of_parameters_rotates_again_without_data():
    model = block()
    found = rotated(model)
    ranges = stages.calibrate(found, [X])
    parameters = stages.convert(found, ranges, stages.correct(found, ranges, [X])).parameters
    kept = Parameters.from_json(parameters.to_json())
    assert kept.corrected.equalization.hadamards == found.equalization.hadamards
    per_token = Recipe.of({"type:Linear": {"activations": "token"}})
    plain = stages.prepare(stages.capture(model, X), stages.Quantizer(per_token))
    again = intaglio.quantize(model, X, recipe=per_token.with_parameters(kept), progress=False)
    assert torch.equal(again(X), stages.compile(stages.convert(plain, kept))(X))
    assert sqnr(again(X), model(X).detach()) > 25


@pytest.mark.slow(reason="compares a block operator by operator; rotated decoders are compared in the same way")
def test_comparisons_find_the_error_of_every_operator():
    model = block()
    int8 = intaglio.quantize(model, [X[:4], X[4:]], recipe=ONLINE, progress=False)
    rows = intaglio.compare(model, int8, [X], progress=False).rows
    assert "down (aten.linear.default)" in [row.name for row in rows]
    assert all(row.so_far > 15 for row in rows)


def test_rotations_of_another_model_are_refused():
    found = rotated(block())
    parameters = stages.convert(found, stages.calibrate(found, [X])).parameters
    other = randomize(Body(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Linear(32, 32), b=nn.Linear(32, 8)))
    with pytest.raises(CalibrationError, match="no values that can be rotated"):
        stages.convert(stages.prepare(stages.capture(other, X), stages.Quantizer()), parameters)


@pytest.mark.slow(reason="quantizes a model of a library with all corrections")
@pytest.mark.parametrize(
    "recipe",
    [
        "w4a8_accurate",
        *slow_params("w8a8_dynamic", "w8a8_accurate", reason="the same rotations and cache, with other weights"),
    ],
)
def test_decoders_with_an_int8_cache_give_the_same_bits_step_by_step(recipe):
    model = float_model("llama")
    int8 = intaglio.quantize(model, calibration("llama"), recipe=recipe, progress=False)
    lines = int8.programs["decoder"].text("corrections").splitlines()
    assert "rotate: residual stream, 32 channels, 8 linear layers" in lines
    assert "rotate: values of 1 attentions, 8 channels in each head" in lines
    ids = batch("llama")["input_ids"]
    full, past = int8(ids).logits, int8(ids[:, :4]).past_key_values
    assert torch.equal(int8(ids[:, 4:5], past_key_values=past).logits, full[:, 4:5])
    assert sqnr(full, model(ids).logits.detach()) > (12 if "w4" in recipe else 20)


@pytest.mark.slow(reason="quantizes a model of a library")
def test_keys_that_the_model_keeps_in_float_are_not_rotated():
    online = Recipe.of({"*": {"rotate": "online", "equalize": 0.0, "rounding": "nearest"}})
    int8 = intaglio.quantize(float_model("llama"), calibration("llama"), recipe=online, progress=False)
    assert "queries and keys" not in int8.programs["decoder"].text("corrections")
