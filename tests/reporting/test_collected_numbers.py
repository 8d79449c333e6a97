"""Every number of a report is the one that the function for it gives."""

import math

import pytest
import torch

import intaglio
from intaglio import eager
from intaglio.errors import InputError
from intaglio.lower.facts.operator_facts import Precision
from intaglio.reporting.timing import measure_speed
from support import nets, report_models
from support.report_models import Case


@pytest.fixture(scope="module")
def data():
    return report_models.residual_report().data


def test_errors_are_those_of_compare(data):
    case = report_models.residual()
    assert data.comparison == intaglio.compare(case.exact, case.quantized, case.batches)
    rows = {row.node: row for row in data.comparison.rows}
    (graph,) = data.graphs
    assert {one.facts.node: one.row for one in graph.operators} == rows
    assert all(one.name == one.row.name for one in graph.operators)


def test_coverage_is_that_of_the_model(data):
    case = report_models.residual()
    assert data.coverage == case.quantized.coverage
    (graph,) = data.graphs
    assert sum(one.facts.precision == Precision.INT8 for one in graph.operators) == data.coverage.operators_int8


def test_the_time_of_every_step_is_counted_once(data):
    (graph,) = data.graphs
    counted = [index for one in graph.operators for index in one.steps]
    assert len(counted) == len(set(counted))
    others = sum(step.microseconds for step in graph.other_steps)
    times = [time for one in graph.operators if (time := graph.microseconds(one)) is not None]
    assert math.isclose(sum(times) + others, graph.profile.microseconds)
    shares = sum(graph.share(one) or 0 for one in graph.operators)
    assert math.isclose(shares + others / graph.profile.microseconds, 1)


def test_a_step_is_counted_for_the_layer_whose_name_it_has(data):
    (graph,) = data.graphs
    for one in graph.operators:
        for step in graph.steps_of(one):
            if step.macs:
                assert step.name == one.facts.path
                assert graph.of_limit(one) == step.of_limit


def test_operators_of_one_kernel_name_each_other(data):
    (graph,) = data.graphs
    conv = graph.by_name["blocks.0.conv2.0 + blocks.0.conv2.1 (aten.conv2d.default)"]
    assert conv.fused == ("blocks.0 (aten.add.Tensor)", "blocks.0 (aten.relu.default, call 2 of 2)")
    assert conv.counted_with == ""
    for name in conv.fused:
        assert graph.by_name[name].counted_with == conv.name


def test_a_reshape_without_a_copy_takes_no_time(data):
    (graph,) = data.graphs
    (view,) = [one for one in graph.operators if one.is_view]
    assert view.facts.operator == "aten.reshape.default"
    assert graph.microseconds(view) is None


def test_histograms_count_every_value_of_the_samples(data):
    case = report_models.residual()
    (graph,) = data.graphs
    (given,) = [one for one in graph.operators if one.facts.precision == Precision.INPUT]
    assert sum(given.histogram.counts) == sum(batch.numel() for batch in case.batches)
    relu = graph.by_name["stem.2 (aten.relu.default)"]
    with torch.no_grad():
        values = torch.cat([case.exact.stem(batch).flatten() for batch in case.batches])
    assert sum(relu.histogram.counts) == values.numel()
    first = (0 - relu.histogram.start) / relu.histogram.width
    assert relu.histogram.counts[int(first)] >= int((values == 0).sum())


def test_the_range_of_a_site_is_that_of_its_parameters(data):
    (graph,) = data.graphs
    for one in graph.operators:
        if one.site is not None and one.site.range is not None:
            low, high = one.site.range
            assert low <= 0 <= high
            assert math.isclose(high - low, (one.site.qmax - one.site.qmin) * one.site.scale[0])


def test_weights_are_those_of_the_program(data):
    case = report_models.residual()
    (graph,) = data.graphs
    conv = next(one for one in graph.operators if one.facts.path == "blocks.0.conv1.0")
    scales = case.quantized.graph.types["blocks_0_conv1_0_weight"].qparams.scales
    assert conv.weight.scales == scales
    assert len(conv.weight.largest) == len(conv.weight.decibels) == 8
    assert conv.weight.rounding == "gptq"
    assert 20 < conv.weight.all_decibels < 60


def test_changes_are_tried_from_the_errors_of_the_model(data):
    assert data.suggestions
    now = data.comparison.results[0]
    assert all(abs(one.before - now) < 0.2 for one in data.suggestions)  # changes are tried on the reference
    gains = [one.gain for one in data.suggestions]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.slow(reason="quantizes a network for every change; changes are tried above")
def test_leaving_the_bad_layer_in_float_is_the_best_change():
    case = report_models.case_of(report_models.spoiled(), report_models.pictures())
    best = case.report(tries=1, calls=0).data.suggestions[0]
    assert best.python == "skip=['blocks.0.conv1.0']"
    assert best.command == "--skip 'blocks.0.conv1.0'"
    assert best.gain > 3
    pasted = eval(f"intaglio.quantize(case.exact, case.batches, progress=False, {best.python})")
    after = intaglio.compare(case.exact, pasted, case.batches).results[0]
    assert after - best.before > 3


def test_operators_outside_of_int8_have_the_reasons_of_the_coverage():
    case = report_models.islands()
    found = case.report()
    (graph,) = found.data.graphs
    reasons = {(one.facts.path, one.facts.operator): one.facts.reason for one in graph.operators if one.facts.reason}
    expected = {(one.path, one.operator): one.reason for one in case.quantized.coverage.floats}
    assert expected.items() <= reasons.items()
    by_operator = {one.facts.operator: one for one in graph.operators}
    assert by_operator["aten.cumsum.default"].facts.precision == Precision.FLOAT32
    assert by_operator["aten.erf.default"].facts.precision == Precision.PYTORCH
    step = graph.steps_of(by_operator["aten.erf.default"])[0]
    assert step.island


def test_parts_have_the_comparisons_of_the_model():
    case = report_models.parts()
    found = case.report().data
    expected = case.quantized.compare(case.exact, case.batches)
    assert {graph.name: graph.comparison for graph in found.graphs} == expected
    assert all(graph.profile is not None for graph in found.graphs)
    assert found.comparison is None
    assert found.coverage == case.quantized.coverage


@pytest.mark.slow(reason="a report of the other door, which test_explanation.py has, too")
def test_a_define_by_run_model_has_errors_but_no_times():
    case = report_models.define_by_run()
    found = case.report().data
    assert found.comparison == intaglio.compare(case.exact, case.quantized, case.batches)
    assert found.coverage == eager.coverage(case.quantized)
    rows = [one.row for graph in found.graphs for one in graph.operators if one.row is not None]
    assert len(rows) == len(found.comparison.rows)
    assert all(graph.profile is None for graph in found.graphs)
    assert any("Python runs between" in one for one in found.limits)


def test_a_loaded_model_without_data_has_decisions_and_times(tmp_path):
    case = report_models.residual()
    case.quantized.save(tmp_path / "net.int8")
    loaded = intaglio.load(tmp_path / "net.int8")
    found = intaglio.report(None, loaded, calls=2).data
    (graph,) = found.graphs
    assert found.comparison is None
    assert any("need the float model and data" in one for one in found.limits)
    assert [one.facts for one in graph.operators] == [
        one.facts for one in report_models.residual_report().data.graphs[0].operators
    ]
    assert graph.profile is not None


def test_both_models_are_timed_in_alternation(data):
    case, measured = report_models.residual(), data.measured
    assert measured.threads == torch.get_num_threads()
    assert len(measured.int8) == len(measured.float32) > 1
    selectors = [one.selector for one in measured.operators]
    assert selectors
    again = measure_speed.measure_speed(case.exact, case.quantized, ((case.batches[0],), {}), most_calls=1)
    assert [one.selector for one in again.operators] == selectors


@pytest.mark.parametrize("made", [report_models.parts, report_models.define_by_run], ids=lambda made: made.__name__)
def test_whole_calls_of_models_with_python_code_are_timed_beside_float(made):
    measured = made().report().data.measured
    assert measured.speedup > 0
    assert measured.operators == ()
    assert "Python runs between" in measured.limits[0]


@pytest.mark.slow(reason="quantizes and times a residual network again")
def test_operators_are_timed_with_the_dynamic_sizes_of_the_model():
    case = report_models.case_of(nets.randomize(nets.Residual()), report_models.pictures(), dynamic_shapes={"x": None})
    assert case.report().data.measured.operators


def test_a_float_model_without_data_is_timed_with_random_numbers():
    case = report_models.residual()
    assert intaglio.report(case.exact, case.quantized, calls=1).data.measured is not None
    parts = report_models.parts()
    found = intaglio.report(parts.exact, parts.quantized, calls=1).data
    assert found.measured is None
    assert "the float model was not timed: that needs data" in found.limits


def test_nothing_is_timed_without_the_float_model_or_with_no_calls():
    case = report_models.residual()
    assert intaglio.report(None, case.quantized, calls=1).data.measured is None
    assert case.report(calls=0).data.measured is None


@pytest.mark.slow(reason="quantizes a model with a buffer to report on it")
def test_a_report_leaves_the_model_as_it_was():
    model = nets.randomize(nets.Body(lambda m, x: m.c(x + m.count.add_(1)), c=torch.nn.Conv2d(3, 3, 1)))
    model.register_buffer("count", torch.zeros(1))
    case = Case(model, intaglio.quantize(model, report_models.pictures(), progress=False), report_models.pictures())
    before = {name: tensor.clone() for name, tensor in case.quantized.named_buffers()}
    case.report()
    assert all(torch.equal(tensor, before[name]) for name, tensor in case.quantized.named_buffers())


@pytest.mark.slow(reason="quantizes a residual network once more")
def test_the_run_can_be_repeated(data):
    run = data.run
    case = report_models.residual()
    assert run.samples == sum(map(len, case.batches))
    again = intaglio.quantize(case.exact, case.batches, recipe=intaglio.Recipe.from_toml(run.recipe), progress=False)
    other = Case(case.exact, again, case.batches).report(calls=0).data.run
    assert (other.data, other.weights, other.parameters) == (run.data, run.weights, run.parameters)
    moved = Case(case.exact, case.quantized, report_models.pictures(1)).report(calls=0).data.run
    assert moved.data != run.data
    assert moved.weights == run.weights


def test_arguments_that_make_no_report_are_errors_whose_remedies_work():
    case = report_models.residual()
    with pytest.raises(InputError, match="a report is about a quantized model, got a Residual") as raised:
        intaglio.report(case.exact, case.exact, case.batches)
    assert "pass what quantize, load or eager.convert returns" in str(raised.value)
    with pytest.raises(InputError, match="leave samples out"):
        case.report(samples=0)
    with pytest.raises(InputError, match="pass 0 to measure no times"):
        case.report(calls=-1)
    with pytest.raises(InputError, match="must be 0 to 100000"):
        case.report(calls=2**70)
    with pytest.raises(InputError, match="pass 0 to try no changes"):
        case.report(tries=-1)
    assert case.report(calls=0, tries=0).data.graphs[0].profile is None
