"""Choice of the conditions on free sizes without which a graph computes something else than the float model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from torch import nn

from intaglio.errors import InputError
from intaglio.ir import Dim, SizeCondition, evaluate, symbols_of
from intaglio.signature import bind, dims_of
from intaglio.tracing.capture_check import CONDITION_NOTE, MODEL_FAILS, difference_in_call, resized
from intaglio.tracing.captured import Captured
from intaglio.tracing.sizes.size_conditions import OF_SIZES, Ranges, nearest_sizes

LARGEST_CALL = 16
"""Calls of more than this times the sizes of the example are not compared; their conditions are kept."""
FARTHER = 2
"""The second call of a condition has a size that differs by at least this factor from that in the first."""
ANY_SIZE = 2**40
"""A size that is tested in place of all larger ones."""


def with_needed_conditions(
    captured: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Captured:
    """Return the graph with the conditions that its results need, and notes about them.

    Code of models also compares sizes where both branches compute the same, for example to leave out an interpolation
    between equal sizes. Graph and model are compared with sizes at which a condition does not hold, near the example
    and farther from it; if they agree, the condition is not needed. Conditions without which the model raises an error
    have no note.

    Args:
        captured: the graph, with all conditions that the code of the model tests.
        model: the float model.
        args: positional arguments of the example.
        kwargs: keyword arguments of the example.
    """
    ranges = captured.signature.ranges
    conditions = [one for one in captured.signature.conditions if not _is_implied(one, ranges)]
    free = replace(captured, signature=replace(captured.signature, conditions=()))
    reasons = dict.fromkeys(conditions, "not compared")
    if conditions and not captured.training:
        try:
            example = dims_of(free.signature, bind(free.signature, args, kwargs))
        except InputError:
            return captured  # `disagreement` says so

        def difference(sizes: Mapping[str, int]) -> str | None:
            return difference_in_call(free, model, *resized(free, args, kwargs, sizes), "other sizes")

        found = {one: _difference_without(one, conditions, example, ranges, difference) for one in conditions}
        reasons = {one: reason for one, reason in found.items() if reason is not None}
    ranges = _with_bounds(ranges, [one for one in reasons if one.where == OF_SIZES])
    needed = [one for one in reasons if not _is_implied(one, ranges)]
    noted = [one for one in needed if MODEL_FAILS not in reasons[one]]
    notes = tuple(f"{CONDITION_NOTE} {one}, which {one.where} tests" for one in noted)
    signature = replace(captured.signature, conditions=tuple(needed), ranges=ranges)
    return replace(captured, signature=signature, model_info=captured.model_info.with_stage(notes))


def _with_bounds(ranges: Ranges, conditions: Iterable[SizeCondition]) -> dict[str, tuple[int, int | None]]:
    """Return ranges in which conditions on single sizes hold, ``factor*size + added >= 0``; others are left out."""
    found = dict(ranges)
    for condition in conditions:
        value = condition.left - condition.right
        names = symbols_of(value)
        if len(names) == 1 and _is_linear(value):
            (name,) = names
            added = evaluate(value, {name: 0})
            factor = evaluate(value, {name: 1}) - added
            low, high = found.get(name, (0, None))
            if factor > 0:
                low = max(low, -(added // factor))
            else:
                high = min(added // -factor, added if high is None else high)
            found[name] = low, high
    return found


def _is_implied(condition: SizeCondition, ranges: Ranges) -> bool:
    """Return whether the range of a single size leaves no value at which a condition does not hold."""
    left, right = condition.left, condition.right
    names = symbols_of(left) | symbols_of(right)
    if len(names) > 1 or condition.relation in ("==", "!=") or not (_is_linear(left) and _is_linear(right)):
        return False
    (name,) = names
    low, high = ranges.get(name, (0, None))
    return all(condition.holds({name: end}) for end in (max(low, 1), ANY_SIZE if high is None else high))


def _is_linear(dim: Dim) -> bool:
    return isinstance(dim, int) or all(
        len(atoms) < 2 and all(isinstance(atom, str) for atom in atoms) for atoms, _ in dim.terms
    )


def _difference_without(
    condition: SizeCondition,
    conditions: Collection[SizeCondition],
    example: Mapping[str, int],
    ranges: Ranges,
    difference: Callable[[Mapping[str, int]], str | None],
) -> str | None:
    """Return how graph and model differ where a condition does not hold, or ``None`` if two calls show no difference.

    Args:
        condition: the condition.
        conditions: all conditions. The others hold in the calls if possible.
        example: the sizes of the example.
        ranges: smallest and largest value of restricted sizes.
        difference: returns how graph and model differ at some sizes, or ``None``.
    """
    names = symbols_of(condition.left) | symbols_of(condition.right)

    def alone(sizes: Mapping[str, int]) -> bool:
        return not condition.holds(sizes) and all(one.holds(sizes) for one in conditions if one is not condition)

    near = nearest_sizes(example, alone, names, ranges)
    near = near or nearest_sizes(example, lambda sizes: not condition.holds(sizes), names, ranges)
    if near is None:
        return "no sizes found"
    far = nearest_sizes(near, lambda sizes: alone(sizes) and _is_far(sizes, near), names, ranges)
    calls = [near] if far is None else [near, far]
    if any(_amount(sizes) > LARGEST_CALL * _amount(example) for sizes in calls):
        return "too large to compare"
    return next((reason for reason in map(difference, calls) if reason is not None), None)


def _is_far(sizes: Mapping[str, int], near: Mapping[str, int]) -> bool:
    return any(max(sizes[name], near[name]) >= FARTHER * min(sizes[name], near[name]) for name in near)


def _amount(sizes: Mapping[str, int]) -> int:
    """Return the product of all sizes of a call."""
    return prod(max(size, 1) for size in sizes.values())
