"""Measured latencies: of whole programs, and of the change that each candidate of a group makes."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from intaglio.mixed_precision.precision_groups import OperatorGroup
from intaglio.reporting.timing.measure_speed import CALL, Timer, alternate, updates_inputs, whole_call
from intaglio.runtime import QuantizedModel

TimedCall = tuple[tuple[Any, ...], Mapping[str, Any]]
INTERLEAVED = 3
"""Number of programs for a candidate. Neighbouring groups change in different programs, so that the steps between them
that convert values are counted for the group that needs them."""
STEP_SCALES = (0.25, 2.0)
"""Smallest and largest factor between the times of steps alone and in a whole call."""


@dataclass(frozen=True)
class ProgramTimes:
    """Times of a program: medians of the medians of blocks of calls.

    Attributes:
        call_ms: milliseconds of a call.
        steps_ms: milliseconds of each step while steps are timed; empty if they are not.
    """

    call_ms: float
    steps_ms: tuple[float, ...] = ()


def program_times(
    programs: Sequence[QuantizedModel], call: TimedCall, *, with_steps: bool = False
) -> list[ProgramTimes]:
    """Return the times of programs, measured in blocks of calls that alternate, so that a slow moment of the machine
    affects all of them.

    A block repeats calls of one program, as an application does. Threads of PyTorch that still spin behind the float
    islands of one call then take time from the next call, which the least time of single calls would not show.

    Args:
        programs: the programs.
        call: arguments of a call.
        with_steps: whether to time steps too.
    """
    args, kwargs = call
    runs = {
        f"call {place}": whole_call(program, args, kwargs, copies=updates_inputs(program))
        for place, program in enumerate(programs)
    }
    if with_steps:
        runs |= {f"steps {place}": _step_timer(program, call) for place, program in enumerate(programs)}
    medians = {
        name: {key: median(blocks) / 1e3 for key, blocks in found.items()} for name, found in alternate(runs).items()
    }
    return [
        ProgramTimes(medians[f"call {place}"][CALL], tuple(medians.get(f"steps {place}", {}).values()))
        for place in range(len(programs))
    ]


def _step_timer(program: QuantizedModel, call: TimedCall) -> Timer:
    """Return a timer of the steps of a program, by their index."""
    args, kwargs = call

    def timed() -> Mapping[str, float]:
        with torch.no_grad():
            return {str(index): taken / 1e3 for index, taken in enumerate(program.step_times(*args, **kwargs))}

    return timed


def time_by_group(paths: Sequence[str], times: Sequence[float], groups: Sequence[OperatorGroup]) -> list[float]:
    """Return the time of the steps of each group. Steps in between count for the group before them.

    Args:
        paths: path of the module of every step, in execution order.
        times: time of every step.
        groups: the groups in execution order.
    """
    places: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        for path in group.paths:
            places.setdefault(path, []).append(index)
    total, current = [0.0] * len(groups), 0
    for path, taken in zip(paths, times, strict=True):
        listed = places.get(path, ())
        following = bisect.bisect_left(listed, current)
        if following < len(listed):
            current = listed[following]
        total[current] += taken
    return total


def differences(changed: Sequence[int], before: Sequence[float], after: Sequence[float]) -> list[float]:
    """Return the difference that each changed group makes, those of its neighbours up to the middle of the way to the
    next changed group included.

    Args:
        changed: indices of the changed groups, ascending.
        before: time of every group without the changes.
        after: time of every group with them.
    """
    middles = [(one + other) // 2 + 1 for one, other in itertools.pairwise(changed)]
    bounds = [0, *middles, len(before)]
    return [math.fsum(after[low:high]) - math.fsum(before[low:high]) for low, high in itertools.pairwise(bounds)]


def measured_differences(
    base: QuantizedModel,
    changed: QuantizedModel,
    call: TimedCall,
    groups: Sequence[OperatorGroup],
    indices: Sequence[int],
) -> list[float]:
    """Return the milliseconds that a call takes longer because of each changed group.

    Args:
        base: the program without changes.
        changed: the program with them.
        call: arguments of the timed call.
        groups: all groups with one kernel, in execution order.
        indices: the changed ones, ascending; if empty, another group is changed, whose difference is that of the call.
    """
    before, after = program_times([base, changed], call, with_steps=bool(indices))
    whole = after.call_ms - before.call_ms
    if not indices:
        return [whole]
    by_group = [
        time_by_group([step.path for step in program.artifact.program.steps], times.steps_ms, groups)
        for program, times in ((base, before), (changed, after))
    ]
    found = differences(indices, *by_group)
    total = math.fsum(found)
    scale = whole / total if total else 1.0
    return [one * min(max(scale, STEP_SCALES[0]), STEP_SCALES[1]) for one in found]


def relative_ms(base: QuantizedModel, model: QuantizedModel, call: TimedCall, base_ms: float) -> float:
    """Return the milliseconds of a call of a model, measured in alternation with the base, whose time is known.

    Args:
        base: the program that is timed at the same moments.
        model: the program to time.
        call: arguments of the timed call.
        base_ms: milliseconds of the base.
    """
    before, after = program_times([base, model], call)
    return base_ms * after.call_ms / before.call_ms
