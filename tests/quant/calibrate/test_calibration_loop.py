"""Data in every form, the calibration loop, and what goes wrong with data."""

import json
import logging
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from intaglio.errors import ArtifactError, CalibrationError, InputError
from intaglio.quant.calibrate.batches import Binder, binder_for, peek
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.qdq.convert import convert
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.tracing import capture
from support import nets
from support.lowering import captured_net
from support.nets import Body

MODEL, CAPTURED = captured_net(nets.MaxPoolNet)
X = nets.example(MODEL, 12, seed=4)
LABELS = torch.arange(12)


def fresh():
    return prepare(CAPTURED)


def reference_json() -> str:
    return calibrate(fresh(), [X[:4], X[4:8], X[8:]]).to_json()


FORMS = {
    "tuples": lambda: [(X[:4],), (X[4:8],), (X[8:],)],
    "a generator": lambda: (X[i : i + 4] for i in (0, 4, 8)),
    "(image, label) pairs": lambda: [(X[i : i + 4], LABELS[i : i + 4]) for i in (0, 4, 8)],
    "((image,), label) pairs": lambda: [((X[i : i + 4],), LABELS[i : i + 4]) for i in (0, 4, 8)],
    "lists": lambda: [[X[i : i + 4]] for i in (0, 4, 8)],
    "dictionaries with labels": lambda: [{"x": X[i : i + 4], "label": LABELS[i : i + 4]} for i in (0, 4, 8)],
    "({...}, label) pairs": lambda: [({"x": X[i : i + 4]}, 0) for i in (0, 4, 8)],
    "a loader of images": lambda: DataLoader(TensorDataset(X), batch_size=4),
    "a loader with labels": lambda: DataLoader(TensorDataset(X, LABELS), batch_size=4),
}


@pytest.mark.case("problem 6")
@pytest.mark.parametrize("form", FORMS)
def test_data_in_any_form_gives_the_same_ranges(form):
    assert calibrate(fresh(), FORMS[form]()).to_json() == reference_json()


def test_a_function_may_run_the_model():
    ranges = calibrate(fresh(), lambda run: [run(X[i : i + 4]) for i in (0, 4, 8)])
    assert ranges.statistics == Ranges.from_json(reference_json()).statistics


@pytest.mark.case("calibration 25")
def test_one_tensor_is_one_batch_and_ragged_batches_do_not_matter():
    whole = calibrate(fresh(), X)
    assert (whole.batches, whole.samples) == (1, 12)
    assert whole.statistics["#0/input.x"] == calibrate(fresh(), [X[:7], X[7:]]).statistics["#0/input.x"]


def test_samples_stop_the_loop_and_more_than_there_are_is_fine():
    endless = iter(lambda: X[:4], None)
    assert calibrate(fresh(), endless, samples=10).samples == 12
    assert calibrate(fresh(), [X], samples=1000).samples == 12


def test_calibrating_again_adds_to_what_was_seen():
    prepared = fresh()
    calibrate(prepared, [X[:4]])
    second = calibrate(prepared, [X[4:]])
    assert second.samples == 8
    seen = {name: observer.statistics for name, observer in prepared.observers.items()}
    assert seen["#0/input.x"] == calibrate(fresh(), [X]).statistics["#0/input.x"]


def test_preparing_collects_no_statistics():
    """Frontend A6."""
    assert all(observer.statistics.count == 0 for observer in fresh().observers.values())


def test_a_prepared_model_is_the_float_model():
    torch.testing.assert_close(fresh()(X), MODEL(X), rtol=1e-4, atol=1e-5)


@pytest.mark.case("calibration 10", "problem 18")
@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([], "no batch: the iterable is empty"),
        (iter(()), "read to its end before"),
        (7, "expected an iterable of batches, got int"),
        (torch.nn.Identity(), "expected an iterable of batches, got Identity"),
        (["text"], "a batch is of type str"),
        ([{"y": X}], r"a batch has keys \['y'\]; forward takes \['x'\]"),
        ([X[:0], X[:0]], "2 batches without a single sample"),
        ([X, X[:, :2]], r"batch 1, input 'x': its shape is \[12, 2, 13, 13\]; the model takes \[n, 3, 13, 13\]"),
        ([X.double()], "batch 0, input 'x': its data type is torch.float64"),
        ([X.numpy()], "a batch is of type ndarray"),
        ([(LABELS, X)], "batch 0, input 'x': its data type is torch.int64"),
        ([None], "a batch is of type NoneType"),
    ],
)
def test_data_that_cannot_be_used_is_named_and_changes_nothing(data, problem):
    prepared = fresh()
    with pytest.raises(CalibrationError, match=problem):
        calibrate(prepared, data)
    assert all(observer.statistics.count == 0 for observer in prepared.observers.values())


@pytest.mark.case("calibration 10")
def test_a_generator_that_was_read_is_noticed():
    generator = (x for x in [X])
    calibrate(fresh(), generator)
    with pytest.raises(CalibrationError, match="a generator can be read only once"):
        calibrate(fresh(), generator)


@pytest.mark.case("calibration 8")
def test_an_empty_batch_among_others_counts_nothing():
    assert calibrate(fresh(), [X[:0], X]).statistics == calibrate(fresh(), [X]).statistics


@pytest.mark.case("frontends A19", "calibration 12", "calibration 13", "problem 13")
@pytest.mark.parametrize(
    ("poison", "problem"),
    [
        (float("nan"), "2 NaN and 0 infinite values among 6084"),
        (float("inf"), "0 NaN and 2 infinite values"),
        (-float("inf"), "0 NaN and 2 infinite values"),
    ],
)
def test_nan_and_infinities_name_site_batch_and_count(poison, problem):
    bad = X.clone()
    bad[3, 1, 2, 3:5] = poison
    prepared = fresh()
    calibrate(prepared, [X[:2]])
    before = {name: observer.statistics for name, observer in prepared.observers.items()}
    with pytest.raises(CalibrationError, match=f"batch 1, #0/input.x: {problem}") as error:
        calibrate(prepared, [X, bad])
    assert error.value.remedy.startswith("remove samples with such values from the data")
    assert {name: observer.statistics for name, observer in prepared.observers.items()} == before


@pytest.mark.case("frontends A19")
def test_good_data_after_bad_equals_a_fresh_run():
    prepared = fresh()
    with pytest.raises(CalibrationError, match="6084 NaN"):
        calibrate(prepared, [X, X * float("nan")])
    calibrate(prepared, [X])
    other = fresh()
    calibrate(other, [X])
    assert convert(prepared).text() == convert(other).text()


def test_nan_made_inside_the_model_is_named_by_the_operator_that_reads_it():
    model = nets.randomize(Body(lambda m, x: m.b(torch.log(m.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 3)))
    prepared = prepare(capture(model, torch.randn(2, 4)))
    with pytest.raises(CalibrationError, match=r"batch 0, #0/log.0 \(aten.log.default\)") as error:
        calibrate(prepared, [torch.randn(8, 4)])
    assert "in forward" in error.value.source


@pytest.mark.case("calibration 42")
def test_an_exception_in_the_data_restores_the_statistics():
    def broken():
        yield X
        raise OSError("disk")

    prepared = fresh()
    with pytest.raises(OSError, match="disk"):
        calibrate(prepared, broken())
    assert all(observer.statistics.count == 0 for observer in prepared.observers.values())


@pytest.mark.case("frontends A19", "calibration 9")
@pytest.mark.parametrize("given", [None, "empty"])
def test_converting_without_calibration_lists_the_sites(given):
    prepared = fresh()
    ranges = None if given is None else Ranges({name: o.statistics for name, o in prepared.observers.items()})
    with pytest.raises(CalibrationError, match=r"#0/input\.x, .*sites have seen no data") as error:
        convert(prepared, ranges)
    assert "calibrate(prepared, data)" in error.value.remedy


@pytest.mark.case("calibration 47")
def test_ranges_survive_json_and_refuse_another_model(tmp_path):
    prepared = fresh()
    ranges = calibrate(prepared, [X])
    ranges.save(tmp_path / "ranges.json")
    loaded = Ranges.load(tmp_path / "ranges.json")
    assert loaded == ranges
    assert convert(fresh(), loaded).text() == convert(prepared).text()
    other = prepare(capture(nets.randomize(nets.Linears()), torch.zeros(2, 16)))
    with pytest.raises(CalibrationError, match="they belong to another model: "):
        convert(other, loaded)
    for text in ("", "[]", "{}", '{"version": 99}', ranges.to_json().replace('"count": ', '"count": 1')):
        with pytest.raises(ArtifactError, match="ranges: "):
            Ranges.from_json(text)


@pytest.mark.case("calibration 27")
@pytest.mark.parametrize("field", ["batches", "samples"])
@pytest.mark.parametrize("value", [[1], "1", 1.5, True, -1, None])
def test_files_of_ranges_with_malformed_counts_are_refused(field, value):
    text = json.dumps({**json.loads(Ranges({}).to_json()), field: value})
    with pytest.raises(ArtifactError, match=re.escape(f"{value!r} is not a count")):
        Ranges.from_json(text)


def test_ranges_of_parts_merge_to_those_of_the_whole():
    a, b = calibrate(fresh(), [X[:5]]), calibrate(fresh(), [X[5:]])
    assert a.merge(b).to_json() == b.merge(a).to_json()
    assert a.merge(b).samples == 12
    assert a.merge(b).statistics["#0/input.x"] == calibrate(fresh(), [X]).statistics["#0/input.x"]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, left, right, scale=None):
        return self.a(left) + self.a(right)


A, B = torch.randn(2, 5, 4).unbind(0)


@pytest.mark.case("problem 6")
@pytest.mark.parametrize(
    "item",
    [
        (A, B),
        [A, B],
        (A, B, LABELS),
        ((A, B), LABELS),
        {"left": A, "right": B},
        {"right": B, "left": A, "label": LABELS},
        ({"right": B, "left": A}, LABELS),
    ],
)
def test_items_of_a_data_set_fit_a_model_of_two_inputs(item):
    prepared = prepare(capture(nets.randomize(Two()), (A, B)))
    statistics = calibrate(prepared, [item]).statistics
    assert statistics["#0/input.left"].low == A.min().item()
    assert statistics["#0/input.right"].low == B.min().item()


def test_items_of_a_data_set_fit_a_dictionary_or_list_argument():
    from_dict = nets.randomize(Body(lambda m, batch: m.a(batch["p"]), a=nn.Linear(4, 3)))
    prepared = prepare(capture(from_dict, ({"p": A},)))
    for item in ({"p": A}, ({"p": A},), ({"p": A}, LABELS)):
        assert calibrate(prepared, [item]).samples >= 1
    from_list = nets.randomize(Body(lambda m, batch: m.a(batch[0]), a=nn.Linear(4, 3)))
    prepared = prepare(capture(from_list, ([A],)))
    for item in (([A],), ([A], LABELS)):
        assert calibrate(prepared, [item]).samples >= 1


def test_ignored_batch_elements_are_logged_once(caplog):
    with caplog.at_level(logging.INFO, "intaglio"):
        calibrate(fresh(), [(X, LABELS), (X, LABELS)])
    assert [record.message for record in caplog.records if record.name == "intaglio"] == [
        "the first 1 of 2 elements of a batch go to forward; left out: element 1"
    ]


@pytest.mark.case("problem 29")
def test_the_first_batch_can_be_peeked_without_being_lost():
    first, items = peek(DataLoader(TensorDataset(X, LABELS), batch_size=4))
    args, kwargs = binder_for(MODEL)(first)
    assert torch.equal(args[0], X[:4])
    assert not kwargs
    assert len(list(items)) == 3
    assert isinstance(binder_for(Two()), Binder)
    assert len(binder_for(Two())((A, B, LABELS))[0]) == 2


def test_a_call_that_does_not_fit_is_an_input_error_and_counts_nothing():
    prepared = fresh()
    with pytest.raises(InputError, match=r"input 'x': its shape is"):
        prepared(X[:, :2])
    assert all(observer.statistics.count == 0 for observer in prepared.observers.values())


@pytest.mark.case("calibration 3")
def test_an_expert_without_calibration_data_is_handled():
    """Fed zeros: finite parameters. Fed nothing: an error that names it; skipped, it stays in float."""
    parts = {"c": nn.Conv2d(3, 4, 3), "expert": nn.Conv2d(4, 4, 1), "last": nn.Conv2d(4, 2, 1)}
    x = torch.randn(4, 3, 8, 8)
    zeros = nets.randomize(nets.Body(lambda m, x: m.last(m.c(x)) + m.last(m.expert(m.c(x) * 0)), **parts))
    prepared = prepare(capture(zeros, x))
    reference = convert(prepared, calibrate(prepared, [x]))
    assert all(0 < scale < float("inf") for q in reference.qparams.values() for scale in q.scales)
    assert torch.isfinite(reference(x)).all()
    empty = nets.randomize(nets.Body(lambda m, x: (m.last(m.c(x)), m.expert(m.c(x)[:0])), **parts))
    prepared = prepare(capture(empty, x))
    with pytest.raises(CalibrationError, match=r"slice|expert"):
        convert(prepared, calibrate(prepared, [x]))
    skipping = Quantizer(Recipe().with_selection(skip=["expert"]))
    prepared = prepare(capture(empty, x), skipping)
    assert torch.isfinite(convert(prepared, calibrate(prepared, [x]))(x)[0]).all()
