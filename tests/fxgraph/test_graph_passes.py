"""Passes before annotation: what is folded, what is not, and that no value changes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.nodes import operator
from intaglio.fxgraph.passes.decompositions.reductions import mean_to_adaptive_avg_pool
from intaglio.quant.calibrate.prepare import annotate
from intaglio.quant.qdq.prepare_passes import PTQ_PASSES
from intaglio.tracing import capture, run
from support import nets
from support.lowering import captured_net
from support.nets import Body
from support.slow_params import slow_params_except

X = torch.randn(4, 8, 9, 9, generator=torch.Generator().manual_seed(1))


def conv(outputs: int = 6, kernel: int = 3, padding=1, **rest) -> nn.Conv2d:
    return nn.Conv2d(8, outputs, kernel, padding=padding, **rest)


def passed(model: nn.Module, x: torch.Tensor):
    """The graph after the passes and their counts."""
    return passed_graph(capture(nets.randomize(model), x), x)


def passed_graph(captured, x: torch.Tensor):
    """Checked to compute what the captured graph does, and to be done after one run."""
    module = copy_graph(captured.module)
    counts = run(module, PTQ_PASSES.patterns)
    torch.testing.assert_close(module(x)[0], captured.module(x)[0], rtol=1e-4, atol=1e-4)
    assert set(run(module, PTQ_PASSES.patterns).values()) == {0}, "idempotent"
    return module, counts


def norms(module) -> int:
    """Norms as torch calls them, or as the scale and shift that those become which nothing absorbs."""
    return sum("batch_norm" in operator(n) or "addcmul" in operator(n) for n in module.graph.nodes)


def after(m, x):
    return m.b(m.c(x))


def before(m, x):
    return m.c(m.b(x))


@pytest.mark.parametrize(
    "net",
    slow_params_except(
        nets.InplaceMutations,
        nets.SharedConvBn,
        nets.MultiOutput,
        nets.ConvThenUnsupported,
        of=nets.ALL,
        reason="operators of the other networks",
    ),
    ids=lambda net: net.__name__,
)
def test_passes_preserve_values_and_are_idempotent(net):
    passed_graph(captured_net(net)[1], nets.example(net()))


FOLDED = {
    "backend 24, conv": (after, {"c": conv(), "b": nn.BatchNorm2d(6)}, X),
    "without bias": (after, {"c": conv(bias=False), "b": nn.BatchNorm2d(6)}, X),
    "without affine": (after, {"c": conv(), "b": nn.BatchNorm2d(6, affine=False)}, X),
    "another epsilon": (after, {"c": conv(), "b": nn.BatchNorm2d(6, eps=0.5)}, X),
    "frontend B21, padding same": (after, {"c": conv(kernel=4, padding="same"), "b": nn.BatchNorm2d(6)}, X),
    "groups": (after, {"c": conv(groups=2), "b": nn.BatchNorm2d(6)}, X),
    "frontend B21, linear": (after, {"c": nn.Linear(9, 6), "b": nn.BatchNorm1d(6)}, X[0, 0]),
    "frontend B21, transposed conv": (after, {"c": nn.ConvTranspose2d(8, 6, 3), "b": nn.BatchNorm2d(6)}, X),
    "frontend B21, conv3d": (after, {"c": nn.Conv3d(4, 6, 3), "b": nn.BatchNorm3d(6)}, X.reshape(2, 4, 4, 9, 9)),
    "frontend B21, conv1d": (after, {"c": nn.Conv1d(8, 6, 3), "b": nn.BatchNorm1d(6)}, X[:, :, 0]),
    "transposed, groups": (
        after,
        {"c": nn.ConvTranspose2d(8, 6, 3, 2, groups=2, bias=False), "b": nn.BatchNorm2d(6)},
        X,
    ),
    "before a conv without padding": (before, {"c": conv(padding=0), "b": nn.BatchNorm2d(8)}, X),
    "before a grouped conv": (before, {"c": conv(padding=0, groups=2, bias=False), "b": nn.BatchNorm2d(8)}, X),
    "before a linear": (before, {"c": nn.Linear(9, 6), "b": nn.BatchNorm1d(9)}, X[0, 0]),
    "before two readers": (
        lambda m, x: (lambda y: m.c(y) + m.d(y))(m.b(x)),
        {"c": conv(kernel=1, padding=0), "d": conv(kernel=1, padding=0), "b": nn.BatchNorm2d(8)},
        X,
    ),
}


@pytest.mark.case("problem 9", "backend 24")
@pytest.mark.parametrize(
    "name",
    slow_params_except(
        "backend 24, conv",
        "without affine",
        "groups",
        "frontend B21, transposed conv",
        "transposed, groups",
        "before a linear",
        "before two readers",
        of=FOLDED,
        reason="other axes of the same layers",
    ),
)
def test_batch_norms_next_to_a_linear_layer_are_folded(name):
    body, modules, x = FOLDED[name]
    module, counts = passed(Body(body, **modules), x)
    assert norms(module) == 0
    assert counts["fold_batch_norm_after"] + counts["fold_batch_norm_before"] == 1


KEPT = {
    "frontend B21, linear of rank 3": (after, {"c": nn.Linear(9, 6), "b": nn.BatchNorm1d(9)}, X[0]),
    "before a padded conv": (before, {"c": conv(), "b": nn.BatchNorm2d(8)}, X),
    "the conv has another reader": (
        lambda m, x: (lambda y: m.b(y) + y)(m.c(x)),
        {"c": conv(), "b": nn.BatchNorm2d(6)},
        X,
    ),
    "alone": (lambda m, x: torch.sin(m.b(torch.sin(x))), {"b": nn.BatchNorm2d(8)}, X),
}


@pytest.mark.parametrize("name", KEPT)
def test_batch_norms_that_cannot_be_folded_are_kept(name):
    body, modules, x = KEPT[name]
    module, _ = passed(Body(body, **modules), x)
    assert norms(module) == 1


@pytest.mark.case("problem 9")
def test_an_unfolded_batch_norm_is_reported_with_the_reason():
    model = nets.randomize(nets.BnFirst())
    (skip,) = annotate(capture(model, nets.example(model))).skipped
    assert skip.origin.path == "bn"
    assert "this batch norm cannot be folded" in skip.reason


def weights(module) -> set[str]:
    convs = [node for node in module.graph.nodes if operator(node).startswith("aten.conv2d")]
    assert len(convs) == 2
    return {node.args[1].target for node in convs}


@pytest.mark.case("frontends B22")
def test_one_conv_and_one_norm_called_twice_fold_once():
    module, counts = passed_graph(captured_net(nets.SharedConvBn)[1], nets.example(nets.SharedConvBn()))
    assert counts["fold_batch_norm_after"] == 2
    assert len(weights(module)) == 1


TWO_WEIGHTS = {
    "a norm for each call": lambda m, x: m.b2(m.c(F.relu(m.b(m.c(x))))),
    "a norm for one call": lambda m, x: m.c(F.relu(m.b(m.c(x)))),
    "one norm on both sides": lambda m, x: m.b(m.p(m.p(m.b(x)))),
}


@pytest.mark.parametrize("name", TWO_WEIGHTS)
def test_a_shared_conv_with_different_norms_has_a_weight_and_a_site_for_each(name):
    model = Body(TWO_WEIGHTS[name], c=conv(8, bias=False), p=conv(8, 1, 0), b=nn.BatchNorm2d(8), b2=nn.BatchNorm2d(8))
    module, _ = passed(model, X)
    assert len(weights(module)) == 2
    sites = [site.name for site in annotate(capture(model, X)).sites if site.role == "weight"]
    assert sorted(sites) in (["c.weight", "c.weight@1"], ["p.weight", "p.weight@1"])


def test_the_captured_graph_is_not_changed():
    model = nets.randomize(nets.Residual())
    captured = capture(model, nets.example(model))
    text, tensors = captured.text(), {name: t.clone() for name, t in captured.module.named_buffers()}
    annotate(captured)
    assert captured.text() == text
    assert all(torch.equal(tensors[name], t) for name, t in captured.module.named_buffers())


@pytest.mark.parametrize(
    ("axes", "keep", "count"),
    [
        ((2, 3), True, 1),
        ((-1, -2), False, 1),
        ((3, 2), False, 1),
        ((2,), False, 0),
        ((1, 2, 3), True, 0),
    ],
)
def test_means_over_rows_and_columns_become_pools(axes, keep, count):
    model = Body(lambda m, x: m.c(x).mean(axes, keepdim=keep), c=conv())
    module, counts = passed(model, X)
    assert counts["mean_to_adaptive_avg_pool"] == count
    assert module(X)[0].shape == model.eval()(X).shape


def test_a_mean_with_another_data_type_is_not_decomposed():
    module = copy_graph(capture(Body(lambda m, x: x.mean((2, 3), dtype=torch.float64)).eval(), X).module)
    assert mean_to_adaptive_avg_pool(module) == 0


SPELLED = {
    "select": (lambda m, x: m.c(x)[:, 1] + m.c(x)[:, -2], "decompose_select", 2),
    "select a row": (lambda m, x: m.c(x).select(2, 3), "decompose_select", 1),
    "select an item of the batch": (lambda m, x: m.c(x)[0], "decompose_select", 1),
    "unbind": (lambda m, x: m.c(x).unbind(1)[2] * m.c(x).unbind(1)[0], "decompose_select", 2),
    "stack": (lambda m, x: torch.stack([m.c(x), x[:, :6]], -1), "decompose_stack", 1),
    "repeat": (lambda m, x: m.c(x).repeat(1, 1, 3, 1), "decompose_repeat", 1),
    "repeat one element": (lambda m, x: m.c(x)[:, :, :1].repeat(1, 1, 3, 1), "decompose_repeat", 1),
    "repeat two axes": (lambda m, x: m.c(x).repeat(1, 1, 3, 2), "decompose_repeat", 1),
    "repeat with an axis more": (lambda m, x: m.c(x).repeat(2, 1, 1, 1, 1), "decompose_repeat", 1),
    "expand with an axis more": (lambda m, x: m.c(x).mean(0).expand(3, -1, -1, -1), "decompose_expand", 1),
    "gelu with erf": (lambda m, x: (y := m.c(x)) * 0.5 * (1.0 + torch.erf(y / 2**0.5)), "fuse_gelu", 1),
    "gelu with erf, half last": (lambda m, x: ((y := m.c(x)) * (torch.erf(y * 0.5**0.5) + 1)) * 0.5, "fuse_gelu", 1),
    "erf with another factor": (lambda m, x: (y := m.c(x)) * 0.5 * (1.0 + torch.erf(y / 2)), "fuse_gelu", 0),
    "erf of another value": (lambda m, x: m.c(x) * 0.5 * (1.0 + torch.erf(x[:, :6] / 2**0.5)), "fuse_gelu", 0),
    "roll": (lambda m, x: m.c(x).roll((2, -3), (2, 3)), "decompose_roll", 1),
    "roll by all and by nothing": (lambda m, x: m.c(x).roll((9, 1), (2, 3)), "decompose_roll", 1),
    "roll one axis of two": (lambda m, x: m.c(x).roll((2, 0), (2, 3)), "decompose_roll", 1),
    "roll flattened": (lambda m, x: m.c(x).roll(5), "decompose_roll", 0),
    "roll the batch": (lambda m, x: m.c(x).roll(1, 0), "decompose_roll", 0),
    "constant": (lambda m, x: m.c(x) * torch.tensor(3.0) - torch.tensor([[[2.0]]]), "scalar_constants_to_numbers", 2),
    "constant first": (lambda m, x: torch.tensor(3.0) - torch.tensor(2.0) * m.c(x), "scalar_constants_to_numbers", 2),
    "constant divided": (lambda m, x: torch.tensor(3.0) / m.c(x), "scalar_constants_to_numbers", 0),
    "constant of more axes": (lambda m, x: m.c(x) + torch.ones(1, 1, 1, 1, 1), "scalar_constants_to_numbers", 0),
    "channels": (lambda m, x: m.c(x) * m.channels, "channel_constants_to_affine", 1),
    "channels scaled": (lambda m, x: torch.add(m.channels, m.c(x), alpha=-2), "channel_constants_to_affine", 1),
    "columns": (lambda m, x: torch.sub(m.c(x), m.columns, alpha=2), "channel_constants_to_affine", 1),
    "rows": (lambda m, x: m.c(x) + m.columns[:, None], "channel_constants_to_affine", 0),
    "wider": (lambda m, x: m.c(x)[:, :1] + m.channels, "channel_constants_to_affine", 0),
}


@pytest.mark.parametrize(
    "name",
    slow_params_except(
        "select",
        "select an item of the batch",
        "unbind",
        "stack",
        "repeat two axes",
        "roll",
        "roll flattened",
        "constant first",
        "constant of more axes",
        "channels scaled",
        "rows",
        "wider",
        of=SPELLED,
        reason="the same operators written otherwise",
    ),
)
def test_other_spellings_of_an_operator_are_decomposed(name):
    body, step, count = SPELLED[name]
    constants = {"channels": nn.Parameter(torch.ones(6, 1, 1)), "columns": nn.Parameter(torch.ones(9))}
    _, counts = passed(Body(body, c=conv(), **constants), X)
    assert counts[step] == count


def test_factors_and_offsets_of_a_group_norm_are_one_operator():
    norm = nn.GroupNorm(2, 6)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    graph, _ = passed(Body(lambda m, x: m.norm(m.c(x)), c=conv(), norm=norm), X)
    assert [operator(node) for node in graph.graph.nodes].count("aten.addcmul.default") == 1


def test_factors_and_offsets_of_two_modules_stay_apart():
    """A selector of one module leaves the other one in int8."""
    scaled = Body(lambda m, x: x * m.channels, channels=nn.Parameter(torch.ones(6, 1, 1) + 1))
    shifted = Body(lambda m, x: x + m.channels, channels=nn.Parameter(torch.ones(6, 1, 1) + 2))
    graph, counts = passed(Body(lambda m, x: m.b(m.a(m.c(x))), c=conv(), a=scaled, b=shifted), X)
    assert counts["channel_constants_to_affine"] == 2
    assert [operator(node) for node in graph.graph.nodes].count("aten.addcmul.default") == 2


def test_tensors_of_a_fixed_shape_are_constants():
    """The masks of Swin Transformer are written part by part to a tensor of zeros, which depends on no input."""

    def forward(m, x):
        y = m.c(x)
        mask = y.new_zeros((9, 9))
        mask[:3, 4:] = 1
        mask = mask + torch.arange(9).float() + torch.full_like(mask, 0.5) + torch.eye(9)
        return y + mask.type_as(y)

    graph, _ = passed(Body(forward, c=conv()), X)
    assert [operator(node) for node in graph.graph.nodes if operator(node)] == [
        "aten.conv2d.default",
        "aten.add.Tensor",
    ]


def test_filled_tensors_of_a_free_shape_are_numbers():
    graph, _ = passed(
        Body(lambda m, x: m.c(x) + torch.zeros_like(m.c(x)) + x.new_ones((x.shape[0], 6, 9, 9)), c=conv()), X
    )
    names = [operator(node) for node in graph.graph.nodes if operator(node)]
    assert names == ["aten.conv2d.default", "aten.add.Scalar"]


def test_movement_of_a_number_has_no_batch_that_could_move():
    graph, _ = passed(Body(lambda m, x: m.c(x) * m.c(x).max().reshape(-1, 1, 1, 1).transpose(1, 2), c=conv()), X)
    assert "aten.reshape.default" in [operator(node) for node in graph.graph.nodes]
