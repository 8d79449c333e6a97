"""How many threads run a stretch: the model of its time, and who asks it."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.ir import Cost, evaluate, symbol
from intaglio.native.cpu import ISA_FLAGS
from intaglio.runtime import Artifact
from intaglio.runtime.calls.threads import MACS_PER_SECOND, SegmentCost, segment_costs, thread_counts
from support import nets
from support.int8_models import assert_same, compiled, picture


@pytest.fixture
def cores(monkeypatch):
    """``cores(n)``: a process that may use so many."""
    return lambda count: monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))


def cost(*seconds: float, units: float = 1000, barriers: int = 0) -> SegmentCost:
    return SegmentCost(np.array(seconds), np.full(len(seconds), units), barriers)


def test_there_is_a_rate_for_every_instruction_set():
    assert list(MACS_PER_SECOND) == list(ISA_FLAGS)


def test_microseconds_are_left_to_one_thread_and_milliseconds_to_all():
    assert cost(3e-6).threads(64) == 1
    assert cost(1e-3, 1e-3).threads(4) == 4


def test_threads_end_where_barriers_begin():
    """More work, or fewer barriers, is worth more threads."""
    few = cost(*[2e-6] * 50, barriers=49).threads(64)
    assert 1 < few < cost(*[20e-6] * 50, barriers=49).threads(64) <= 64
    assert few < cost(100e-6).threads(64)


@pytest.mark.parametrize(("units", "threads"), [(1, 1), (2, 2), (3, 3), (4, 4), (6, 6)])
def test_work_is_not_divided_further_than_it_comes_in_units(units, threads):
    assert cost(1e-3, units=units).threads(8) == threads


def test_work_grows_with_the_free_sizes():
    program = compiled(nets.Residual)[0].artifact.program
    products = [step for step in program.steps if step.cost.macs]
    assert products
    for step in products:
        assert evaluate(step.cost.macs, {"n": 7}) == 7 * evaluate(step.cost.macs, {"n": 1}) > 0
        assert evaluate(step.cost.bytes, {"n": 7}) == 7 * evaluate(step.cost.bytes, {"n": 1})
        assert 1 <= evaluate(step.cost.units, {"n": 1}) <= evaluate(step.cost.units, {"n": 7})
    one, many = (sum(s.time(1) for s in segment_costs(program, {"n": n})) for n in (1, 7))
    assert one < many < 7 * one


def test_an_empty_batch_has_no_work():
    program = compiled(nets.Residual)[0].artifact.program
    assert all(cost.threads(64) == 1 for cost in segment_costs(program, {"n": 0}))


def test_every_segment_has_its_own_number(cores):
    """A step that costs a second in the one, next to nothing in the other."""
    cores(4)
    program = compiled(nets.ConvThenUnsupported)[0].artifact.program
    first, last = program.steps[0].cost.segment, program.steps[-1].cost.segment
    assert first < last
    second = Cost(symbol("n") * 10**12, 1000, 0, 0, first)
    slow = replace(program, steps=(replace(program.steps[0], cost=second), *program.steps))
    found = thread_counts(slow, {"n": 1}, 4)
    assert (found[first], found[last]) == (4, 1)


def test_threads_are_limited_by_what_is_allowed_and_by_cores(cores):
    cores(3)
    program = compiled(nets.Residual)[0].artifact.program
    assert [max(thread_counts(program, {"n": 10**6}, allowed)) for allowed in (1, 2, 3, 64)] == [1, 2, 3, 3]
    cores(1)
    assert set(thread_counts(program, {"n": 10**6}, 64)) == {1}


@pytest.mark.case("backend 34")
def test_calls_use_the_chosen_number_of_threads(monkeypatch, cores, many_threads):
    cores(2)
    monkeypatch.setattr("intaglio.runtime.calls.threads.thread_counts", thread_counts)
    found, run = [], Artifact.run

    def noted(self, frame, segment, threads):
        found.append(threads)
        run(self, frame, segment, threads)

    monkeypatch.setattr(Artifact, "run", noted)
    wide = nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)).eval()
    x = torch.randn(1, 16, 32, 32)
    model = intaglio.quantize(wide, [x], progress=False)
    lowered = compiled(nets.Residual)[1]
    small = stages.compile(lowered)
    many_threads(2)
    two = model(x)
    assert_same(small(picture(1)), lowered(picture(1)))
    many_threads(1)
    assert_same(model(x), two)
    assert found == [2, 1, 1]


def test_threads_that_begin_later_get_longer_work_only():
    assert [replace(cost(2e-4), delay=delay).threads(2) for delay in (0.0, 3e-4)] == [2, 1]
    assert replace(cost(2e-3), delay=3e-4).threads(2) == 2


@pytest.mark.parametrize(("skip", "shared", "threads"), [([], False, 2), (["2"], False, 1), (["2"], True, 2)])
def test_segments_beside_float_layers_share_only_long_work(monkeypatch, cores, skip, shared, threads):
    """PyTorch's threads compete with those of the program, unless it runs in them."""
    cores(2)
    monkeypatch.setattr("intaglio.runtime.program_module.shares_threads", lambda: shared)
    monkeypatch.setattr("intaglio.runtime.calls.threads.thread_counts", thread_counts)
    monkeypatch.setattr("intaglio.runtime.program_module.ISLAND_DELAY_SECONDS", 3600.0)
    net = nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)).eval()
    x = torch.randn(1, 16, 32, 32)
    model = intaglio.quantize(net, [x], skip=skip, progress=False)
    assert max(model._plan_for([x]).thread_counts(2)) == threads
