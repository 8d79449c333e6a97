"""What patterns take, who wins where they overlap, what is said of the others, and what stays in float at the ends."""

from itertools import permutations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import intaglio
from intaglio import stages
from intaglio.errors import SelectorError, UnsupportedError
from intaglio.fxgraph.node_info import info
from intaglio.patterns import BUILT_IN, QuantizerPattern, builtin, const, op, seq, wildcard
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Setting
from support import nets
from support.nets import Body

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def conv(inputs: int = 3, outputs: int = 8, **rest) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **rest)


def annotated(body, *args, modules=None, **settings):
    model = nets.randomize(Body(body, **(modules or {"c": conv(), "d": conv(8)})))
    return stages.annotate(stages.capture(model, args or (X,)), Quantizer(**settings))


def taken(annotations) -> list[tuple[str, str | None]]:
    """Regions by name, and the pattern each is from."""
    return [(region.name, region.pattern and region.pattern.name) for region in annotations.regions]


def two_convs(m, x):
    return F.relu(m.d(F.relu(m.c(x)))) + 1.5


def test_only_what_patterns_match_is_quantized():
    found = annotated(
        lambda m, x: m.l(torch.tan(m.c(x)).mean((2, 3))),
        modules={"c": conv(), "l": nn.Linear(8, 4)},
        patterns=["linear"],
    )
    assert taken(found) == [("reshape", None), ("linear", "linear")]
    assert {skip.reason for skip in found.skipped} == {"no pattern matches it", "no int8 kernel for this operator"}


def test_operators_that_select_or_clamp_need_no_pattern():
    found = annotated(lambda m, x: m.d(F.max_pool2d(F.relu(m.c(x)), 2)), patterns=["conv2d"])
    assert taken(found) == [("anchor_clamp", "conv2d"), ("max_pool2d", None), ("conv2d", "conv2d")]


def test_a_chain_does_not_cross_two_matches():
    found = annotated(lambda m, x: m.c(x) + m.e(x), modules={"c": conv(), "e": conv()}, patterns=["conv2d", "add"])
    assert taken(found) == [("conv2d", "conv2d"), ("conv2d", "conv2d"), ("add", "add")]


@pytest.mark.parametrize("net", [nets.ConvBnRelu, nets.Residual])
def test_all_built_in_patterns_equal_the_default(net):
    model = nets.randomize(net())
    captured = stages.capture(model, nets.example(model))
    plain, given = (stages.annotate(captured, q) for q in (Quantizer(), Quantizer(patterns=builtin())))
    assert given.sites == plain.sites
    assert [region.name for region in given.regions] == [region.name for region in plain.regions]
    assert given.skipped == plain.skipped


def test_built_in_names_are_the_documents_too():
    dense, multiply = builtin("dense", "multiply")
    assert (dense.pattern, multiply.pattern) == (BUILT_IN["linear"], BUILT_IN["mul"])
    assert {"conv2d", "conv2d_bias", "linear", "linear_bias", "add", "mul", "anchor_add_clamp"} <= set(BUILT_IN)


def test_a_layer_without_bias_does_not_match_a_pattern_with_bias():
    modules = {"c": conv(bias=False), "d": conv(8)}
    alone = annotated(two_convs, modules=modules, patterns=["conv2d_bias"])
    assert taken(alone) == [("anchor_clamp", "conv2d_bias")]  # the first clamps a float result, and so stays float
    both = annotated(two_convs, modules=modules, patterns=["conv2d", "conv2d_bias"])
    assert [name for _, name in taken(both)] == ["conv2d", "conv2d_bias"]


def test_a_match_may_hold_several_kernels():
    block = QuantizerPattern("block", seq("conv2d", "clamp", "conv2d"))
    assert taken(annotated(two_convs, patterns=[block])) == [("anchor_clamp", "block"), ("anchor_clamp", "block")]


def test_an_operator_may_be_called_by_its_overload():
    pattern = QuantizerPattern("relu", op("aten.relu.default", op("conv2d", wildcard("x"))))
    assert taken(annotated(two_convs, patterns=[pattern])) == [("anchor_clamp", "relu")] * 2


SHORT = QuantizerPattern("short", op("conv2d"))
MIDDLE = QuantizerPattern("middle", seq("conv2d", "clamp"))
LONG = QuantizerPattern("long", op("clamp", op("add", op("conv2d"), wildcard(), commutative=True)))
STRONG = QuantizerPattern("strong", op("conv2d"), priority=1)


def residual(m, x):
    return F.relu(m.d(F.relu(m.c(x))) + m.s(x))


RESIDUAL = {"c": conv(), "d": conv(8), "s": conv()}


@pytest.mark.case("calibration 39")
@pytest.mark.parametrize("order", list(permutations((SHORT, MIDDLE, LONG))), ids=lambda order: order[0].name)
def test_the_larger_match_wins_in_any_order(order):
    found = annotated(residual, modules=RESIDUAL, patterns=order)
    assert sorted(name for _, name in taken(found)) == ["long", "middle", "short"]
    assert sorted(map(str, found.rejected)) == [
        "short at c (aten.conv2d.default): middle at model (aten.relu.default) takes precedence",
        "short at s (aten.conv2d.default): long at model (aten.relu.default) takes precedence",
    ]


@pytest.mark.case("calibration 39")
def test_a_pattern_of_higher_priority_wins():
    found = annotated(residual, modules=RESIDUAL, patterns=[LONG, MIDDLE, STRONG])
    assert {name for _, name in taken(found)} == {"strong"}
    assert {(match.pattern, match.reason.split(" at ")[0]) for match in found.rejected} == {
        ("long", "strong"),
        ("middle", "strong"),
    }


def test_a_diamond_belongs_to_the_match_that_ends_first():
    pair = QuantizerPattern("pair", op("add", op("clamp", name="y"), wildcard("y")))
    found = annotated(lambda m, x: (lambda y: y + y)(F.relu(m.c(x) * 2)), patterns=[pair, "conv2d"])
    assert ("add", "pair") in taken(found)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (QuantizerPattern("of_vectors", op("conv2d"), ranks=(2,)), "its result has rank 4; the pattern is for rank 2"),
        (QuantizerPattern("erf", op("aten.erf.default")), "no int8 kernel for this operator"),
        (QuantizerPattern("integers", op("add")), "its result is not a float32 tensor but i64"),
        (QuantizerPattern("computed", op("conv2d", wildcard(), op("aten.abs.default"))), "weight is computed"),
    ],
)
def test_a_match_that_cannot_be_quantized_says_why(pattern, reason):
    found = annotated(
        lambda m, x, i: (torch.erf(m.c(x)), i + i, F.conv2d(x, m.c.weight.exp().abs() * x.mean())),
        X,
        torch.ones(3, dtype=torch.long),
        modules={"c": conv()},
        patterns=[pattern],
    )
    if pattern.name == "computed":
        assert not found.regions
        return
    assert any(reason in match.reason for match in found.rejected), found.rejected
    assert "rejected" in found.text()


def test_the_notes_list_taken_and_rejected_matches():
    model = nets.randomize(Body(two_convs, c=conv(), d=conv(8)))
    prepared = stages.prepare(stages.capture(model, X), Quantizer(patterns=[SHORT, STRONG]))
    assert "patterns: strong x 2; 2 matches rejected, for the reasons in text('sites')" in prepared.model_info.notes


def test_a_pattern_setting_overrides_the_default_but_not_entries_of_the_recipe():
    pattern = QuantizerPattern("convs", op("conv2d"), setting=Setting(weights="tensor", bits=7))
    recipe = intaglio.Recipe.of({"d": {"weights": "channel"}})
    found = annotated(two_convs, patterns=[pattern], recipe=recipe)
    assert {site.name: site.axis for site in found.sites if site.role == "weight"} == {"c.weight": None, "d.weight": 0}
    assert {site.qmax for site in found.sites if site.role == "activation"} == {127}


def test_a_pattern_may_leave_operators_in_float():
    pattern = QuantizerPattern("not_these", op("conv2d", wildcard(), const()), setting=Setting(quantize=False))
    found = annotated(
        lambda m, x: m.l(m.c(x).flatten(1)),
        modules={"c": conv(), "l": nn.Linear(512, 2)},
        patterns=[*builtin(), QuantizerPattern("off", op("conv2d"), priority=1, setting=pattern.setting)],
    )
    assert [name for _, name in taken(found)] == ["reshape", "linear"]
    assert "the pattern off leaves it in float" in {skip.reason for skip in found.skipped}


@pytest.mark.parametrize(
    ("patterns", "problem"),
    [
        (["conv2"], "no built-in pattern of this name"),
        ([SHORT, SHORT], "2 patterns have this name"),
        ([QuantizerPattern("odd", op("convolution"))], "there is no operator 'convolution'"),
        ([QuantizerPattern("leaf", wildcard())], "its root is not an operator"),
    ],
)
def test_invalid_patterns_say_why(patterns, problem):
    with pytest.raises(SelectorError, match=problem):
        annotated(two_convs, patterns=patterns)


# -- skip_first, skip_last --------------------------------------------------------------------------------------------


def skipped(annotations, flag: str) -> set[str]:
    return {skip.origin.path for skip in annotations.skipped if skip.reason.startswith(flag)}


def three(m, x):
    return m.e(F.relu(m.d(F.relu(m.c(F.max_pool2d(x, 2))))))


THREE = {"c": conv(), "d": conv(8), "e": conv(8)}


@pytest.mark.parametrize(
    ("first", "last", "kept"),
    [
        (True, False, ["d", "e"]),
        (False, True, ["c", "d"]),
        (True, True, ["d"]),
        (False, False, ["c", "d", "e"]),
    ],
)
def test_selected_first_and_last_layers_stay_in_float(first, last, kept):
    found = annotated(three, modules=THREE, skip_first=first, skip_last=last)
    assert [info(region.anchor).origin.path for region in found.regions if region.record.anchor] == kept
    assert ("c" in skipped(found, "skip_first")) is first
    assert ("e" in skipped(found, "skip_last")) is last


@pytest.mark.case("calibration 40")
def test_every_operator_that_an_input_reaches_is_first():
    found = annotated(
        lambda m, x, z: m.e(F.relu(m.c(x)) + m.d(z)), X, X, modules={**THREE, "d": conv()}, skip_first=True
    )
    assert skipped(found, "skip_first") == {"", "c", "d"}, "the ReLU goes with its convolution"
    assert [info(region.anchor).origin.path for region in found.regions if region.record.anchor] == ["e"]


@pytest.mark.case("calibration 40")
def test_every_operator_that_reaches_an_output_is_last():
    found = annotated(
        lambda m, x: (lambda y: {"a": m.d(y), "b": (m.e(y), y)})(F.relu(m.c(x))), modules=THREE, skip_last=True
    )
    assert not found.regions, "c gives an output too"
    assert skipped(found, "skip_last") == {"", "c", "d", "e"}


@pytest.mark.case("calibration 40")
def test_the_result_keeps_its_structure():
    body = Body(
        lambda m, x: (lambda y: {"a": m.d(y), "b": (m.e(F.relu(m.d(y))), 3)})(F.relu(m.c(x))),
        c=conv(),
        d=conv(8),
        e=conv(8),
    )
    model = nets.randomize(body)
    model.d = nets.randomize(conv(8))
    quantized = intaglio.quantize(model, [X], quantizer=stages.Quantizer(skip_first=True))
    got, expected = quantized(X), model(X)
    assert list(got) == ["a", "b"]
    assert got["b"][1] == 3
    assert torch.nn.functional.mse_loss(got["b"][0], expected["b"][0]) < 0.01 * expected["b"][0].var()


@pytest.mark.case("calibration 40")
@pytest.mark.parametrize("flags", [{"skip_first": True}, {"skip_last": True}, {"skip_first": True, "skip_last": True}])
def test_a_model_of_one_operator_is_an_error_that_names_the_flag(flags):
    model = nets.randomize(nn.Sequential(conv()))
    before = model(X)
    with pytest.raises(UnsupportedError, match=rf"nothing in it can be quantized: .*{next(iter(flags))}"):
        intaglio.quantize(model, [X], quantizer=stages.Quantizer(**flags))
    assert torch.equal(model(X), before)
