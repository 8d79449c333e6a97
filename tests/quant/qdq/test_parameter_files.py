"""Parameters and recipes as files: saved, edited, loaded without data."""

import functools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import intaglio
from intaglio import stages
from intaglio.errors import ArtifactError, CalibrationError
from intaglio.ir import Origin
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.qdq.convert import convert
from intaglio.quant.qdq.parameters import Parameter, Parameters
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from support import nets
from support.lowering import ROUNDED, captured_net, quantized, sqnr
from support.nets import Body
from support.slow_params import slow_params_except

MODEL, CAPTURED = captured_net(nets.Residual, uneven=True)
X = nets.example(MODEL, 16)
UNSEEN = nets.example(MODEL, 80)[len(X) :]
"""Corrections are fitted to `X`, and are more accurate there than elsewhere."""
INPUT = "#0/input.x"
PLAIN = {"equalize": 0.0, "rounding": "nearest"}
"""The input then has one scale, and weights follow from their scales."""
SETTINGS = [
    {},
    {"bias": "weights"},
    {"equalize": 0.0, "rounding": "nearest"},
    {"bits": 7, "weights": "tensor"},
    {"weights_dtype": "s4", "weights": "group:32"},
    {"weights_dtype": "f8e5m2", "activations_dtype": "f8e4m3"},
    {"activations_dtype": "s16"},
]


def prepared(setting: dict | None = None):
    return prepare(CAPTURED, Quantizer(Recipe.of({"*": setting or {}})))


def reference(setting: dict | None = None):
    """All the way that `quantize` goes, corrections included."""
    return _reference(json.dumps(setting or {}))


@functools.cache
def _reference(setting: str):
    fresh = stages.equalize(prepared(json.loads(setting)), [X])
    ranges = calibrate(fresh, [X])
    return convert(fresh, ranges, stages.correct(fresh, ranges, [X]))


@pytest.mark.parametrize(
    "setting",
    slow_params_except(SETTINGS[2], of=SETTINGS, reason="other parameters of the same file"),
)
def test_parameters_from_a_file_give_the_same_bits_without_data(setting, tmp_path):
    made = reference(setting)
    made.parameters.save(tmp_path / "parameters.json")
    again = convert(prepared(setting), Parameters.load(tmp_path / "parameters.json"))
    assert again.text() == made.text()
    assert again.qparams == made.qparams
    assert torch.equal(again(X), made(X))
    for name, tensor in made.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[name].float(), tensor.float()), name


@pytest.mark.parametrize(
    "setting",
    slow_params_except(SETTINGS[0], SETTINGS[2], SETTINGS[5], of=SETTINGS, reason="other parameters of the same file"),
)
def test_saving_what_was_loaded_gives_the_same_bytes(setting, tmp_path):
    reference(setting).parameters.save(tmp_path / "a")
    Parameters.load(tmp_path / "a").save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


SCALES = st.floats(2.0**-126, 2.0**100, width=32)


SEVERAL = st.lists(SCALES, min_size=1, max_size=4).map(tuple)


@pytest.mark.slow(reason="draws parameters; those of models are saved above")
@given(st.dictionaries(st.text(max_size=9), SEVERAL, min_size=1, max_size=3), st.data())
def test_any_parameters_survive_json_and_toml(scales, data):
    entries = {}
    for name, found in scales.items():
        zeros = data.draw(st.lists(st.integers(0, 255), min_size=len(found), max_size=len(found)))
        entries[name] = Parameter("u8", 0, 255, found, tuple(zeros))
    parameters = Parameters(entries)
    assert Parameters.from_json(parameters.to_json()) == parameters
    recipe = Recipe.of({"fc": None}).with_parameters(parameters)
    assert Recipe.from_toml(recipe.to_toml()) == recipe


def test_an_edited_entry_takes_effect_and_no_other(tmp_path):
    made = reference(PLAIN)
    content = json.loads(made.parameters.to_json())
    content["sites"][INPUT].update(scale=0.125, zero_point=7, qmax=100)
    (tmp_path / "edited.json").write_text(json.dumps(content))
    edited = convert(prepared(), Parameters.load(tmp_path / "edited.json"))
    q = edited.qparams[INPUT]
    assert (q.step, q.zero, q.qmax) == (0.125, 7, 100)
    same = {name for name in made.qparams if edited.qparams[name] == made.qparams[name]}
    assert set(made.qparams) - same == {INPUT, "stem.0#0/conv2d.0:bias"}
    assert not torch.equal(edited(X), made(X))
    model = stages.compile(edited)
    assert torch.equal(model(X), stages.requantize(edited)(X))


@pytest.mark.parametrize("text", ["0.02", "2e-2", "0x1.47ae14p-6"])
def test_scales_may_be_decimal_or_hexadecimal_numbers_or_texts(text):
    changed = reference(PLAIN).parameters.changed(INPUT, scale=text)
    assert changed.entries[INPUT].scale == (torch.tensor(0.02).item(),)


@pytest.mark.case("calibration 28")
def test_parameters_of_repeated_modules_are_named_by_call():
    """Case 28: one ReLU for two values, one weight for two calls: entries by call site, and one for the weight."""
    model = Body(lambda m, x: m.r(m.c(m.r(m.c(x)) * 10)), c=nn.Conv2d(3, 3, 3, padding=1), r=nn.ReLU())
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    made, _ = quantized(nets.randomize(model), x, recipe=ROUNDED)
    names = made.parameters.entries
    assert {"r#0/relu.0", "r#1/relu.0", "c.weight"} <= names.keys()
    assert names["r#0/relu.0"].scale != names["r#1/relu.0"].scale
    changed = made.parameters.changed("r#1/relu.0", scale=1.0)
    fresh = prepare(stages.capture(model.eval(), x), stages.Quantizer(ROUNDED))
    edited = convert(fresh, changed)
    assert edited.qparams["r#1/relu.0"].step == 1.0
    assert edited.qparams["r#0/relu.0"] == made.qparams["r#0/relu.0"]


def test_sites_that_share_parameters_have_one_entry():
    model = Body(lambda m, x: m.b(F.max_pool2d(F.relu(m.a(x)), 2)), a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 2, 1))
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    made, _ = quantized(nets.randomize(model), x)
    assert "#0/relu.0" in made.parameters.entries
    assert "#0/max_pool2d.0" not in made.parameters.entries
    fresh = prepare(stages.capture(model, x))
    edited = convert(fresh, made.parameters.changed("#0/relu.0", scale=0.5))
    assert edited.qparams["#0/max_pool2d.0"].step == edited.qparams["#0/relu.0"].step == 0.5


def test_weights_may_be_left_out_all_of_them():
    made = reference(PLAIN)
    content = json.loads(made.parameters.to_json())
    activations = {name: entry for name, entry in content["sites"].items() if not name.endswith("weight")}
    again = convert(prepared(), Parameters.from_dicts(activations))
    assert again.qparams == made.qparams
    some = {**activations, "fc.weight": content["sites"]["fc.weight"]}
    with pytest.raises(CalibrationError, match=r"missing blocks\.0\.conv1\.0\.weight"):
        convert(prepared(), Parameters.from_dicts(some))


def test_unknown_and_missing_sites_are_listed():
    entries = dict(reference(PLAIN).parameters.entries)
    entries["stm.0.weight"] = entries.pop("stem.0.weight")
    with pytest.raises(CalibrationError, match=r"unknown stm\.0\.weight; missing stem\.0\.weight") as raised:
        convert(prepared(), Parameters(entries))
    assert "recipe" in raised.value.remedy
    with pytest.raises(CalibrationError, match="no site 'nothing'"):
        reference(PLAIN).parameters.changed("nothing", scale=1.0)


def skipping(*selectors: str):
    return prepare(CAPTURED, Quantizer(Recipe().with_selection(skip=selectors)))


@pytest.mark.parametrize(
    "selectors",
    slow_params_except(
        ("fc",), of=[("stem",), ("fc",), ("blocks.0.conv1",), ("type:Linear", "blocks.1")], reason="other selectors"
    ),
)
def test_parameters_of_what_the_recipe_leaves_in_float_are_left_out(selectors):
    """The rest keeps its bits; weights that were equalized together still belong together."""
    made, fresh = reference({"bias": "weights"}), skipping(*selectors)
    assert made.parameters.corrected.equalization.factors
    found = convert(fresh, made.parameters)
    assert set(found.qparams) < set(made.qparams)
    assert all(made.qparams[name] == q for name, q in found.qparams.items())
    assert sqnr(found(UNSEEN), MODEL(UNSEEN)) > sqnr(made(UNSEEN), MODEL(UNSEEN)) - 0.5
    again = convert(skipping(*selectors), found.parameters)
    assert again.text() == found.text()
    assert torch.equal(again(X), found(X))


def test_a_value_that_was_fused_away_needs_parameters_of_its_own():
    """A sum whose rectifier is float ends its convolution."""
    skipped = prepare(CAPTURED, Quantizer(ROUNDED.with_selection(skip=["op:aten.relu"])))
    with pytest.raises(CalibrationError, match=r"do not belong to this model: missing blocks\.0#0/add\.0"):
        convert(skipped, reference().parameters)


def test_unknown_site_names_are_errors():
    made = reference()
    odd = Parameters({**made.parameters.entries, "stm.0.weight": made.parameters.entries["fc.weight"]})
    with pytest.raises(CalibrationError, match=r"do not belong to this model: unknown stm\.0\.weight\n"):
        convert(skipping("stem"), odd)


@pytest.mark.parametrize("selectors", [("stem",), ("blocks.0.conv2",), ("op:aten.add",), ("blocks.*", "fc")])
def test_value_names_do_not_depend_on_what_stays_in_float(selectors):
    every = {(site.value, site.role): site.name for site in prepared().annotations.sites}
    some = {(site.value, site.role): site.name for site in skipping(*selectors).annotations.sites}
    assert some
    assert all(every.get(value, name) == name for value, name in some.items())
    assert len(set(some.values())) == len(some)


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        (INPUT, {"dtype": "u7"}, "they are u7, but the recipe asks for u8"),
        (INPUT, {"scale": [0.1, 0.2]}, "2 scales are given, but the site has one"),
        (INPUT, {"qmin": -1}, r"the range -1\.\.255 is not a part of u8, which has 0\.\.255"),
        ("fc.weight", {"zero_point": 1}, "the zero point is 1, but s8 has zero point 0"),
        ("fc.weight", {"scale": 0.1}, "1 scales"),
        ("fc.weight", {"qmax": 100}, "but s8 weights have"),
        ("fc.weight", {"group": 8}, "they are s8 in groups of 8, but the recipe asks for s8"),
    ],
)
def test_an_entry_that_its_site_cannot_have_is_refused_by_name(name, change, problem):
    parameters = reference(PLAIN).parameters.changed(name, **change)
    with pytest.raises(CalibrationError, match=problem) as raised:
        convert(prepared(), parameters)
    assert name in str(raised.value)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"scale": 0}, "the scale 0 is not a finite number of at least"),
        ({"scale": float("inf")}, "scale inf"),
        ({"scale": "wide"}, "wide"),
        ({"zero_point": 0.5}, "0.5 is not an integer"),
        ({"zero_point": 300}, "each scale needs one, in qmin..qmax"),
        ({"zeropoint": 3}, "zeropoint; an entry has exactly dtype"),
        ({"qmin": 255}, "qmin..qmax"),
    ],
)
def test_an_invalid_recipe_entry_is_refused_when_read(entry, problem):
    whole = {"dtype": "u8", "qmin": 0, "qmax": 255, "scale": 0.1, "zero_point": 0}
    with pytest.raises(ArtifactError, match=problem) as raised:
        Parameters.from_json(json.dumps({"version": 1, "sites": {"here": {**whole, **entry}}}))
    assert raised.value.where == "parameters of here"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "not a file of parameters"),
        ("{", "not a file"),
        ('{"version": 1}', "not a file"),
        ('{"version": 2, "sites": {}}', "version 2; this intaglio reads version 1"),
    ],
)
def test_a_file_of_another_kind_is_refused_as_parameters(text, problem):
    with pytest.raises(ArtifactError, match=problem):
        Parameters.from_json(text)


@pytest.mark.slow(
    reason="quantizes and compiles a residual network three times; parameters are loaded without data above"
)
def test_a_recipe_carries_its_parameters_and_quantizes_without_data(tmp_path):
    """One file is all that the float model needs."""
    setting = {"blocks.1": None, "fc": {"weights_dtype": "s4"}}
    made = intaglio.quantize(MODEL, [X], recipe=setting)
    fresh = stages.equalize(prepare(CAPTURED, Quantizer(Recipe.of(setting))), [X])
    ranges = calibrate(fresh, [X])
    parameters = convert(fresh, ranges, stages.correct(fresh, ranges, [X])).parameters
    Recipe.of(setting).with_parameters(parameters).save(tmp_path / "recipe.toml")
    again = intaglio.quantize(MODEL, example_inputs=torch.zeros_like(X), recipe=tmp_path / "recipe.toml")
    assert torch.equal(again(X), made(X))
    assert Recipe.load(tmp_path / "recipe.toml").with_selection(skip="fc").parameters == parameters


@pytest.mark.slow(reason="quantizes a network twice; parameters are converted from a file above")
def test_parameters_from_a_file_need_an_example_only(tmp_path):
    reference().parameters.save(tmp_path / "parameters.json")
    made = intaglio.quantize(MODEL, [X])
    recipe = Recipe().with_parameters(stages.Parameters.load(tmp_path / "parameters.json"))
    again = intaglio.quantize(MODEL, X[:1] * 0, recipe=recipe)
    assert torch.equal(again(X), made(X))


@pytest.mark.slow(reason="quantizes, saves and loads a model; files of parameters are loaded above")
def test_a_model_keeps_its_recipe_and_the_parameters_of_its_activations(tmp_path):
    model = intaglio.quantize(MODEL, [X], skip="fc")
    model.save(tmp_path / "model.intaglio", library=False)
    loaded = intaglio.load(tmp_path / "model.intaglio")
    kept = Quantizer.from_toml(loaded.text("quantizer"))
    assert not kept.recipe.setting(Origin("fc", "aten.linear.default"), {}).quantize
    again = convert(prepare(CAPTURED, kept), Parameters.from_json(loaded.text("parameters")))
    assert stages.requantize(again).text() == model.text("integer")


@pytest.mark.parametrize("images", [None, intaglio.Image(0.5, 0.25), {"x": intaglio.Image((0.1, 0.2), (0.3, 0.4))}])
def test_a_quantizer_survives_its_text(images):
    quantizer = Quantizer(Recipe.of({"a.*": {"bits": 7}, "re:\\d": None}), images)
    again = Quantizer.from_toml(quantizer.to_toml())
    assert again.recipe == quantizer.recipe
    assert (again.input or None) == images


def test_a_bias_that_overflows_after_an_edit_enlarges_the_weight_scale():
    model = Body(lambda m, x: m.a(x), a=nn.Linear(8, 2)).eval()
    with torch.no_grad():
        model.a.bias.fill_(1e4)
    x = torch.randn(4, 8)
    made, _ = quantized(model, x)
    tiny = made.parameters.changed("#0/input.args_0", scale=1e-6)
    edited = convert(prepare(stages.capture(model, x)), tiny)
    assert any("enlarged to fit the bias" in note for note in edited.notes)
    assert edited.qparams["a.weight"].scales > made.qparams["a.weight"].scales
