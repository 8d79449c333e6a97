"""The integer program that chooses candidates: within its limits, and as good as trying every choice."""

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intaglio.errors import InputError
from intaglio.mixed_precision.assignment_problem import AssignmentProblem, Quantity, pareto

costs = st.floats(0, 10, allow_subnormal=False).map(lambda value: round(value, 3))


@st.composite
def problems(draw):
    """Up to five groups of up to three candidates. Latencies may be negative: a candidate may save time."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    signed = st.floats(-5, 5, allow_subnormal=False).map(lambda value: round(value, 3))
    rows = {
        name: tuple(tuple(draw(signed if name == Quantity.LATENCY else costs) for _ in range(n)) for n in sizes)
        for name in Quantity
    }
    return AssignmentProblem(rows, {Quantity.LATENCY: draw(costs), Quantity.SIZE: draw(costs)})


def every_choice(problem):
    return itertools.product(*(range(len(row)) for row in problem.groups))


def least(problem, minimized, limits):
    """The least of a quantity over all choices within the limits, or nothing."""
    within = [c for c in every_choice(problem) if all(problem.total(q, c) <= most for q, most in limits.items())]
    return min((problem.total(minimized, choice) for choice in within), default=None)


@given(problems(), st.sampled_from(Quantity), st.dictionaries(st.sampled_from(Quantity), st.floats(0, 40), max_size=3))
def test_a_solution_keeps_every_limit_and_no_choice_is_better(problem, minimized, limits):
    found, expected = problem.solve(minimized, limits), least(problem, minimized, limits)
    if found is None:
        tighter = {name: most - 1e-4 for name, most in limits.items()}
        assert expected is None or least(problem, minimized, tighter) is None
        return
    assert all(problem.total(name, found) <= most for name, most in limits.items())
    assert expected is not None
    assert problem.total(minimized, found) <= expected + 1e-3


@given(problems(), st.sampled_from([Quantity.LATENCY, Quantity.SIZE]))
def test_a_front_goes_from_the_cheapest_choice_to_the_most_accurate(problem, minimized):
    front = problem.front(minimized, {})
    errors = [problem.total(Quantity.ERROR, choice) for choice in front]
    assert errors == sorted(errors, reverse=True)
    assert problem.total(minimized, front[0]) <= least(problem, minimized, {}) + 1e-3
    assert errors[-1] == pytest.approx(least(problem, Quantity.ERROR, {}), abs=1e-3)
    for choice, error in zip(front[:-1], errors, strict=False):
        assert problem.total(minimized, choice) <= least(problem, minimized, {Quantity.ERROR: error}) + 1e-3


@given(st.lists(st.tuples(costs, costs), max_size=12))
def test_no_point_of_a_pareto_front_is_beaten(points):
    kept = pareto(points)
    for place, (cost, gain) in enumerate(points):
        beaten = any(points[k][0] <= cost and points[k][1] >= gain for k in kept if k != place)
        assert beaten or place in kept
    assert [points[k][0] for k in kept] == sorted({points[k][0] for k in kept})


def test_a_problem_without_groups_has_the_empty_choice():
    problem = AssignmentProblem(dict.fromkeys(Quantity, ()), {Quantity.SIZE: 2.0})
    assert problem.solve(Quantity.ERROR, {}) == ()
    assert problem.solve(Quantity.ERROR, {Quantity.SIZE: 1.0}) is None


def test_a_missing_solver_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    problem = AssignmentProblem(dict.fromkeys(Quantity, ((1.0, 2.0),)), {})
    with pytest.raises(InputError, match=r"pip install 'intaglio\[search\]'"):
        problem.solve(Quantity.ERROR, {})


@pytest.mark.slow(reason="draws and solves problems; limits of drawn problems are kept above")
@given(st.data())
def test_a_problem_without_candidates_never_chooses_them(data):
    problem = data.draw(problems())
    places = [(g, c) for g, row in enumerate(problem.groups) for c in range(1, len(row))]
    excluded = data.draw(st.sets(st.sampled_from(places))) if places else set()
    reduced = problem.without(excluded)
    front = reduced.front(Quantity.LATENCY, {})
    assert front
    assert not any((place, index) in excluded for choice in front for place, index in enumerate(choice))
    assert all(problem.total(q, choice) == reduced.total(q, choice) for choice in front for q in problem.costs)
