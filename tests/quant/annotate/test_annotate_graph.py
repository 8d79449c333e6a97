"""Which values are sites, who shares parameters, what stays in float and why."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from intaglio.errors import UnsupportedError
from intaglio.ir import DType
from intaglio.quant.annotate.sites import Derived, Fixed, Observed, Shared, Site, groups
from intaglio.quant.calibrate.prepare import annotate
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.tracing import capture
from support import nets
from support.lowering import ROUNDED
from support.nets import Body

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def conv(inputs: int = 3, outputs: int = 8, **rest) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **rest)


def annotated(body, *args, recipe=None, **modules):
    model = nets.randomize(Body(body, **modules))
    return annotate(capture(model, args or (X,)), Quantizer(recipe) if recipe else None)


def activations(annotations) -> dict[str, Site]:
    return {site.name: site for site in annotations.sites if site.role == "activation"}


@pytest.mark.case("frontends A1")
def test_conv_bn_relu_is_one_region_with_a_site_on_the_relu():
    model = nets.randomize(nets.ConvBnRelu(2))
    annotations = annotate(capture(model, nets.example(model)), Quantizer(ROUNDED))
    assert [region.name for region in annotations.regions] == ["anchor_clamp", "anchor_clamp"]
    assert list(activations(annotations)) == ["#0/input.input_1", "0.2#0/relu.0", "1.2#0/relu.0"]
    assert not annotations.skipped


@pytest.mark.case("frontends A2")
def test_a_residual_sum_has_one_site_after_its_relu_and_one_for_the_skip():
    def body(m, x):
        return (lambda y: F.relu(m.d(y) + y))(F.relu(m.c(x)))

    annotations = annotated(body, recipe=ROUNDED, c=conv(), d=conv(8))
    assert [region.name for region in annotations.regions] == ["anchor_clamp", "anchor_add_clamp"]
    assert list(activations(annotations)) == ["#0/input.args_0", "#0/relu.0", "#0/relu.1"]


@pytest.mark.case("frontends A8", "backend 14")
def test_a_pool_shares_its_input():
    annotations = annotated(lambda m, x: torch.sin(F.max_pool2d(m.c(x), 2)), c=conv())
    sites = activations(annotations)
    assert sites["#0/max_pool2d.0"].spec == Shared("c#0/conv2d.0")
    assert annotations.leaders["#0/max_pool2d.0"] == "c#0/conv2d.0"


def test_an_average_pool_owns_its_range():
    sites = activations(annotated(lambda m, x: F.avg_pool2d(m.c(x), 2), c=conv()))
    assert isinstance(sites["#0/avg_pool2d.0"].spec, Observed)


@pytest.mark.case("frontends B17")
def test_a_bias_is_derived_from_the_activation_and_the_weight_of_its_call():
    annotations = annotated(lambda m, x: m.c(m.c(x)), c=conv(3, 3))
    biases = {site.name: site.spec for site in annotations.sites if site.role == "bias"}
    assert biases == {
        "c#0/conv2d.0:bias": Derived(("#0/input.args_0", "c.weight")),
        "c#1/conv2d.0:bias": Derived(("c#0/conv2d.0", "c.weight")),
    }
    assert [site.name for site in annotations.sites if site.role == "weight"] == ["c.weight"]


def test_equal_operators_of_one_module_are_numbered():
    sites = activations(annotated(lambda m, x: m.d(F.relu(F.max_pool2d(F.relu(m.c(x)), 2))), c=conv(), d=conv(8)))
    assert {"#0/relu.0", "#0/relu.1", "#0/max_pool2d.0"} <= set(sites)


@pytest.mark.case("calibration 31")
def test_both_operands_of_a_sum_may_be_one_value():
    annotations = annotated(lambda m, x: (lambda y: y + y)(m.c(x)), recipe=ROUNDED, c=conv())
    assert list(activations(annotations)) == ["#0/input.args_0", "c#0/conv2d.0", "#0/add.0"]


@pytest.mark.case("calibration 33")
def test_integer_tensors_are_left_alone():
    annotations = annotated(
        lambda m, x, i: (m.c(x), i + i, i.view(-1) > 2), X, torch.ones(4, 2, dtype=torch.long), c=conv()
    )
    assert list(activations(annotations)) == ["#0/input.args_0"]
    assert not annotations.skipped, "no float operator stays behind"


@pytest.mark.case("calibration 39")
def test_the_longest_fusion_wins_and_a_value_is_in_one_region():
    annotations = annotated(
        lambda m, x: (lambda a, b: F.relu(a + b) + m.e(x))(m.c(x), m.d(x)),
        recipe=ROUNDED,
        c=conv(),
        d=conv(),
        e=conv(),
    )
    taken = [node for region in annotations.regions for node in region.nodes]
    assert len(taken) == len(set(taken)) == 6
    assert sorted(region.name for region in annotations.regions) == ["anchor_add", "anchor_add_clamp", "conv2d"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda m, x: torch.erf(m.c(x)), "no int8 kernel for this operator"),
        (lambda m, x: F.conv2d(m.c(x), m.k * x.mean()), "the weight is computed while the model runs"),
        (lambda m, x: F.conv2d(m.c(x), m.k, m.b * x.mean()), "the bias is computed while the model runs"),
        (lambda m, x: F.relu(m.c(x).mean((1, 2, 3))), "no int8 kernel"),
        (lambda m, x: F.pad(m.c(x), (1, -1), value=2.0), "the padding value is 2"),
        (lambda m, x: F.pad(m.c(x), (-1, 1)), "the padding is negative"),
        (
            lambda m, x: m.c(x) + m.b.view(8, 1, 1).expand(8, 8, 8),
            "the operands have shapes|one of its operands is a constant|no int8",
        ),
        (lambda m, x: m.c(x).double().relu(), "not a float32 tensor"),
    ],
)
def test_operators_that_stay_in_float_have_a_reason(body, reason):
    annotations = annotated(body, c=conv(), k=nn.Parameter(torch.randn(8, 8, 1, 1)), b=nn.Parameter(torch.randn(8)))
    reasons = [skip.reason for skip in annotations.skipped]
    assert any(part in text for text in reasons for part in reason.split("|")), reasons


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (lambda m, x: x.mean() / (m.c(x).sigmoid() + 1e-4), "add"),
        (lambda m, x: x.mean() / m.c(x).clamp(min=1e-4), "clamp"),
        (lambda m, x: x.mean() / m.c(x).abs().clamp(min=1e-4).expand(2, 4, 8, 8, 8), "clamp"),
        (lambda m, x: (m.c(x).sigmoid() + 1e-4).sqrt(), "add"),
        (lambda m, x: (m.c(x).sigmoid() + 1e-4) ** -0.5, "add"),
        (lambda m, x: (m.c(x).sigmoid() + 1e-4).log(), "add"),
    ],
)
def test_divisors_and_operands_of_roots_and_logarithms_stay_in_float(body, kept):
    annotations = annotated(body, recipe=ROUNDED, c=conv())
    (skip,) = [skip for skip in annotations.skipped if "must not be rounded to zero" in skip.reason]
    assert skip.node.startswith(kept)
    assert annotations.regions


def test_dividends_are_quantized():
    annotations = annotated(lambda m, x: (m.c(x).sigmoid() + 1e-4) / x.mean(), recipe=ROUNDED, c=conv())
    assert not [skip for skip in annotations.skipped if "must not be rounded" in skip.reason]


def test_a_reduction_that_could_overflow_is_refused():
    wide = nn.Linear(33156, 1)
    annotations = annotate(capture(wide.eval(), torch.zeros(2, 33156)))
    assert "an output sums 33156 products; at most 33155 fit an int32 accumulator" in annotations.skipped[0].reason


def test_skips_count_their_macs():
    recipe = Recipe().with_selection(skip="c")
    annotations = annotated(lambda m, x: m.d(m.c(x)), recipe=recipe, c=conv(), d=conv(8))
    assert [skip.macs for skip in annotations.skipped] == [8 * 8 * 8 * 27]


def site(name: str, spec, **rest) -> Site:
    return Site(name, name, "activation", spec, DType.U8, 0, rest.get("qmax", 255))


@pytest.mark.case("frontends B16")
@given(st.integers(2, 60), st.randoms())
def test_chains_of_sharing_in_any_order_are_one_group(size, random):
    sites = [site("s0", Observed())] + [site(f"s{i}", Shared(f"s{random.randrange(i)}")) for i in range(1, size)]
    random.shuffle(sites)
    assert set(groups(sites).values()) == {"s0"}


@pytest.mark.case("frontends B16")
def test_a_long_chain_does_not_overflow_the_stack():
    sites = [site(f"s{i}", Shared(f"s{i + 1}")) for i in range(5000)] + [site("s5000", Observed())]
    assert set(groups(sites).values()) == {"s5000"}


@pytest.mark.case("frontends B16")
def test_a_cycle_with_an_owner_is_fine():
    sites = [site("a", Shared("b")), site("b", Shared("c")), site("c", Shared("a")), site("d", Shared("a"))]
    with pytest.raises(UnsupportedError, match="none of them has parameters of its own"):
        groups(sites)
    assert groups([site("o", Observed()), site("a", Shared("b")), site("b", Shared("o"))])["a"] == "o"


@pytest.mark.case("frontends B16")
@pytest.mark.parametrize(
    ("sites", "problem"),
    [
        ([site("a", Shared("gone"))], "shares parameters with 'gone', but there is no site"),
        ([site("a", Observed()), site("b", Shared("a"), qmax=127)], "differ in type or range"),
        ([site("a", Fixed(1.0, 0)), site("b", Fixed(2.0, 0)), site("c", Shared("a")), site("c2", Shared("c"))], None),
    ],
)
def test_impossible_sharing_is_refused(sites, problem):
    if problem is None:
        assert groups(sites)["c2"] == "a"
        return
    with pytest.raises(UnsupportedError, match=problem):
        groups(sites)


def test_numbers_of_equal_operators_do_not_depend_on_their_sites():
    def body(m, x):
        return m.d(torch.relu(m.c(torch.relu(x)) + 1))

    model = nets.randomize(Body(body, c=nn.Conv2d(3, 4, 1), d=nn.Conv2d(4, 2, 1)))
    captured = capture(model, torch.randn(2, 3, 4, 4))
    some = annotate(captured, Quantizer(Recipe().with_selection(skip=["c"])))
    assert {"#0/relu.1"} == {site.name for site in some.sites if site.role == "activation" and "relu" in site.name}
