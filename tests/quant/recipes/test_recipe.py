"""Selectors, precedence, TOML."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import intaglio
from intaglio.errors import SelectorError, UnsupportedError
from intaglio.ir import Origin
from intaglio.quant.calibrate.prepare import annotate, prepare
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.settings import DEFAULT, Setting
from intaglio.tracing import capture
from support import nets
from support.lowering import captured_net, lowered

CLASSES = {
    "": "Net",
    "layer1": "Block",
    "layer1.conv": "Conv2d",
    "layer1.conv_1": "Conv2d",
    "layer10": "Block",
    "layer10.conv": "Conv2d",
    "fc": "Linear",
}
CONV = Origin("layer1.conv@1", "aten.conv2d.default")
OFF, ON = Setting(quantize=False), Setting(quantize=True)


@pytest.mark.parametrize(
    ("entries", "on"),
    [
        ({}, True),
        ({"layer1": None}, False),
        ({"layer1.conv": None}, False),
        ({"layer1.*": None}, False),
        ({"layer10": None}, True),
        ({"layer1.conv_1": None}, True),
        ({"conv": None}, True),
        ({"*": None}, False),
        ({"re:layer\\d": None}, False),
        ({"re:layer": None}, True),
        ({"type:Conv2d": None}, False),
        ({"type:Block": None}, False),
        ({"type:Linear": None}, True),
        ({"op:aten.conv2d": None}, False),
        ({"op:aten.conv2d.default": None}, False),
        ({"op:aten.*": None}, False),
        ({"op:aten.conv": None}, True),
    ],
)
def test_a_selector_covers_what_is_inside(entries, on):
    assert Recipe.of(entries).setting(CONV, CLASSES).quantize is on


@pytest.mark.case("frontends A17")
@pytest.mark.parametrize(
    ("entries", "default", "on"),
    [
        ({"op:aten.conv2d": ON}, OFF, True),
        ({"type:Conv2d": OFF, "layer1.conv": ON}, ON, True),
        ({"layer1.conv": OFF, "type:Conv2d": ON}, ON, False),
        ({"op:aten.conv2d": OFF, "type:Conv2d": ON}, ON, True),
        ({"layer1": OFF, "layer1.conv": ON}, ON, True),
        ({"layer1.conv": ON, "layer1": OFF}, ON, True),
        ({"layer1.conv": OFF, "layer1.c*": ON}, ON, True),
        ({"layer1.c*": ON, "layer1.conv": OFF}, ON, False),
    ],
)
def test_names_beat_types_beat_operators_and_the_nearest_name_wins(entries, default, on):
    assert Recipe.of(entries, default).setting(CONV, CLASSES).quantize is on


def test_a_setting_inherits_missing_fields_from_weaker_ones():
    recipe = Recipe.of({"type:Conv2d": {"bits": 7, "method": "minmax"}, "layer1": {"method": "mse"}})
    assert recipe.setting(CONV, CLASSES) == replace(DEFAULT, bits=7)


def test_only_and_skip_select_quantized_operators():
    recipe = Recipe().with_selection(only="layer1", skip=["layer1.conv_1"])
    assert recipe.setting(CONV, CLASSES).quantize
    assert not recipe.setting(Origin("layer1.conv_1", "aten.conv2d.default"), CLASSES).quantize
    assert not recipe.setting(Origin("fc", "aten.linear.default"), CLASSES).quantize


MODEL, CAPTURED = captured_net(nets.Residual)


@pytest.mark.case("problem 35")
@pytest.mark.parametrize(
    ("selector", "nearest"),
    [
        ("blocks.0.conv3", "blocks.0.conv1"),
        ("type:Liner", "type:Linear"),
        ("op:aten.linera", "op:aten.linear"),
        ("re:nothing.*", "nearest: "),
    ],
)
def test_a_selector_that_matches_nothing_names_the_nearest(selector, nearest):
    with pytest.raises(SelectorError, match="matches no operator") as error:
        annotate(CAPTURED, Quantizer(Recipe().with_selection(skip=selector)))
    assert nearest in error.value.remedy


def test_an_invalid_regular_expression_is_reported():
    with pytest.raises(SelectorError, match="not a regular expression"):
        Recipe.of({"re:(": None}).setting(CONV, CLASSES)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[default]\nquantise = false", r"unknown key 'quantise'(.|\n)*did you mean 'quantize'"),
        ("['fc']\nbits = 4", r"bits = 4; allowed are \(7, 8\)"),
        ("[fc\n", "not valid TOML"),
        ("['fc']\nmethod = 'kll'", "unknown method 'kll'.*did you mean 'kl'"),
    ],
)
def test_a_toml_recipe_that_cannot_be_read_says_where(text, problem):
    with pytest.raises(SelectorError, match=problem):
        Recipe.from_toml(text)


SETTINGS = st.builds(
    Setting,
    quantize=st.sampled_from([None, True, False]),
    method=st.sampled_from([None, "mse", "minmax"]),
    weights=st.sampled_from([None, "channel", "tensor"]),
    bits=st.sampled_from([None, 7, 8]),
    functions=st.sampled_from([None, "table", "precise"]),
)
SELECTORS = st.sampled_from(["fc", "layer1.*", 're:layer\\d+\\."x"', "type:Conv2d", "op:aten.add", "ä[0-9]'"])


@pytest.mark.slow(
    reason="captures decoders; linear layers beside a cache have scales per token in test_cached_inputs.py"
)
def test_recipes_of_decoders_have_scales_per_token_in_linear_layers_alone():
    few = {"activations": "token", "weights_dtype": "s4", "weights": "group:32"}
    for rotate, int8, int4, more in (
        (True, "w8a8_dynamic", "w4a8", {}),
        ("online", "w8a8_accurate", "w4a8_accurate", {"rounding": "qronos"}),
    ):
        for name, linear in ((int8, {"activations": "token"}), (int4, few | more)):
            default = Setting(cache="int8", embeddings="int8", rotate=rotate)
            assert Recipe.named(name) == Recipe.of({"type:Linear": {**linear, "rotate": rotate}}, default=default)
    body = nn.Sequential(
        nn.Conv1d(4, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 6, 64), nn.ReLU(), nn.Linear(64, 5)
    )
    data = [torch.randn(8, 4, 8) for _ in range(2)]
    model = intaglio.quantize(body.eval(), data, recipe="w4a8", progress=False)
    text = model.text("integer")
    assert text.count(" = quantize_rows(") == text.count(" = linear(") == 2
    assert "32 x 2; products" in str(model.coverage.notes)


def test_a_name_that_no_recipe_and_no_file_has_names_the_nearest():
    with pytest.raises(
        SelectorError, match=r"'acurate' is neither the name of a recipe nor an existing file"
    ) as raised:
        Recipe.given("acurate")
    assert raised.value.remedy == "nearest: accurate, w8a8_accurate, w4a8_accurate"
    with pytest.raises(
        SelectorError,
        match=r"no recipe is named 'acurate'.*\n  remedy: nearest: accurate, w8a8_accurate, w4a8_accurate",
    ):
        Recipe.named("acurate")


def test_a_recipe_file_that_cannot_be_read_names_the_file_and_the_nearest(tmp_path):
    Recipe().save(tmp_path / "mine.toml")
    for path, nearest in (("mime.toml", "mine.toml"), ("acurate.toml", "accurate")):
        for read in (Recipe.load, Recipe.given):
            with pytest.raises(SelectorError, match=f"'{tmp_path / path}' cannot be read: No such file") as raised:
                read(tmp_path / path)
            assert nearest in raised.value.remedy
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for path, problem in ((tmp_path, "Is a directory"), (tmp_path / "bytes.toml", "it is not UTF-8 text")):
        with pytest.raises(SelectorError, match=problem):
            Recipe.load(path)


@pytest.mark.case("frontends B13")
@given(st.dictionaries(SELECTORS, SETTINGS), SETTINGS)
def test_a_recipe_survives_toml(entries, default):
    recipe = Recipe.of(entries, default)
    once = Recipe.from_toml(recipe.to_toml())
    assert once.entries == recipe.entries
    assert once.to_toml() == Recipe.from_toml(once.to_toml()).to_toml()
    assert all(once.setting(CONV, CLASSES) == recipe.setting(CONV, CLASSES) for _ in "a")


def test_a_selector_given_twice_survives_toml(tmp_path):
    recipe = Recipe.of({"fc": {"bits": 7}}).with_selection(skip="fc")
    recipe.save(tmp_path / "recipe.toml")
    origin = Origin("fc", "aten.linear.default")
    assert Recipe.load(tmp_path / "recipe.toml").setting(origin, CLASSES) == recipe.setting(origin, CLASSES)


@pytest.mark.case("frontends A17")
def test_only_one_operator_type_is_quantized():
    recipe = Recipe.of({"type:Linear": ON}, OFF)
    _, graph = lowered(CAPTURED, nets.example(MODEL), recipe=recipe)
    quantized = [op for op in graph.graph.ops if any(graph.graph.types[name].q is not None for name in op.outputs)]
    assert [op.kind for op in quantized if op.kind != "quantize"] == ["linear"]
    assert all("the recipe leaves it in float" in str(skip) for skip in graph.skipped)


@pytest.mark.case("frontends B19")
def test_a_fusion_does_not_cross_a_border_between_settings():
    recipe = Recipe.of({"blocks.0.conv1.0": {"method": "minmax"}})
    prepared = prepare(CAPTURED, Quantizer(recipe))
    assert "blocks.0.conv1.0#0/conv2d.0" in prepared.observers
    assert "blocks.0.conv2.0#0/conv2d.0" not in prepared.observers


@pytest.mark.case("frontends A18", "problem 4")
@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        (nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), Recipe()),
        (nn.Sequential(nn.Conv2d(3, 4, 3)), Recipe(default=OFF)),
        (nn.Sequential(nn.Conv2d(3, 4, 3)), Recipe().with_selection(skip="0")),
        (nn.Sequential(nn.Conv2d(3, 4, 3).double()), Recipe()),
    ],
)
def test_nothing_to_quantize_is_an_error_with_reasons(model, recipe):
    dtype = next(model.parameters(), torch.zeros(1)).dtype
    with pytest.raises(UnsupportedError, match=r"nothing in it can be quantized: \S+ \(aten") as error:
        prepare(capture(model.eval(), torch.zeros(2, 3, 8, 8, dtype=dtype)), Quantizer(recipe))
    assert ("model.float()" if dtype is torch.float64 else "check the recipe") in error.value.remedy
