"""Rotations leave the float function as it was, spread large channels, and refuse values that are not rotated alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import intaglio
from intaglio import stages
from intaglio.errors import CalibrationError, SelectorError
from intaglio.fxgraph.node_info import info
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.settings import Setting
from intaglio.quant.rotation.rotate import choose_rotations, with_rotations
from support.generators import batch, calibration, float_model
from support.lowering import assert_equal_quantized, sqnr
from support.nets import Body, randomize
from support.programs import assert_same_bits
from support.slow_params import slow_params_except

WORDS, CHANNELS, HEADS, GROUPS, SIZE = 32, 24, 4, 2, 8
ROTATE = Recipe.of({"*": {"rotate": True}})
UNCORRECTED = Recipe.of({"*": {"rotate": True, "equalize": 0.0, "rounding": "nearest"}})


class Norm(nn.Module):
    """An RMS norm as language models write it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """Attention with grouped queries and a gated feed-forward layer, behind norms."""

    def __init__(self, norm: Any, bias: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(CHANNELS), norm(CHANNELS)
        self.q, self.o = (nn.Linear(*ends, bias=bias) for ends in ((CHANNELS, HEADS * SIZE), (HEADS * SIZE, CHANNELS)))
        self.k, self.v = (nn.Linear(CHANNELS, GROUPS * SIZE, bias=bias) for _ in range(2))
        self.gate, self.up = (nn.Linear(CHANNELS, 48, bias=bias) for _ in range(2))
        self.down = nn.Linear(48, CHANNELS, bias=bias)

    def attended(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (value.repeat_interleave(HEADS // GROUPS, 1) for value in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attended(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Two blocks between an embedding and an output layer, which may have the same weight."""

    def __init__(self, norm: Any = Norm, bias: bool = False, tied: bool = False, positions: bool = False) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, CHANNELS), nn.Sequential(Block(norm, bias), Block(norm, bias))
        self.norm, self.head = norm(CHANNELS), nn.Linear(CHANNELS, WORDS, bias=False)
        self.positions = nn.Parameter(torch.zeros(1, 6, CHANNELS)) if positions else None
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) if self.positions is None else self.words(tokens) + self.positions
        return self.head(self.norm(self.blocks(x * 2.0))[:, 1:])


def decoder(**options: Any) -> nn.Module:
    return randomize(Decoder(**options))


TOKENS = torch.randint(0, WORDS, (8, 6), generator=torch.Generator().manual_seed(0))


def prepared(model: nn.Module, recipe: Recipe = ROTATE, x: Tensor = TOKENS) -> stages.Prepared:
    return stages.prepare(stages.capture(model, x), stages.Quantizer(recipe))


def rotated(model: nn.Module, recipe: Recipe = ROTATE, x: Tensor = TOKENS) -> stages.Prepared:
    return stages.equalize(prepared(model, recipe, x), [x[:4], x[4:]])


def report(prepared: stages.Prepared) -> list[str]:
    lines = prepared.model_info.texts.get("corrections", "").splitlines()
    return [line.removeprefix("rotate: ") for line in lines if line.startswith("rotate: ")]


STREAM = "residual stream, 24 channels, 15 linear layers"
VALUES = "values of 2 attentions, 8 channels in each head"


OPTIONS = {
    "rms": {},
    "biases, tied": {"bias": True, "tied": True},
    "torch's rms, tied": {"norm": nn.RMSNorm, "tied": True},
    "layer norm, positions": {"norm": nn.LayerNorm, "bias": True, "positions": True},
    "layer norm, no bias": {"norm": lambda size: nn.LayerNorm(size, bias=False)},
    "no factors": {"norm": lambda size: nn.LayerNorm(size, elementwise_affine=False), "tied": True},
}


@pytest.mark.parametrize(
    "options",
    slow_params_except(
        "layer norm, positions",
        of=OPTIONS,
        reason="norms and biases that this one has as well, or the same norm written in another way",
    ),
)
def test_rotations_leave_the_float_function_as_it_was(options):
    model = decoder(**OPTIONS[options])
    found = rotated(model)
    assert report(found) == [STREAM, VALUES]
    torch.testing.assert_close(found(TOKENS), model(TOKENS).detach(), rtol=0, atol=2e-5)


@pytest.mark.slow(reason="rotates a decoder to look at each weight; the function that they compute is compared above")
def test_every_weight_of_a_stream_changes_and_norms_lose_their_factors():
    plain = prepared(decoder())
    rotations, _ = choose_rotations(plain)
    before, after = plain.annotations.module, with_rotations(plain, rotations).annotations.module
    constants = {info(n).path: getattr(before, n.target) for n in before.graph.nodes if n.op == "get_attr"}
    changed = {info(n).path: getattr(after, n.target) for n in after.graph.nodes if n.op == "get_attr"}
    assert {path for path in changed if path.endswith("weight")} == {p for p in constants if p.endswith("weight")}
    assert not [path for path in changed if path.endswith("weight") and torch.equal(changed[path], constants[path])]
    assert not [node for node in after.graph.nodes if "addcmul" in str(node.target)]


@pytest.mark.slow(reason="quantizes two decoders to compare their errors")
def test_a_rotation_spreads_large_channels():
    model = decoder()
    with torch.no_grad():
        for block in model.blocks:
            for norm, readers in ((block.norm1, (block.q, block.k, block.v)), (block.norm2, (block.gate, block.up))):
                norm.weight[3] *= 100
                for layer in readers:
                    layer.weight[:, 3] /= 100
    ratios = []
    for rotate in (False, True):
        recipe = Recipe.of({"*": {"rotate": rotate, "activations": "token", "equalize": 0.0, "rounding": "nearest"}})
        int8 = intaglio.quantize(model, [TOKENS], recipe=recipe, only="type:Linear", progress=False)
        ratios.append(sqnr(int8(TOKENS), model(TOKENS).detach()))
    assert ratios[1] > ratios[0] + 6


def test_rotated_models_run_in_int8_with_the_bits_of_the_integer_graph():
    found = rotated(decoder())
    reference = stages.convert(found, stages.calibrate(found, [TOKENS]))
    lowered = stages.requantize(reference)
    assert_equal_quantized(reference, lowered, TOKENS)
    assert_same_bits((stages.compile(reference)(TOKENS),), (lowered(TOKENS),))


@pytest.mark.slow(reason="quantizes a decoder twice; parameters with rotations are read below, too")
def test_a_file_of_parameters_rotates_again_without_data():
    model = decoder(tied=True)
    int8 = intaglio.quantize(model, [TOKENS], recipe=UNCORRECTED, progress=False)
    found = rotated(model, UNCORRECTED)
    ranges = stages.calibrate(found, [TOKENS])
    parameters = stages.convert(found, ranges, stages.correct(found, ranges, [TOKENS])).parameters
    kept = Parameters.from_json(parameters.to_json())
    assert list(kept.corrected.equalization.rotations.values()) == [SIZE, SIZE, CHANNELS]
    again = intaglio.quantize(model, TOKENS, recipe=Recipe().with_parameters(kept), progress=False)
    assert again(TOKENS).shape == int8(TOKENS).shape
    assert torch.equal(again(TOKENS), stages.compile(stages.convert(prepared(model, Recipe()), kept))(TOKENS))


def test_rotations_of_another_model_are_refused():
    found = rotated(decoder())
    parameters = stages.convert(found, stages.calibrate(found, [TOKENS])).parameters
    with pytest.raises(CalibrationError, match=r"no values that can be rotated at .*, words#0/embedding.0"):
        stages.convert(prepared(Body(lambda m, x: m.a(m.b(x)), a=nn.Linear(4, 4), b=nn.Embedding(32, 4))), parameters)


@pytest.mark.slow(reason="a smaller model takes the same rotations without data")
def test_models_without_data_are_rotated():
    recipe = Recipe.of({"*": {"rotate": True, "activations": "token", "rounding": "nearest"}})
    layers = Body(lambda m, x: m.c(m.n(x + m.b(F.relu(m.a(m.n(x)))))), n=Norm(8), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    layers.c = nn.Linear(8, 8)
    model = Body(lambda m, x: m.layers(m.first(x)), first=nn.Linear(8, 8), layers=layers).eval()
    int8 = intaglio.quantize(model, example_inputs=(torch.randn(2, 8),), recipe=recipe, progress=False)
    assert int8.text("corrections").startswith("rotate: residual stream, 8 channels, 4 linear layers")


@pytest.mark.parametrize(
    "recipe", [Recipe(), Recipe.of({"type:Linear": {"rotate": False}}, default=Setting(rotate=True))]
)
def test_without_the_setting_nothing_is_rotated(recipe):
    found = rotated(decoder(), recipe)
    assert not found.equalization.rotations
    assert not report(found)


def stream(last: Any, **modules: nn.Module) -> nn.Module:
    """A residual stream of 8 channels with ``last`` behind it."""
    first = {"first": nn.Linear(8, 8), "norm": Norm(8), "a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}
    return randomize(Body(lambda m, x: last(m, (y := m.first(x)) + m.a(m.norm(y))), **first, **modules))


REFUSED = {
    "a function reads it": (
        stream(lambda m, y: m.b(m.norm(y)) * torch.sigmoid(y)),
        "(aten.sigmoid.default) reads them",
    ),
    "the model returns it": (stream(lambda m, y: (m.b(m.norm(y)), y)), "the model returns them"),
    "a norm is not read by a layer": (stream(lambda m, y: m.b(F.relu(m.norm(y)))), "(aten.relu.default) reads them"),
    "a norm is read by a sum": (
        stream(lambda m, y: m.b(y + m.norm(y))),
        "(aten.add.Tensor) reads them with a factor for each",
    ),
    "a norm writes it": (
        stream(lambda m, y: m.b(m.norm(y + m.norm(m.b(y))))),
        "(aten.add.Tensor) reads them with a factor for each",
    ),
    "it is an input": (
        Body(lambda m, x: m.b(m.norm(x + m.a(x))), norm=Norm(8), a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval(),
        "the model takes them as input",
    ),
    "a convolution computes it": (
        Body(
            lambda m, x: m.b(m.norm((y := m.conv(x[..., None])[..., 0]) + m.a(m.norm(y)))),
            **{"conv": nn.Conv2d(8, 8, 1), "norm": Norm(8), "a": nn.Linear(8, 8), "b": nn.Linear(8, 8)},
        ).eval(),
        "computes them",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_something_else_reads_or_computes_are_left_with_a_reason(name):
    model, reason = REFUSED[name]
    x = torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(0))
    found = rotated(model, x=x)
    assert not found.equalization.rotations
    (line,) = report(found)
    assert line.startswith("residual stream left unchanged, because ")
    assert reason in line


def test_all_layers_of_a_stream_must_ask_for_it():
    found = rotated(decoder(), Recipe.of({"*": {"rotate": True}, "blocks.1.down": {"rotate": False}}))
    reason = "blocks.1.down does not have rotate = true, and all of their layers must have it"
    assert report(found) == [f"residual stream left unchanged, because {reason}", VALUES]


@pytest.mark.slow(reason="quantizes a model of a library")
def test_models_with_a_cache_are_rotated_except_for_the_values_they_keep():
    model = float_model("llama")
    int8 = intaglio.quantize(model, calibration("llama"), recipe=UNCORRECTED, progress=False)
    first, second = int8.programs["decoder"].text("corrections").splitlines()[:2]
    assert first == "rotate: residual stream, 32 channels, 8 linear layers"
    assert second == "rotate: values of 1 attentions left unchanged, because the model returns them"
    ids = batch("llama")["input_ids"]
    full, past = int8(ids).logits, int8(ids[:, :4]).past_key_values
    assert torch.equal(int8(ids[:, 4:5], past_key_values=past).logits, full[:, 4:5])
    assert sqnr(full, model(ids).logits.detach()) > 20


def test_a_model_without_streams_says_so():
    found = rotated(randomize(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))), x=torch.randn(8, 8))
    assert report(found) == ["nothing, because the model has no attention and no residual stream that norms read"]


def test_other_settings_are_refused():
    with pytest.raises(SelectorError, match=r"rotate = 'yes'; allowed are .*True, False, 'online'"):
        Recipe.of({"*": {"rotate": "yes"}})
