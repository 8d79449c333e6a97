"""Which layer loses the accuracy, and that the answer can be trusted."""

import functools
import io
import json
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.utils.data import DataLoader, TensorDataset

import intaglio
from intaglio import stages
from intaglio.annotation import X86Quantizer, get_symmetric_quantization_config
from intaglio.errors import InputError
from intaglio.tune.comparison import Comparison
from intaglio.tune.op_error import ErrorSums
from intaglio.tune.verdict import ResultTotals, verdict
from support import nets
from support.int8_models import compiled
from support.lowering import captured_net, lowered, quantized, sqnr
from support.nets import Body
from support.recipes import UNCORRECTED
from support.slow_params import slow_params

X = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def spoiled() -> nn.Module:
    """A residual network whose first feature is always zero, and has weights in `blocks.0.conv1` so large that all
    others vanish in their scale: harmless in float."""
    model = nets.randomize(nets.Residual())
    with torch.no_grad():
        model.stem[1].weight[0], model.stem[1].bias[0] = 0, -1
        model.blocks[0].conv1[0].weight[:, 0] = 300
    return model


@pytest.mark.case("problem 10", "problem 38", "frontends B12")
def test_a_bad_layer_is_found_as_the_worst():
    """Problems 10 and 38, frontends B12: by module path, operator and line."""
    model = spoiled()
    reference, _ = quantized(model, X)
    worst = intaglio.compare(model, reference, [X]).worst
    assert worst.path == "blocks.0.conv1.0"
    assert "nets.py" in worst.source
    good = nets.randomize(nets.Residual())
    report = intaglio.compare(good, quantized(good, X)[0], [X])
    assert report.worst.alone > worst.alone + 10


@functools.cache
def compared_with_automatic_sizes() -> Comparison:
    model = nets.randomize(nets.Residual())
    return intaglio.compare(model, intaglio.quantize(model, [X], recipe=UNCORRECTED, progress=False), [X])


@pytest.mark.slow(reason="quantizes a residual network for each choice of sizes")
@pytest.mark.parametrize(
    "free",
    [
        *slow_params(
            {0: "n", 2: "h", 3: "w"}, reason="all sizes at once; without dynamic sizes the graph differs as much"
        ),
        *slow_params({0: "n", 2: "h"}, {2: "h"}, reason="some of the sizes that are all dynamic above"),
        {},
    ],
    ids=str,
)
def test_operators_are_compared_whatever_sizes_are_dynamic(free):
    """The float model was captured with the automatic choice of sizes, so its graph was another one."""
    model, shapes = nets.randomize(nets.Residual()), {axis: Dim(name, min=8) for axis, name in free.items()}
    int8 = intaglio.quantize(model, [X], recipe=UNCORRECTED, dynamic_shapes=(shapes,), progress=False)
    assert intaglio.compare(model, int8, [X]).rows == compared_with_automatic_sizes().rows


@pytest.mark.slow(reason="quantizes the network once more; selectors of rows are tested below")
@pytest.mark.case("problem 36")
def test_the_path_of_the_worst_layer_is_valid_for_skip():
    """Problem 36: what the report names, a recipe takes; the loss is gone."""
    model = spoiled()
    captured = stages.capture(model, X)
    reference, _ = lowered(captured, X)
    worst = intaglio.compare(captured, reference, [X]).worst
    better, _ = lowered(captured, X, recipe=intaglio.Recipe().with_selection(skip=worst.path))
    assert sqnr(better(X), model(X)) > sqnr(reference(X), model(X)) + 3
    assert worst.path not in intaglio.compare(captured, better, [X]).worst.path


@pytest.mark.case("problem 11")
def test_operands_of_very_different_ranges_in_one_concatenation_are_named():
    """Problem 11: detection heads put boxes and scores side by side; the scores' producer has the loss."""

    def body(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return m.last(torch.cat([1000 * m.boxes(x), m.scores(x)], 1))

    parts = {"boxes": nn.Conv2d(3, 4, 1), "scores": nn.Conv2d(3, 4, 1), "last": nn.Conv2d(8, 4, 1)}
    model = nets.randomize(Body(body, **parts))
    reference, _ = quantized(model, X)
    assert intaglio.compare(model, reference, [X]).worst.path == "scores"


@pytest.mark.case("frontends B12")
def test_the_own_error_is_zero_where_nothing_is_rounded():
    """Frontends B12: an operator of its own accord loses nothing if the recipe leaves it in float."""
    model, captured = captured_net(nets.Linears)
    x = nets.example(model, 16)
    reference, _ = lowered(captured, x, recipe=intaglio.Recipe().with_selection(skip="2"))
    rows = {row.path: row for row in intaglio.compare(captured, reference, [x]).rows if "linear" in row.operator}
    assert rows["2"].alone == math.inf
    assert rows["2"].so_far < 60
    assert 20 < rows["0"].alone < math.inf


@pytest.mark.case("frontends B12")
def test_the_accumulated_error_of_the_last_operator_is_that_of_the_result():
    """Frontends B12: the same number by two ways."""
    model, captured = captured_net(nets.Linears)
    x = nets.example(model, 16)
    reference, _ = lowered(captured, x)
    report = intaglio.compare(captured, reference, [x[:10], x[10:]])
    (last,) = [row for row in report.rows if row.path == "2"]
    assert last.so_far == pytest.approx(report.results[0])
    assert report.results[0] == pytest.approx(sqnr(reference(x), model(x)), abs=1e-3)


@pytest.mark.slow(reason="compares a residual network three times")
@pytest.mark.case("frontends B12")
def test_rows_of_a_comparison_have_stable_names():
    """Frontends B12: node, site and path do not depend on the run, the data or the stage the float side comes from."""
    model, captured = captured_net(nets.Residual)
    keys = set()
    for seed in (0, 1):
        x = nets.example(model, 4, seed=seed)
        prepared = stages.prepare(captured)
        reference = stages.convert(prepared, stages.calibrate(prepared, [x]))
        for exact in (captured, prepared, model):
            rows = intaglio.compare(exact, reference, [x]).rows
            keys.add(tuple(sorted((row.node, row.site, row.path, row.operator) for row in rows)))
    (rows,) = keys
    assert len({node for node, *_ in rows}) == len(rows)
    assert set(reference.qparams) >= {site for _, site, *_ in rows if site}


@pytest.mark.case("frontends B12")
def test_a_reference_of_another_model_is_refused_by_operator_and_shape():
    """Frontends B12: a shape mismatch names the operator."""
    wide, narrow = nets.randomize(nets.Linears((16, 32, 10))), nets.randomize(nets.Linears((16, 24, 10)))
    reference, _ = quantized(wide, torch.randn(4, 16))
    with pytest.raises(InputError) as raised:
        intaglio.compare(narrow, reference, [torch.randn(4, 16)])
    assert str(raised.value).startswith(
        "0 (aten.linear.default): the reference has a result of type f32[n, 32] here, "
        "the float model has aten.linear.default f32[n, 24]"
    )


@pytest.mark.case("problem 17")
def test_both_sides_see_the_same_batches_whatever_the_loader_does():
    """Problem 17: data is read once, so that shuffling cannot compare one image with another."""
    model, captured = captured_net(nets.ConvBnRelu)
    reference, _ = lowered(captured, nets.example(model, 8))
    loader = DataLoader(TensorDataset(nets.example(model, 8), torch.arange(8)), batch_size=4, shuffle=True)
    once = (batch for batch in [nets.example(model, 8)])
    shuffled, plain = (intaglio.compare(model, reference, data) for data in (loader, once))
    assert shuffled.samples == plain.samples == 8
    assert shuffled.results == pytest.approx(plain.results, abs=1e-3)
    assert plain.results[0] > 30


@pytest.mark.case("problem 38")
def test_the_comparison_table_begins_with_the_result_and_the_worst_operator():
    """Problem 38."""
    model, captured = captured_net(nets.Residual)
    x = nets.example(model, 4)
    report = intaglio.compare(model, lowered(captured, x)[0], [x], samples=2)
    first, heading, *lines = str(report).splitlines()
    lines = lines[: len(report.listed)]
    assert first == f"result: {report.results[0]:.1f} dB over 4 samples"
    assert heading.split() == ["alone", "so", "far", "clipped", "in", "use", "operator"]
    alone = [math.inf if "exact" in line[:10] else float(line.split()[0]) for line in lines]
    assert alone == sorted(alone)
    assert report.worst.path in lines[0]


@pytest.mark.case("problem 38")
@pytest.mark.parametrize("saved", [*slow_params(False, reason="a loaded model is compared in the same way"), True])
def test_an_int8_model_is_compared_operator_by_operator(saved, tmp_path):
    """Problem 38: from the float model and the parameters that the int8 model keeps, in memory or in a file."""
    exact = nets.randomize(nets.Residual())
    captured = stages.capture(exact, X)
    reference, graph = lowered(captured, X, recipe=intaglio.Recipe.of({"blocks.1": {"weights_dtype": "s4"}}))
    model = stages.compile(graph)
    if saved:
        model.save(tmp_path / "model.intaglio", library=False)
        model = intaglio.load(tmp_path / "model.intaglio")
    ours, theirs = (intaglio.compare(captured, other, [X]) for other in (model, reference))
    assert ours.rows == theirs.rows
    assert ours.results == pytest.approx(theirs.results, abs=0.1)
    assert intaglio.compare(exact, model, [X]).worst == ours.worst


@pytest.mark.case("problem 38")
def test_programs_with_other_constants_are_compared_by_results():
    """Problem 38: rows of a reference that is not the model's would mislead; the report says what to give instead."""
    model, _ = compiled(nets.Residual)
    other = nets.randomize(nets.Residual(), seed=9)
    report = intaglio.compare(other, model, [X])
    assert "compare(model, reference, data)" in str(report)
    with pytest.raises(InputError, match="no operator was compared"):
        _ = report.worst


def test_a_row_has_the_range_use_of_its_site():
    """Calibration 16: an outlier that the range cuts off, a range that is far too wide."""
    model, captured = captured_net(nets.Linears)
    x = nets.example(model, 16)
    prepared = stages.prepare(captured)
    made = stages.convert(prepared, stages.calibrate(prepared, [x]))
    name = next(site.name for site in prepared.annotations.sites if site.role == "activation")
    q = made.qparams[name]
    rows = {}
    for factor in (0.25, 1, 8):
        zero = 128
        parameters = made.parameters.changed(name, scale=q.step * factor, zero_point=zero)
        report = intaglio.compare(captured, stages.convert(prepared, parameters), [x])
        rows[factor] = next(row for row in report.rows if row.site == name)
    assert rows[1].low == x.min().item()
    assert rows[1].high == x.max().item()
    assert rows[0.25].use.below > 0.1
    assert rows[0.25].use.above > 0.1
    expected = ((x / (q.step * 0.25)).round() > 127).double().mean().item()
    assert rows[0.25].use.above == pytest.approx(expected, abs=0.02)
    assert rows[8].use.below == rows[8].use.above == 0
    assert rows[8].use.levels < 0.3 < rows[1].use.levels
    assert rows[0.25].alone < rows[8].alone < rows[1].alone
    assert rows[0.25].alone_cosine < rows[1].alone_cosine < 1


@pytest.mark.case("problem 36")
def test_selectors_of_a_comparison_are_valid_for_skip():
    """Problem 36: the worst first, each selector once, none for what loses nothing."""
    model = spoiled()
    captured = stages.capture(model, X)
    report = intaglio.compare(captured, lowered(captured, X)[0], [X])
    assert report.skip_list(1) == ["blocks.0.conv1.0"]
    assert report.exclude(db=report.worst.alone + 1e-3) == ["blocks.0.conv1.0"]
    assert report.exclude(db=-1000) == []
    everything = report.skip_list(100)
    assert len(set(everything)) == len(everything)
    better, _ = lowered(captured, X, recipe=intaglio.Recipe().with_selection(skip=report.skip_list(2)))
    assert intaglio.compare(captured, better, [X]).results[0] > report.results[0] + 3


def test_a_comparison_is_text_a_table_and_json():
    from rich.console import Console

    model, captured = captured_net(nets.Residual)
    report = intaglio.compare(model, lowered(captured, nets.example(model, 4))[0], [nets.example(model, 4)])
    console = Console(file=io.StringIO(), width=200)
    console.print(report)
    text = console.file.getvalue()
    assert all(name in text for name in ("cosine", "values", "clipped", "verdict:", report.worst.path))
    held = json.loads(report.to_json())
    assert held["rows"][0]["alone"] == report.worst.alone
    assert held["rows"][-1]["alone"] is None
    assert {"name", "site", "low", "high", "use", "skip", "so_far_cosine"} <= held["rows"][0].keys()


@pytest.mark.case("problem 13")
def test_a_float_minimum_used_as_a_mask_shows_in_the_report():
    """Problem 13: numbers as large as float32 has give finite parameters; the report has a row for what they spoil."""

    def body(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = m.c(x)
        return m.d(F.relu(y.masked_fill(y > 1.5, torch.finfo(torch.float32).min)))

    model = nets.randomize(Body(body, c=nn.Conv2d(3, 4, 3), d=nn.Conv2d(4, 2, 1)))
    reference, _ = quantized(model, X)
    assert all(0 < scale < math.inf for q in reference.qparams.values() for scale in q.scales)
    assert torch.isfinite(reference(X)).all()
    assert intaglio.compare(model, reference, [X]).rows


# -- names of rows ----------------------------------------------------------------------------------------------------


class NormFirst(nn.Module):
    """A batch norm that no layer absorbs, because it feeds a ReLU, one that is folded, and a ReLU called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.second = nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.relu, self.fc = nn.ReLU(), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.second(self.conv(self.relu(self.first(x)))))
        return self.fc(x.mean((2, 3)))


def names_of(model: nn.Module, x: torch.Tensor, equalize: bool = False) -> list[str]:
    prepared = stages.prepare(stages.capture(model, x))
    prepared = stages.equalize(prepared, [x]) if equalize else prepared
    reference = stages.convert(prepared, stages.calibrate(prepared, [x]))
    return [row.name for row in intaglio.compare(model, reference, [x]).rows]


@pytest.mark.parametrize("equalize", [False, True])
def test_rows_are_named_after_modules_of_the_user_each_in_its_own_way(equalize):
    names = names_of(nets.randomize(NormFirst()), X, equalize)
    assert len(set(names)) == len(names)
    assert not [name for name in names if "addcmul" in name]
    assert "conv + second (aten.conv2d.default)" in names
    assert {"relu (aten.relu.default, call 1 of 2)", "relu (aten.relu.default, call 2 of 2)"} <= set(names)
    assert [name for name in names if name.startswith("first (")]
    assert "model (aten.adaptive_avg_pool2d.default, part of aten.mean.dim)" in names


def test_an_input_that_equalization_scales_has_one_row():
    names = names_of(nets.randomize(nets.ConvBnRelu()), nets.example(nets.ConvBnRelu(), 8), equalize=True)
    assert len([name for name in names if "(input" in name]) == 1
    assert not [name for name in names if "addcmul" in name]


def test_what_to_skip_names_the_rows_it_stands_for():
    model, captured = captured_net(nets.Residual)
    x = nets.example(model, 4)
    report = intaglio.compare(model, lowered(captured, x)[0], [x])
    for selector in report.skip_list(100):
        stands_for = report.skipped_by(selector)
        assert stands_for
        assert {row.skip for row in stands_for} == {selector}
    selector = report.skip_list(1)[0]
    line = report.advice(1)[0]
    assert line == f"skip={selector!r} leaves in float: {', '.join(r.name for r in report.skipped_by(selector))}"
    assert line in str(report)


# -- verdict ----------------------------------------------------------------------------------------------------------


def test_a_classifier_is_judged_by_the_classes_it_names():
    model = nets.randomize(nets.Linears())
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(3))
    reference, _ = quantized(model, x)
    report = intaglio.compare(model, reference, [x[:30], x[30:]])
    same = (reference(x).argmax(1) == model(x).argmax(1)).double().mean().item()
    assert report.agreement == pytest.approx(same)
    assert report.verdict.startswith(f"{100 * same:.1f} % of 40 samples have the same top-1 class")
    assert f"SQNR {report.results[0]:.1f} dB" in report.verdict
    assert str(report).splitlines()[-1] == f"verdict: {report.verdict}"


@pytest.mark.parametrize(
    "last",
    [
        lambda m, x: F.normalize(m.layer(x), dim=1),
        lambda m, x: torch.tanh(m.layer(x)),
        lambda m, x: m.layer(x)[:, :1],
        lambda m, x: m.layer(x).unflatten(1, (2, 4)),
    ],
)
def test_any_other_result_is_judged_by_cosine_similarity(last):
    model = nets.randomize(Body(last, layer=nn.Linear(16, 8)))
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(3))
    reference, _ = quantized(model, x)
    report = intaglio.compare(model, reference, [x[:5], x[5:]])
    assert report.agreement is None
    exact, found = model(x).flatten(1).double(), reference(x).flatten(1).double()
    assert report.cosine == pytest.approx(F.cosine_similarity(exact, found).mean().item())
    assert report.verdict.startswith(f"the cosine similarity of int8 and float results is {report.cosine:.5f}")


@pytest.mark.parametrize("behind", [lambda y: y.softmax(1), lambda y: y.log_softmax(1), lambda y: y.reshape(-1, 8)])
def test_probabilities_are_classes_too(behind):
    model = nets.randomize(Body(lambda m, x: behind(m.layer(x)), layer=nn.Linear(16, 8)))
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(3))
    assert intaglio.compare(model, quantized(model, x)[0], [x]).agreement is not None


@pytest.mark.parametrize(
    ("agreement", "cosine", "said"),
    [
        (1.0, 1.0, "is that of the float model"),
        (0.995, 1.0, "at most 0.5 percentage points, usually by much less"),
        (0.96, 1.0, "at most 4.0 percentage points, usually by less"),
        (0.8, 1.0, "usually visible"),
        (None, 0.9999, "hardly change"),
        (None, 0.995, "small changes"),
        (None, 0.9, "visible loss"),
    ],
)
def test_a_verdict_says_what_its_number_usually_means(agreement, cosine, said):
    assert said in verdict(agreement, cosine, 30.0, 200)


def heads(m: nn.Module, x: torch.Tensor, attention: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Four of them: (batch, heads, length, dim)."""
    q, k, v = (layer(x).view(*x.shape[:2], 4, -1).transpose(1, 2) for layer in (m.q, m.k, m.v))
    return m.o(attention(q, k, v).transpose(1, 2).flatten(2))


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / 2, -1) @ v


QUANTIZERS = {
    "annotated": X86Quantizer().set_global(get_symmetric_quantization_config()),
    "by patterns": stages.Quantizer(patterns=["linear"]),
    "as integers": stages.Quantizer(outputs="int8"),
    "by the recipe": stages.Quantizer(),
}


@pytest.mark.parametrize("attention", [F.scaled_dot_product_attention, written_out])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_attention_with_four_axes_is_compared_by_operator_in_every_setting(name, attention):
    """Annotators see attention as it is written; so is the float graph that a reference is held against."""
    layers = {layer: nn.Linear(16, 16) for layer in "qkvo"}
    model = nets.randomize(Body(lambda m, x: heads(m, x, attention), **layers))
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
    prepared = stages.prepare(stages.capture(model, x), QUANTIZERS[name])
    report = intaglio.compare(model, stages.convert(prepared, stages.calibrate(prepared, [x])), [x])
    assert {"q", "k", "v", "o"} <= {row.path for row in report.rows}
    assert 20 < report.results[0] < math.inf


@torch.no_grad()
def test_the_projections_of_attention_are_named_and_exact_operators_are_not_listed():
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    body = Body(lambda m, x: m.attention(x, x, x, need_weights=False)[0], attention=model).eval()
    x = torch.randn(4, 5, 8)
    captured = stages.capture(body, x)
    report = intaglio.compare(captured, lowered(captured, x)[0], [x])
    found = {row.detail for row in report.rows if row.operator == "aten.linear.default"}
    assert found == {"query", "key", "value", "output projection"}
    assert f"not listed: {len(report.rows) - len(report.listed)} exact operators" in str(report)
    assert len(report.listed) < len(report.rows)
    assert not any(line.lstrip().startswith("exact") for line in str(report).splitlines())


def test_elements_that_a_mask_sets_to_infinity_are_left_out_of_errors():
    sums = ErrorSums()
    exact = torch.tensor([1.0, -math.inf, 2.0])
    sums.add("x", exact, exact)
    assert sums.decibels("x") == math.inf
    sums.add("x", exact, torch.tensor([1.0, -math.inf, 2.1]))
    assert math.isfinite(sums.decibels("x"))


def test_results_that_are_classes_in_some_calls_only_have_no_agreement():
    outcome = ResultTotals()
    outcome.add(torch.eye(4), torch.eye(4), logits=True)
    assert outcome.agreement == 1
    outcome.add(torch.ones(4, 1), torch.ones(4, 1), logits=False)
    assert outcome.agreement is None


def test_a_comparison_without_operators_has_no_skip_list():
    with pytest.raises(InputError, match=r"no operator was compared\n  remedy: compare"):
        Comparison((), (20.0,), 4).skip_list(2)


def test_the_reference_of_a_smoothed_model_is_made_again_in_the_order_of_the_graph():
    """A file sorts sites by name: that of the model's own operators, which run last, comes first."""

    def forward(m, x):
        return m.c(m.b(m.n(m.a(x))) / 2.0)

    parts = {"a": nn.Linear(16, 16), "n": nn.LayerNorm(16), "b": nn.Linear(16, 16), "c": nn.Linear(16, 4)}
    model = nets.randomize(Body(forward, **parts)).eval()
    data = [torch.randn(32, 16) * torch.linspace(0.1, 8, 16) for _ in range(4)]
    int8 = intaglio.quantize(model, data)
    assert intaglio.compare(model, int8, data).rows
