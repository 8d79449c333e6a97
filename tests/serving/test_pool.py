"""`Pool`: results, order, errors and threads of calls side by side."""

import itertools
import os
import threading

import pytest
import torch
from torch import nn

import intaglio
from intaglio.errors import InputError
from support import nets
from support.int8_models import compiled, picture


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_results_are_those_of_the_model_in_order(streams):
    model, _ = compiled(nets.Residual)
    calls = [picture(batch, seed=batch) for batch in (1, 3, 2, 1, 4, 2, 5)]
    expected = [model(call) for call in calls]
    with intaglio.Pool(model, streams=streams) as pool:
        for found, wanted in zip(pool.map(calls), expected, strict=True):
            assert torch.equal(found, wanted)


class TwoInputs(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left - 2 * right


def test_a_call_is_a_tuple_a_mapping_or_the_only_argument():
    a, b = torch.ones(2), torch.full((2,), 3.0)
    with intaglio.Pool(TwoInputs(), streams=2) as pool:
        assert pool.submit((a, b)).result().tolist() == [-5, -5]
        assert pool.submit({"right": a, "left": b}).result().tolist() == [1, 1]
    with intaglio.Pool(nn.ReLU(), streams=1) as pool:
        assert pool.submit(-a).result().tolist() == [0, 0]


class Meeting(nn.Module):
    """Returns only when ``count`` calls run at the same time."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.barrier = threading.Barrier(count, timeout=60)

    def forward(self, x: torch.Tensor) -> int:
        self.barrier.wait()
        return torch.get_num_threads()


def test_streams_run_at_the_same_time_with_their_own_number_of_threads():
    before = torch.get_num_threads()
    with intaglio.Pool(Meeting(4), streams=4, threads=3) as pool:
        assert list(pool.map([torch.zeros(1)] * 8)) == [3] * 8
    assert torch.get_num_threads() == before
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [before]


def test_the_cores_are_divided_among_streams(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    pairs = {(None, None): (8, 1), (2, None): (2, 4), (None, 4): (2, 4), (3, 2): (3, 2), (16, None): (16, 1)}
    for (streams, threads), expected in pairs.items():
        with intaglio.Pool(nn.ReLU(), streams=streams, threads=threads) as pool:
            assert (pool.streams, pool.threads) == expected
            assert repr(pool) == f"Pool(ReLU, streams={expected[0]}, threads={expected[1]})"


@pytest.mark.parametrize(("name", "value"), [("streams", 0), ("threads", 0), ("streams", -1)])
def test_numbers_below_one_are_refused(name, value):
    with pytest.raises(InputError, match=f"{name}={value}, but a pool needs at least 1"):
        intaglio.Pool(nn.ReLU(), **{name: value})
    intaglio.Pool(nn.ReLU(), **{name: 1}).close()


def test_calls_are_read_as_streams_become_free():
    taken = []

    def endless():
        for number in itertools.count():
            taken.append(number)
            yield torch.tensor([float(number)])

    with intaglio.Pool(nn.Identity(), streams=2) as pool:
        results = pool.map(endless())
        assert [next(results).item() for _ in range(10)] == list(range(10))
        assert len(taken) <= 10 + 2 * 2 + 1
        results.close()


class Refusing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.item() == 3:
            raise ValueError("three")
        return x


def test_an_error_is_raised_in_the_place_of_its_result():
    with intaglio.Pool(Refusing(), streams=2) as pool:
        results = pool.map(torch.tensor([float(n)]) for n in range(8))
        assert [next(results).item() for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="three"):
            next(results)
        assert pool.submit(torch.zeros(1)).result() == 0


def test_fastest_measures_each_division_of_the_cores(monkeypatch):
    model, _ = compiled(nets.ConvBnRelu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    pool = intaglio.Pool.fastest(model, picture(), seconds=0.02)
    best, *others = pool.measured
    assert (pool.streams, pool.threads) == (best.streams, best.threads)
    assert {(one.streams, one.threads) for one in pool.measured} == {(1, 4), (2, 2), (4, 1)}
    assert best.calls_per_second >= max(one.calls_per_second for one in others)
    assert str(best).startswith(f"{best.streams} x {best.threads} threads: ")
    pool.close()
    slow = intaglio.Pool.fastest(model, picture(), latency_ms=1e-9, seconds=0.02)
    assert slow.measured[0].latency_ms == min(one.latency_ms for one in slow.measured)
    slow.close()


@pytest.mark.parametrize("times", [{"latency_ms": 0.0}, {"seconds": -1.0}, {"latency_ms": float("nan")}])
def test_times_that_are_not_positive_are_refused(times):
    with pytest.raises(InputError, match="but a time is positive"):
        intaglio.Pool.fastest(nn.ReLU(), torch.zeros(1), **times)
    intaglio.Pool.fastest(nn.ReLU(), torch.zeros(1), **{"seconds": 0.01, **dict.fromkeys(times, 0.01)}).close()
