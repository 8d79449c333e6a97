"""The difference that each changed group makes to the time of a program, from the times of steps."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intaglio.mixed_precision import group_latencies
from intaglio.mixed_precision.group_latencies import differences, program_times, time_by_group
from intaglio.mixed_precision.precision_groups import OperatorGroup


def group(*paths: str) -> OperatorGroup:
    return OperatorGroup(paths[0], frozenset(paths), paths[:1], frozenset(paths))


GROUPS = [group("stem", "stem.relu"), group("body"), group("head")]


def test_steps_count_for_the_group_of_their_module():
    paths = ("", "stem", "stem.relu", "", "body", "head", "")
    assert time_by_group(paths, (1, 2, 4, 8, 16, 32, 64), GROUPS) == [15, 16, 96]


def test_a_module_that_is_called_twice_counts_in_order():
    groups = [group("a"), group("relu"), group("b"), group("relu")]
    assert time_by_group(("a", "relu", "b", "relu"), (1, 2, 4, 8), groups) == [1, 2, 4, 8]


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=12), st.data())
def test_differences_add_up_to_that_of_the_program(times, data):
    before, after = ([pair[side] for pair in times] for side in (0, 1))
    changed = sorted(data.draw(st.sets(st.integers(0, len(times) - 1), min_size=1)))
    found = differences(changed, before, after)
    assert len(found) == len(changed)
    assert math.fsum(found) == pytest.approx(math.fsum(after) - math.fsum(before), abs=1e-9)


def test_a_conversion_beside_a_changed_group_counts_for_it():
    before, after = [1, 1, 1, 1, 1, 1], [1, 5, 1, 1, 2, 7]
    assert differences([1, 4], before, after) == [4, 7]


def test_the_median_of_blocks_counts_and_not_the_least_call(monkeypatch):
    """Blocks whose calls compete with threads of PyTorch are the usual ones."""

    def alternate(runs):
        assert [*runs] == ["call 0", "call 1", "steps 0", "steps 1"]
        blocks = {"call": {"": [1e3, 9e3, 9e3]}, "steps": {"0": [1e3, 7e3, 7e3], "1": [2e3, 2e3, 2e3]}}
        return {name: blocks[name.split()[0]] for name in runs}

    monkeypatch.setattr(group_latencies, "alternate", alternate)
    found = program_times([None, None], ((), {}), with_steps=True)
    assert [(one.call_ms, one.steps_ms) for one in found] == [(9, (7, 2))] * 2
