"""`quantize(measure=...)` times int8 beside float, names operators that lose, and leaves them in float if asked."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import intaglio
from intaglio.errors import InputError
from intaglio.reporting.timing import measure_speed
from intaglio.runtime.reports.speed import MeasuredSpeed, OperatorSpeed, is_slower
from support import report_models
from support.report_models import Branching


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Time one call for each of two blocks: these tests are not about the times."""
    monkeypatch.setattr(measure_speed, "BLOCK_SECONDS", 0.0)
    monkeypatch.setattr(measure_speed, "TIMED_BLOCKS", 2)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.second(self.first(x).relu())


def quantized(measure: bool | str) -> intaglio.QuantizedModel:
    torch.manual_seed(0)
    return intaglio.quantize(Layers().eval(), report_models.vectors(), measure=measure, progress=False)


def test_calls_and_operators_of_both_models_are_timed():
    found = quantized(measure=True).measured
    assert found.threads == torch.get_num_threads()
    assert len(found.int8) == len(found.float32) == 2
    assert [one.selector for one in found.operators] == ["first", "second"]
    assert all(len(one.int8) == len(one.float32) == 2 for one in found.operators)
    assert all(time > 0 for one in found.operators for time in (*one.int8, *one.float32))
    assert found.limits == ()
    assert f"{found.threads} thread" in str(found)


def test_nothing_is_measured_unless_asked():
    assert quantized(measure=False).measured is None


def test_a_model_is_not_changed_by_the_measurement():
    plain, measured = quantized(measure=False), quantized(measure=True)
    batch = report_models.vectors()[0]
    assert torch.equal(plain(batch), measured(batch))


def test_data_that_is_read_once_is_enough():
    batches = iter(report_models.vectors())
    assert intaglio.quantize(Layers().eval(), batches, measure=True, progress=False).measured is not None


@pytest.mark.slow(reason="quantizes and times a model in parts")
def test_of_a_model_in_parts_whole_calls_are_timed():
    model = intaglio.quantize(Branching().eval(), report_models.vectors(), measure=True, progress=False)
    assert isinstance(model, intaglio.PartlyQuantizedModel)
    assert len(model.measured.int8) == 2
    assert model.measured.operators == ()
    assert "Python runs between the programs" in model.measured.limits[0]


def test_another_value_of_measure_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="allowed are True, False and 'keep_faster'") as refused:
        quantized(measure="keep_fastest")
    assert "keep_faster" in refused.value.remedy


@pytest.mark.parametrize(
    ("own", "other", "slower"),
    [
        ((2, 2, 2, 2), (1, 1, 1, 1), True),
        ((2, 2, 2, 0.5), (1, 1, 1, 1), True),
        ((2, 2, 0.5, 0.5), (1, 1, 1, 1), False),
        ((1, 1, 1, 1), (1, 1, 1, 1), False),
        ((1, 1, 1, 1), (2, 2, 2, 2), False),
    ],
)
def test_slower_is_what_loses_three_of_four_blocks(own, other, slower):
    assert is_slower(own, other) is slower


def with_losing(monkeypatch, faster_without: bool) -> None:
    """Let every measurement say that `first` loses in int8, and the model with it in float is faster or not."""
    measured = measure_speed.measure_speed

    def losing(*arguments):
        slow = OperatorSpeed("first", "first", (3.0, 3.0), (1.0, 1.0))
        return replace(measured(*arguments), operators=(slow,))

    times = {"all": {"": [5.0, 5.0]}, "left": {"": [4.0, 4.0] if faster_without else [6.0, 6.0]}}
    alternate = measure_speed.alternate
    monkeypatch.setattr(measure_speed, "measure_speed", losing)
    monkeypatch.setattr(
        measure_speed, "alternate", lambda runs, *most: times if "left" in runs else alternate(runs, *most)
    )


def test_an_operator_that_loses_is_left_in_float_if_the_model_is_faster_so(monkeypatch):
    with_losing(monkeypatch, faster_without=True)
    model = quantized(measure="keep_faster")
    assert model.measured.left_in_float == ("first",)
    assert model.measured.before == (5.0, 5.0)
    assert model.coverage.operators_int8 == quantized(measure=False).coverage.operators_int8 - 2
    assert "left in float, where the model is faster (5.0 us before): first" in str(model.measured)


def test_an_operator_that_loses_stays_in_int8_if_the_model_is_not_faster_without(monkeypatch):
    with_losing(monkeypatch, faster_without=False)
    model = quantized(measure="keep_faster")
    assert model.measured.left_in_float == ()
    assert model.coverage.macs == 1
    assert "with first in float a call takes 6.0 us instead of 5.0 us, so they stay in int8" in str(model.measured)


def test_measuring_alone_leaves_nothing_in_float(monkeypatch):
    with_losing(monkeypatch, faster_without=True)
    model = quantized(measure=True)
    assert model.coverage.macs == 1
    assert "slower in int8: first: 3.0 us in int8, 1.0 us in float" in str(model.measured)


def test_times_that_do_not_differ_clearly_are_called_noise():
    assert "the difference may be noise" in str(MeasuredSpeed(1, (1.0, 3.0), (2.0, 2.0)))
    assert "int8 is slower: it takes 2.00 times as long" in str(MeasuredSpeed(1, (4.0, 4.0), (2.0, 2.0)))


@pytest.mark.parametrize("copies", [False, True])
def test_calls_get_copies_only_where_asked(copies):
    x, seen = torch.ones(2), []
    measure_speed.whole_call(lambda x: seen.append(x), (x,), {}, copies=copies)()
    assert (seen[0] is not x) == copies
    assert torch.equal(seen[0], x)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, count):
        count.add_(1)
        return self.layer(x) + count


def test_a_model_that_writes_into_its_inputs_does_not_change_those_that_are_measured():
    count, x = torch.zeros(1), torch.randn(3, 4)
    found = intaglio.quantize(Counter().eval(), [(x, count)], progress=False)
    count.zero_()
    measure_speed.measure_speed(Counter().eval(), found, ((x, count), {}), most_calls=1)
    assert count.item() == 0
