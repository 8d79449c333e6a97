"""Predicted times of a call with more threads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intaglio.errors import InputError
from intaglio.runtime.reports.profile import Profile, ProfiledStep
from support import nets
from support.int8_models import compiled, picture


def step(microseconds: float, units: int = 1, group: int = 0, island: bool = False) -> ProfiledStep:
    return ProfiledStep("a", "conv2d", "", microseconds, 0, units=units, barrier_group=group, island=island)


def profile(*parts: ProfiledStep, call: float = 0.0, threads: int = 1, weights: int = 0) -> Profile:
    return Profile(parts, threads, call, None, "avx2", weights)


def test_the_slowest_thread_has_the_remaining_units_and_barriers_grow_with_threads():
    found = profile(step(70.0, 7), step(20.0, 2, 1), step(5.0, 1, 1), call=100.0).scaling(4, barrier_us=1.0)
    assert [row.microseconds for row in found.rows] == pytest.approx(
        [
            70 + 20 + 5 + 5,
            40 + 10 + 5 + 5 + 1,
            30 + 10 + 5 + 5 + 1.04,
            20 + 10 + 5 + 5 + 1.08,
        ]
    )
    assert found[2].uneven == pytest.approx(40 + 10 + 5 - 95 / 2)
    assert found[4].speedup == pytest.approx(100 / 41.08)
    assert found.fastest is found[4]


def test_weights_are_read_once_at_the_rate_of_the_memory_and_islands_are_not_divided():
    parts = profile(step(100.0, 100), step(10.0, 100, island=True), weights=3_000_000)
    assert parts.scaling(10)[10].microseconds == pytest.approx(10 + 10)
    assert parts.scaling(10, memory_gb_per_second=100)[10].microseconds == pytest.approx(30)
    assert parts.scaling(10, memory_gb_per_second=100)[1].memory == 0


@given(
    steps=st.lists(st.tuples(st.floats(0.01, 1e3), st.integers(1, 100), st.integers(0, 9)), min_size=1, max_size=9),
    barrier=st.floats(0, 10),
    threads=st.integers(2, 16),
)
def test_the_time_of_a_barrier_explains_the_call_it_was_taken_from(steps, barrier, threads):
    one = profile(*(step(*values) for values in steps))
    predicted = one.scaling(threads, barrier_us=barrier)[threads].microseconds
    found = one.barrier_us_of(profile(*one.parts, call=predicted, threads=threads))
    assert one.scaling(threads, barrier_us=found)[threads].microseconds == pytest.approx(predicted, abs=1.0)
    assert one.scaling(threads, barrier_us=0.0)[threads].speedup <= threads + 1e-9


def test_it_is_predicted_for_a_model_and_printed(monkeypatch):
    model, before = compiled(nets.Residual)[0], torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = model.profile(picture(4), calls=2)
    finally:
        torch.set_num_threads(before)
    assert [part.units for part in one.parts] != [1] * len(one.parts)
    assert one.weight_bytes == model.artifact.program.constants.nbytes
    found = one.scaling(16, barrier_us=0.5, memory_gb_per_second=40)
    text = str(found).splitlines()
    assert text[0] == "predicted from one thread: 0.50 us for a barrier of two threads, memory 40 GB/s"
    assert [int(line.split()[0]) for line in text[2:]] == sorted({1, 2, 4, 8, 16, found.fastest.threads})
    assert repr(found).startswith("Scaling(1 to 16 threads, fastest ")
    assert found._repr_html_().count("<tr>") == len(text) - 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda one, two: two.scaling(), "of a call on 2 threads; predictions begin with one thread"),
        (lambda one, two: two.barrier_us_of(two), "predictions begin with one thread"),
        (lambda one, two: one.barrier_us_of(one), "both profiles are of calls on one thread"),
        (lambda one, two: one.scaling(0), "most = 0; it must be at least 1"),
        (lambda one, two: one.scaling(barrier_us=-1.0), "barrier_us = -1.0; it must be at least 0"),
        (lambda one, two: one.scaling(memory_gb_per_second=0), "memory_gb_per_second = 0; it must be positive"),
    ],
)
def test_arguments_that_cannot_be_used_are_errors(call, said):
    one, two = profile(step(1.0)), profile(step(1.0), threads=2)
    with pytest.raises(InputError, match=said):
        call(one, two)


def test_a_number_of_threads_without_a_row_is_an_error():
    with pytest.raises(KeyError, match="5 threads; there are rows for 1 to 4"):
        profile(step(1.0)).scaling(4)[5]
