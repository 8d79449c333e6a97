"""Callbacks of patterns build what replaces a match, which is then quantized like the rest of the model."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import intaglio
from intaglio import stages
from intaglio.errors import UnsupportedError
from intaglio.patterns import OpDef, QuantizerPattern, Roles, builtin, const, op, wildcard
from support import nets
from support.lowering import sqnr
from support.nets import Body
from support.slow_params import slow_params_except

DATA = [torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def quick_gelu(m, x):
    y = m.a(x)
    z = m.b(y * torch.sigmoid(1.702 * y))
    return m.c(z * torch.sigmoid(1.702 * z))


def net(body=quick_gelu):
    return nets.randomize(Body(body, a=nn.Linear(6, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 3)))


QUICK = op("mul", wildcard("y"), op("sigmoid", op("aten.mul.Scalar", wildcard("y"))))
FOLDED = op("linear", op("linear", wildcard("x"), const("w"), const("v")), const("u"), const("t"))


def to_gelu(pre, post, node_map):
    return post.call("aten.gelu.default", node_map["y"])


def fold_linears(pre, post, node_map):
    w, v, u, t = (post.value(node_map[name]) for name in "wvut")
    weight, bias = post.constant("weight", u @ w), post.constant("bias", u @ v + t)
    return post.call("aten.linear.default", node_map["x"], weight, bias)


def narrow(pre, post, node_map):
    return post.call("aten.linear.default", node_map["y"], post.constant("weight", torch.ones(3, 8)))


def stages_of(model, quantizer, inputs=DATA[0], **options):
    prepared = stages.prepare(stages.capture(model, inputs, **options), quantizer)
    ranges = stages.calibrate(prepared, DATA)
    reference = stages.convert(prepared, ranges)
    lowered = stages.requantize(reference)
    return prepared, reference, lowered, stages.compile(lowered)


def with_rewrite(rewrite, pattern=QUICK, **fields):
    return stages.Quantizer(patterns=[*builtin(), QuantizerPattern("mine", pattern, rewrite=rewrite, **fields)])


def targets(prepared):
    return [str(node.target) for node in prepared.annotations.module.graph.nodes if node.op == "call_function"]


def test_two_matches_are_replaced_and_run_in_int8(tmp_path):
    prepared, reference, lowered, model = stages_of(net(), with_rewrite(to_gelu))
    assert targets(prepared).count("aten.gelu.default") == 2
    assert "aten.sigmoid.default" not in targets(prepared)
    assert model.coverage.islands == 0
    assert torch.equal(model(DATA[1]), lowered(DATA[1]))
    torch.testing.assert_close(model(DATA[1]), reference(DATA[1]))  # the reference computes in float
    model.save(tmp_path / "model.intaglio")
    assert torch.equal(intaglio.load(tmp_path / "model.intaglio")(DATA[1]), model(DATA[1]))


def test_layers_are_folded_into_one_with_new_constants():
    float_model = net(lambda m, x: m.c(F.relu(m.b(m.a(x)))))
    prepared, reference, lowered, model = stages_of(float_model, with_rewrite(fold_linears, FOLDED))
    assert targets(prepared).count("aten.linear.default") == 2
    assert {site.name for site in prepared.annotations.sites if site.role == "weight"} == {"b.weight_2", "c.weight"}
    assert torch.equal(model(DATA[1]), lowered(DATA[1]))
    torch.testing.assert_close(model(DATA[1]), reference(DATA[1]))  # the reference computes in float
    assert F.mse_loss(model(DATA[1]), float_model(DATA[1])) < 0.01 * float_model(DATA[1]).var()


def test_a_pattern_alone_quantizes_what_replaces_its_matches():
    pattern = QuantizerPattern("mine", FOLDED, rewrite=fold_linears)
    captured = stages.capture(net(lambda m, x: torch.tan(m.b(m.a(x)))), DATA[0])
    found = stages.annotate(captured, stages.Quantizer(patterns=[pattern]))
    assert [(region.name, region.pattern.name) for region in found.regions] == [("linear", "mine")]


def test_matches_that_read_each_other_are_replaced():
    def twice(m, x):
        y = m.a(x)
        z = y * torch.sigmoid(1.702 * y)
        return m.c(z * torch.sigmoid(1.702 * z))

    prepared, _, lowered, model = stages_of(net(twice), with_rewrite(to_gelu))
    assert targets(prepared) == ["aten.linear.default", *["aten.gelu.default"] * 2, "aten.linear.default"]
    assert torch.equal(model(DATA[1]), lowered(DATA[1]))


def test_an_operator_of_the_pattern_describes_only_matches_that_were_kept():
    def first_only(pre, post, node_map):
        return to_gelu(pre, post, node_map) if node_map["y"].name == "linear" else None

    record = OpDef(
        "own_gelu", operands=("y",), roles=Roles(x=(0,)), function=lambda y, attrs: y / (1 + np.exp(-1.7 * y))
    )
    prepared, _, lowered, model = stages_of(net(), with_rewrite(first_only, operator=record))
    assert targets(prepared).count("aten.gelu.default") == targets(prepared).count("aten.sigmoid.default") == 1
    assert torch.equal(model(DATA[1]), lowered(DATA[1]))


def test_parameters_apply_again_with_the_same_callback():
    quantizer = with_rewrite(to_gelu)
    prepared, _, _, model = stages_of(net(), quantizer)
    again = stages.prepare(stages.capture(net(), DATA[0]), quantizer)
    assert [site.name for site in again.annotations.sites] == [site.name for site in prepared.annotations.sites]
    lowered = stages.requantize(stages.convert(again, stages.calibrate(prepared, DATA)))
    assert torch.equal(stages.compile(lowered)(DATA[1]), model(DATA[1]))


def test_dynamic_sizes_stay_dynamic():
    dims = (({0: torch.export.Dim("batch", min=2, max=16)},),)
    _, _, lowered, model = stages_of(net(), with_rewrite(to_gelu), dynamic_shapes=dims)
    longer = torch.cat(DATA)
    assert torch.equal(model(longer), lowered(longer))


def test_none_keeps_the_match():
    def keep(pre, post, node_map):
        post.call("aten.gelu.default", node_map["y"])

    prepared, *_ = stages_of(net(), with_rewrite(keep))
    assert targets(prepared).count("aten.sigmoid.default") == 2
    assert "aten.gelu.default" not in targets(prepared)


@pytest.mark.parametrize(
    ("rewrite", "problem"),
    [
        (narrow, r"f32\[\w+, 3\], but .* f32\[\w+, 8\]"),
        (lambda pre, post, names: post.call("aten.erfinv.default", names["y"]), "no shape rule for dynamic sizes"),
        (lambda pre, post, names: 1 / 0, "its callback raised ZeroDivisionError"),
        (lambda pre, post, names: names["z"], "its callback raised KeyError"),
        (lambda pre, post, names: post.call("aten.gone.default", names["y"]), "its callback raised AttributeError"),
        (lambda pre, post, names: post.call("aten.relu_.default", names["y"]), "changes its operands"),
        (lambda pre, post, names: post.call("aten.max.dim", names["y"], 1), "does not return one tensor"),
        (lambda pre, post, names: post.value(names["y"]), "computed while the model runs"),
        (lambda pre, post, names: pre[0], "a node of the match itself"),
        (lambda pre, post, names: next(iter(pre[-1].users)), "linear_1, which is computed after the match"),
        (
            lambda pre, post, names: post.call("aten.relu.default", next(iter(pre[-1].users))),
            "reads linear_1, which is",
        ),
        (lambda pre, post, names: 3, "returned int, not a node"),
    ],
)
def test_errors_name_pattern_and_module(rewrite, problem):
    with pytest.raises(UnsupportedError, match=rf"^model \(aten.mul.Tensor\): pattern 'mine': .*{problem}"):
        stages.annotate(stages.capture(net(), DATA[0]), with_rewrite(rewrite))


def test_training_refuses_callbacks():
    with pytest.raises(UnsupportedError, match="pattern 'mine': quantization-aware training cannot train"):
        stages.prepare_qat(stages.capture(net().train(), DATA[0], train=True), with_rewrite(to_gelu))


QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"
PER_CHANNEL = "quantized_decomposed.dequantize_per_channel.default"
LINEAR = op("linear", wildcard("x"), const("w"), const("b"))


def rounded(post, value, scale):
    how = (scale, 128, 0, 255, torch.uint8)
    return post.call(DEQUANTIZE, post.call(QUANTIZE, value, *how), *how)


def quantized_linear(pre, post, node_map):
    """Build a linear layer with scales of its own: 0.05 for its operand, and one per channel of its weight."""
    weight = post.value(node_map["w"])
    scales = weight.abs().amax(1) / 127
    integers = post.constant("integers", torch.round(weight / scales[:, None]).to(torch.int8))
    zeros = post.constant("zeros", torch.zeros(len(scales), dtype=torch.int64))
    weight = post.call(PER_CHANNEL, integers, post.constant("scales", scales), zeros, 0, -127, 127, torch.int8)
    return post.call("aten.linear.default", rounded(post, node_map["x"], 0.05), weight, node_map["b"])


def quantized_relu(pre, post, node_map):
    return rounded(post, post.call("aten.relu.default", rounded(post, node_map["x"], 0.05)), 0.05)


def relu_net():
    return net(lambda m, x: m.c(torch.relu(m.b(torch.relu(m.a(x))))))


REWRITES = {
    "linear": (quantized_linear, LINEAR),
    "relu": (quantized_relu, op("aten.relu.default", wildcard("x"))),
}
OPTIONS = {"free batch": {}, "fixed batch": {"dynamic_shapes": {}}}
OTHERS = {"alone": [], "beside built-in patterns": builtin()}


@pytest.mark.parametrize(
    "case",
    slow_params_except(
        *[(rewrite, *pair) for rewrite in REWRITES for pair in zip(OPTIONS, OTHERS, strict=True)],
        of=itertools.product(REWRITES, OPTIONS, OTHERS),
        reason="each rewrite runs with both options and both sets of patterns",
    ),
    ids="-".join,
)
def test_a_match_may_become_quantized_operators(case, tmp_path):
    (rewrite, pattern), options, others = REWRITES[case[0]], OPTIONS[case[1]], OTHERS[case[2]]
    quantizer = stages.Quantizer(patterns=[*others, QuantizerPattern("mine", pattern, rewrite=rewrite)])
    model, data = relu_net(), DATA[0]
    _, reference, lowered, int8 = stages_of(model, quantizer, **options)
    assert "scale=0.05, zp=128" in int8.text("integer")
    assert torch.equal(int8(data), lowered(data))
    torch.testing.assert_close(int8(data), reference(data))
    assert sqnr(int8(data), model(data)) > 20
    if others or rewrite is quantized_linear:
        assert int8.coverage.operators_int8 == int8.coverage.operators_total == 5
        assert int8.coverage.macs_int8 == int8.coverage.macs_total
        assert int8.coverage.islands == 0
    assert any(f"mine x {3 if rewrite is quantized_linear else 2}" in note for note in int8.coverage.notes)
    int8.save(tmp_path / "model.intaglio")
    assert torch.equal(intaglio.load(tmp_path / "model.intaglio")(data), int8(data))


def test_one_quantized_match_leaves_the_others_to_calibration():
    def rewrite(pre, post, node_map):
        return quantized_linear(pre, post, node_map) if post.value(node_map["w"]).shape == (3, 8) else None

    _, _, lowered, int8 = stages_of(relu_net(), with_rewrite(rewrite, LINEAR))
    assert int8.coverage.operators_int8 == int8.coverage.operators_total == 5
    assert torch.equal(int8(DATA[0]), lowered(DATA[0]))
    assert int8.coverage.notes[-1].startswith("patterns: anchor_clamp x 2, mine x 1")
