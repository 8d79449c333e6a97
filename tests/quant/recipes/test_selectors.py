"""Choosing what stays float."""

import pytest
import torch
from torch import nn

import intaglio
from intaglio.errors import SelectorError
from intaglio.fxgraph.node_info import origin
from intaglio.quant.calibrate.prepare import annotate
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from support import nets
from support.lowering import captured_net, lowered
from support.slow_params import slow_params


@pytest.mark.case("problem 35")
@pytest.mark.parametrize(
    "net",
    [
        *slow_params(nets.Residual, reason="a network of residual blocks, with more names"),
        *slow_params(nets.OptionA, reason="another network of residual blocks"),
        nets.MultiOutput,
    ],
    ids=lambda net: net.__name__,
)
def test_every_name_of_named_modules_is_a_selector_of_what_is_in_it(net):
    """Problem 35: exactly the operators of that module stay in float, for every module with a weight in it."""
    model, captured = captured_net(net)
    for name, module in model.named_modules():
        inside = [path for path, m in module.named_modules(prefix=name) if isinstance(m, (nn.Conv2d, nn.Linear))]
        if not name or not inside:
            continue
        skipped = annotate(captured, Quantizer(Recipe().with_selection(skip=name))).skipped
        left = {s.origin.path for s in skipped if s.macs}
        assert left == set(inside), f"skip={name!r}"
        assert all("the recipe leaves it in float" in s.reason for s in skipped if s.macs)


@pytest.mark.case("problem 35")
def test_skipped_layers_compute_with_their_float_weights():
    """Problem 35: "found" is not enough; the weight is the float weight, in the graph that runs."""
    model, captured = captured_net(nets.Residual)
    reference, graph = lowered(captured, nets.example(model, 4), recipe=Recipe().with_selection(skip="blocks.0.conv1"))
    nodes = [node for node in reference.module.graph.nodes if "aten.conv2d" in str(node.target)]
    (conv,) = [node for node in nodes if origin(node).path == SKIPPED]
    weight, bias = (getattr(reference.module, value.target) for value in conv.args[1:3])
    norm = model.blocks[0].conv1[1]
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    torch.testing.assert_close(weight, model.blocks[0].conv1[0].weight * scale.reshape(-1, 1, 1, 1))
    torch.testing.assert_close(bias, norm.bias - norm.running_mean * scale)
    assert f"{SKIPPED}.weight" not in reference.qparams
    assert graph.macs[0] < graph.macs[1]


SKIPPED = "blocks.0.conv1.0"


@pytest.mark.case("problem 35")
@pytest.mark.parametrize(
    ("selector", "offered"),
    [
        ("conv1", "*.conv1"),
        ("conv1.0", "*.conv1.0"),
        ("block.*.conv1", "blocks.*.conv1"),
        ("blocks.*.conv9", "blocks."),
    ],
)
def test_the_error_of_a_selector_without_matches_names_one_that_matches(selector, offered):
    """Problem 35: globs are answered with globs, and the answer is taken."""
    _, captured = captured_net(nets.Residual)
    with pytest.raises(SelectorError, match="matches no operator") as raised:
        annotate(captured, Quantizer(Recipe().with_selection(skip=selector)))
    names = raised.value.remedy.removeprefix("nearest: ").split(", ")
    assert any(name.startswith(offered) for name in names)
    annotate(captured, Quantizer(Recipe().with_selection(skip=names[0])))


@pytest.mark.case("problem 35")
def test_skip_stays_float_and_only_leaves_the_rest_float():
    """Problem 35: one polarity each, and they are opposites."""
    _, captured = captured_net(nets.Residual)
    total = annotate(captured, Quantizer())
    work = sum(s.macs for s in total.skipped)
    chosen = [Recipe().with_selection(**{key: ["blocks.0"]}) for key in ("skip", "only")]
    skip, only = (annotate(captured, Quantizer(recipe)) for recipe in chosen)
    assert work == 0
    assert all(s.origin.path.startswith("blocks.0") for s in skip.skipped)
    assert not any(s.origin.path.startswith("blocks.0") for s in only.skipped)
    floats = [{s.node for s in annotations.skipped if s.macs} for annotations in (skip, only)]
    anchors = {region.anchor.name for region in total.regions if region.record.anchor}
    assert floats[0] | floats[1] == anchors
    assert not floats[0] & floats[1]


@pytest.mark.case("problem 35")
def test_a_selector_is_checked_before_any_data_is_read():
    """Problem 35: what cannot succeed fails at once, not after calibration."""
    read = []

    def batches():
        for _ in range(3):
            read.append(1)
            yield torch.randn(2, 3, 12, 12)

    with pytest.raises(SelectorError):
        intaglio.quantize(nets.randomize(nets.Residual()), batches(), skip="nowhere", progress=False)
    assert len(read) == 1, "the first batch is the example"


class Repeated(nn.Module):
    """A network whose module names take a backtracking expression exponential time."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("a" * 28 + "b", nn.Linear(4, 4))
        self.a12 = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a12(getattr(self, "a" * 28 + "b")(x))


@pytest.fixture(scope="module")
def repeated():
    return intaglio.stages.capture(Repeated(), torch.randn(2, 4))


def skipped_by(captured, **selection):
    found = annotate(captured, Quantizer(Recipe().with_selection(**selection))).skipped
    return [skip.origin.path for skip in found if skip.macs]


@pytest.mark.parametrize("expression", ["(a+)+$", "(.*)*c", "(a|a)*d", "((a+)+)+e"])
def test_regular_expressions_take_linear_time(repeated, expression):
    with pytest.raises(SelectorError, match="matches no operator of the model"):
        skipped_by(repeated, skip=f"re:{expression}")


def test_regular_expressions_match_whole_paths(repeated):
    assert skipped_by(repeated, skip=r"re:a\d+") == ["a12"]
    assert skipped_by(repeated, skip=["re:a+b", "re:(?i)A12"]) == ["a" * 28 + "b", "a12"]


@pytest.mark.parametrize("expression", [r"(a)\1", "(?=a)a12", "(?<!a)b", "(?P<x>a)(?P=x)", "(?>a)"])
def test_expressions_that_need_backtracking_are_an_error_with_a_remedy(repeated, expression):
    with pytest.raises(SelectorError, match="no lookaround and no backreferences") as raised:
        skipped_by(repeated, skip=f"re:{expression}")
    assert "by several selectors" in raised.value.remedy


@pytest.mark.parametrize("expression", ["(a", "[", "*", "a\udc80", "a{100000}"])
def test_text_that_is_not_a_regular_expression_is_an_error(repeated, expression):
    with pytest.raises(SelectorError, match="not a regular expression"):
        skipped_by(repeated, skip=f"re:{expression}")


@pytest.mark.slow(reason="quantizes to see that nothing is left out")
def test_none_selects_nothing(repeated):
    assert Recipe().with_selection(skip=None, only=None) == Recipe()
    model = intaglio.quantize(Repeated(), [torch.randn(4, 4)], skip=None, only=None, progress=False)
    assert model.coverage.macs == 1


@pytest.mark.parametrize("selection", [5, [None], [5], 1.0, b"a"])
def test_selectors_that_are_no_strings_are_an_error(repeated, selection):
    with pytest.raises(intaglio.errors.IntaglioError, match="skip takes a string, an iterable of strings or None"):
        intaglio.quantize(Repeated(), [torch.randn(4, 4)], skip=selection)
    with pytest.raises(SelectorError, match="is not a selector"):
        Recipe().with_selection(skip=iter([None]))
