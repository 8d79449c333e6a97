"""Layers read two bytes of their operand, of their weight or of both where their setting asks for it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio import stages
from intaglio.errors import SelectorError
from intaglio.quant.correct.corrections import Corrected
from intaglio.quant.precision.layer_bytes import RANGE_MARGIN
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.tune import ReferencePool
from support.lowering import assert_equal_quantized, sqnr
from support.nets import Body, randomize
from support.programs import assert_same_bits
from support.slow_params import slow_params

BOTH = {"operand_bytes": 2, "weight_bytes": 2}
OPERAND, WEIGHT = {"operand_bytes": 2}, {"weight_bytes": 2}
X, UNSEEN = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0)).split(16)


def residual() -> nn.Module:
    """A residual block between two convolutions, and a linear layer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        modules = {
            "first": nn.Conv2d(3, 8, 3, padding=1),
            "inner": nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)),
            "last": nn.Conv2d(8, 8, 3, padding=1, bias=False),
            "head": nn.Linear(8, 4),
        }

        def body(m: nn.Module, x: Tensor) -> Tensor:
            x = m.first(x).relu()
            x = (m.last(m.inner(x).relu()) + x).relu()
            return m.head(x.mean((2, 3)))

        return randomize(Body(body, **modules)).eval()


def reference_of(model: nn.Module, recipe: dict, images: Tensor = X) -> stages.Reference:
    """Return the reference of a recipe without corrections of weights."""
    prepared = stages.prepare(stages.capture(model, (images,)), Quantizer(Recipe.of(recipe)))
    equalized = stages.equalize(prepared, [images])
    return stages.convert(equalized, stages.calibrate(equalized, [images], progress=False))


def ratio_of(recipe: dict) -> float:
    model = residual()
    return sqnr(reference_of(model, recipe)(UNSEEN), model(UNSEEN).detach())


@pytest.mark.slow(reason="four references; that both bytes are close to float is tested below")
def test_both_bytes_of_operands_and_weights_are_needed_for_exact_results():
    plain, operand, weight, both = (ratio_of({"*": one}) for one in ({}, OPERAND, WEIGHT, BOTH))
    assert both > max(operand, weight) + 8
    assert both > plain + 18


def test_both_bytes_of_everything_are_close_to_float():
    assert ratio_of({"*": BOTH}) > 55


SETTINGS = {"both": BOTH, "operand": OPERAND, "weight": WEIGHT}
MODELS = {
    "residual": residual,
    "depthwise": lambda: nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1, 1, 3), nn.Hardswish(), nn.Conv2d(6, 4, 1)),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(3, 6, 2, 2, groups=3), nn.LeakyReLU(), nn.Conv2d(6, 4, 1)),
    "one axis": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 6, 3), nn.SiLU(), nn.Conv1d(6, 4, 1)),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)),
    "pool": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Sigmoid(), nn.Conv2d(8, 4, 1)),
}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("residual", "both"),
        *slow_params(
            *((name, "both") for name in MODELS if name != "residual"),
            reason="other layers are split in the same way",
        ),
        *slow_params(
            *((name, setting) for name in MODELS for setting in ("operand", "weight")),
            reason="one half of what is split when layers read two bytes of both",
        ),
    ],
)
def test_kernels_give_the_bits_of_the_integer_graph(name, setting):
    reference = reference_of(MODELS[name]().eval(), {"*": SETTINGS[setting]})
    lowered = stages.requantize(reference)
    assert_equal_quantized(reference, lowered, UNSEEN)
    program = stages.compile(reference)
    for images in (UNSEEN, UNSEEN[:1], torch.cat([UNSEEN, X])):
        assert_same_bits((program(images),), (lowered(images),))


@pytest.mark.slow(reason="one layer is split in the report that is tested below")
def test_one_layer_of_several_is_split_and_the_others_keep_their_sites():
    plain, split = (reference_of(residual(), recipe) for recipe in ({}, {"inner.0": BOTH}))
    assert list(split.parameters.corrected.equalization.layer_bytes) == ["inner.0#0/conv2d.0"]
    sites = {site.name for site in plain.annotations.sites}
    added = {site.name for site in split.annotations.sites} - sites
    assert added
    assert all(name.startswith(("inner.0#0/", "inner.0.weight, ")) for name in added)
    names = {node.name for node in plain.annotations.module.graph.nodes if node.op == "call_function"}
    assert names <= {node.name for node in split.annotations.module.graph.nodes}


def test_operators_behind_a_split_layer_are_float_and_its_results_are_rounded_once():
    """The sum behind ``last`` would otherwise round the result of the layer to 256 values before it adds."""
    reference = reference_of(residual(), {"last": BOTH})
    behind = [skip.origin for skip in reference.annotations.skipped if "follows the results for two" in skip.reason]
    assert [origin.operator for origin in behind] == ["aten.add.Tensor", "aten.relu.default"]
    assert not stages.requantize(reference).islands


def test_a_split_layer_in_a_program_has_no_float_islands():
    assert stages.compile(reference_of(residual(), {"*": BOTH})).coverage.islands == 0


def test_values_may_be_larger_than_in_calibration():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    data = torch.rand(64, 4) * 2 - 1
    reference = reference_of(model, {"*": BOTH}, data)
    assert RANGE_MARGIN > 1.3
    beyond = 1.3 * data
    assert sqnr(reference(beyond), model(beyond).detach()) > 50


def test_a_weight_that_int8_values_hold_has_one_byte():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU()).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[127, 1, -5, 0], [-127, 3, 8, 9], [127, 0, 0, 1], [127, 2, 2, 2]]) / 64)
    graph = reference_of(model, {"0": WEIGHT}, torch.randn(64, 4)).annotations.module.graph
    assert sum(node.target is torch.ops.aten.linear.default for node in graph.nodes) == 1


def test_a_constant_operand_has_one_byte():
    reference = reference_of(nn.Sequential(nn.Linear(4, 4)).eval(), {"*": OPERAND}, torch.zeros(8, 4))
    assert not reference.parameters.corrected.equalization.layer_bytes


def test_saved_parameters_give_the_same_model_without_data():
    recipe = {"first": BOTH, "head": WEIGHT}
    reference = reference_of(residual(), recipe)
    loaded = Parameters.from_json(reference.parameters.to_json())
    assert loaded == reference.parameters
    prepared = stages.prepare(stages.capture(residual(), (X,)), Quantizer(Recipe.of(recipe)))
    again = stages.convert(prepared, loaded)
    assert torch.equal(again(UNSEEN), reference(UNSEEN))
    assert again.model_info.notes == reference.model_info.notes


@pytest.mark.parametrize("values", [["0x1.8p+1", "0x1p+0", "0x0p+0", "0x1p+0"], ["0x1p+1"], ["x"] * 4])
def test_damaged_parameters_are_refused(values):
    with pytest.raises((ValueError, TypeError)):
        Corrected.from_dicts({"layer_bytes": {"a#0/linear.0": values}})


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({**BOTH, "activations": "token"}, "its operand is quantized while the model runs"),
        ({**BOTH, "weights_dtype": "s4", "weights": "group:4"}, "its weight is not int8"),
    ],
)
def test_layers_that_cannot_be_split_are_named_with_the_reason(setting, reason):
    int8 = intaglio.quantize(residual(), [X], recipe={"head": setting}, progress=False)
    assert f"head reads one byte, though its setting asks for two: {reason}" in str(int8.coverage)


def test_without_equalize_a_note_names_the_layers():
    prepared = stages.prepare(stages.capture(residual(), (X,)), Quantizer(Recipe.of({"head": BOTH})))
    reference = stages.convert(prepared, stages.calibrate(prepared, [X], progress=False))
    assert "because equalize has not split them: head" in " ".join(reference.model_info.notes)


def test_reports_name_the_layers_and_list_each_of_them_once():
    model = residual()
    int8 = intaglio.quantize(model, [X], recipe={"inner.0": BOTH}, progress=False)
    assert "layers that read two bytes of their operand or their weight, as their setting asks: inner.0" in str(
        int8.coverage
    )
    rows = [row for row in intaglio.compare(model, int8, [UNSEEN]).rows if row.path == "inner.0"]
    assert [row.operator for row in rows] == ["aten.conv2d.default"]
    assert rows[0].alone > 70
    assert "in two bytes: as int8 layers for each byte" in str(intaglio.explain(int8, "inner.0"))


@pytest.mark.parametrize("name", ["operand_bytes", "weight_bytes"])
@pytest.mark.parametrize("count", [0, 3])
def test_other_numbers_of_bytes_are_refused(name, count):
    with pytest.raises(SelectorError, match=rf"{name} = {count}; allowed are \(1, 2\)"):
        Recipe.of({"*": {name: count}})


@pytest.mark.slow(reason="makes six references; one is compared bit by bit below")
def test_a_pool_makes_the_reference_that_the_stages_make():
    """All splits of a pool are by one equalization, in which the first model has none."""
    model, nearest = residual(), {"*": {"rounding": "nearest"}}
    captured, plain = stages.capture(model, (X,)), reference_of(model, nearest)
    pool = ReferencePool(captured, Quantizer(Recipe.of(nearest)), plain, [X])
    for names in itertools.combinations(("first", "last", "head"), 2):
        recipe = nearest | dict.fromkeys(names, BOTH)
        made = pool.reference(Quantizer(Recipe.of(recipe)))
        assert sqnr(made(UNSEEN), reference_of(model, recipe)(UNSEEN)) > 50  # ranges are of the graph before the split


def test_a_pool_keeps_the_ranges_of_its_first_reference():
    """Weights of the parts are in units of the range of the operand, so other ranges would need other weights."""
    model, recipe = residual(), {"inner.0": BOTH}
    captured, first = stages.capture(model, (X,)), reference_of(model, recipe)
    pool = ReferencePool(captured, Quantizer(Recipe.of(recipe)), first, [0.5 * X])
    assert torch.equal(pool.reference(pool.quantizer)(UNSEEN), first(UNSEEN))
    assert sqnr(pool.reference(Quantizer(Recipe.of({"*": BOTH})))(0.5 * UNSEEN), model(0.5 * UNSEEN).detach()) > 50


@pytest.mark.slow(reason="a whole search; the trials of a search are references of a pool, tested above")
def test_a_search_takes_two_bytes_for_what_float_would_cost_more(untimed_searches):
    model = residual()
    want = model(X)

    def closeness(one: nn.Module) -> float:
        return 1 - float((one(X) - want).square().sum() / want.square().sum())

    options = {"max_drop": 1e-6, "relative": False, "budget": 3, "evaluations": 8, "progress": False}
    options["quantizer"] = Quantizer(Recipe.of({"*": {"rounding": "nearest"}}))
    found = intaglio.search(model, [X], closeness, candidates={"two_bytes": BOTH}, **options)
    assert found.reached
    assert found.changes
    assert found.model.coverage.islands == 0
    again = intaglio.quantize(model, X[:1], recipe=found.recipe, progress=False)
    assert torch.equal(again(X), found.model(X))
