"""Conditions on free sizes that the code of a model tests, such as ``if a.shape[1] < b.shape[1]``.

The graph has the branch that the example takes. torch.export reports intervals of single sizes; this module reads the
other conditions, and finds sizes of calls at which they hold or do not hold.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import combinations, product
from typing import Any

import torch
from torch.export import ExportedProgram

from intaglio.errors import CaptureError
from intaglio.fxgraph.nodes import dim_of_expression
from intaglio.ir import Dim, SizeCondition, symbols_of
from intaglio.torch_private import traced_conditions
from intaglio.tracing.captured import Captured

Sizes = Mapping[Any, Dim]
Ranges = Mapping[str, tuple[int, int | None]]

TORCH = os.path.dirname(torch.__file__) + os.sep
LAYER_FOLDER = os.path.join(TORCH, "nn") + os.sep
CALLS_OF_MODULES = os.path.join(LAYER_FOLDER, "modules", "module.py")

SPLIT_BY = {"Min": (">", ">="), "Max": ("<", "<=")}
"""The relations to the right that the smallest or largest of several sizes has only if each of them has it."""
REVERSED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}

NEAR = 40
"""Sizes of up to this number, and those that are nearer than this to the example, are tried one by one."""
DOUBLED = 3
"""How often sizes of the example are doubled in the search for others."""
LARGEST_DIVISOR = 1000
"""Largest divisor of fractions that real numbers in conditions are."""
MOST_VARIED = 2
"""Largest number of sizes that are varied together."""


def conditions_of(program: ExportedProgram, sizes: Sizes) -> tuple[SizeCondition, ...]:
    """Return the conditions that held in the example and that code of the model tests.

    Conditions that PyTorch's operators test are left out: they choose layouts and kernels, not results.

    Args:
        program: what torch.export traced.
        sizes: the size of each symbol of torch.export.

    Raises:
        CaptureError: a condition has a form that cannot be tested in calls.
    """
    found: dict[SizeCondition, None] = {}
    for expression, frame in _traced(program):
        if frame is None or not is_model_code(frame.filename) or not expression.free_symbols <= sizes.keys():
            continue
        where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        try:
            some = [SizeCondition(*parts, where) for parts in comparisons_of(expression, sizes)]
        except CaptureError:
            named = expression.xreplace({free: type(free)(str(own)) for free, own in sizes.items()})
            problem = f"{where} tests the condition {named} on free sizes, which cannot be tested in calls"
            raise CaptureError("model", None, problem, remedy=FIXED_SIZES) from None
        found |= dict.fromkeys(one for one in some if symbols_of(one.left) | symbols_of(one.right))
    found |= dict.fromkeys(_choices_of_extremes(sizes))
    return tuple(found)


OF_SIZES = "the code of the model"
"""Place of conditions that a size is the largest or smallest of several, as in the example."""


def _choices_of_extremes(sizes: Sizes) -> Iterator[SizeCondition]:
    """Yield the conditions that the sizes which are the largest or smallest ones in the example are so in a call."""
    known: set[Dim] = {0}
    for extreme, chosen in sizes.items():
        for part in () if extreme.is_Symbol else extreme.args:
            other = dim_of_expression(part, sizes)
            large, small = (chosen, other) if type(extreme).__name__ == "Max" else (other, chosen)
            if (difference := large - small) not in known:
                known.add(difference)
                yield SizeCondition(large, ">=", small, OF_SIZES)


FIXED_SIZES = "leave these sizes out of dynamic_shapes, so that they are those of the example"


def _traced(program: ExportedProgram) -> Iterable[tuple[Any, Any]]:
    """Return the conditions of all values of a program."""
    for node in program.graph.nodes:
        for size in getattr(node.meta.get("val"), "shape", ()):
            if isinstance(size, torch.SymInt):
                return traced_conditions(size)
    return ()


def is_model_code(file: str) -> bool:
    """Return whether a file contains code of models: any file outside of PyTorch, and its layers and functions."""
    return not file.startswith(TORCH) or (file.startswith(LAYER_FOLDER) and file != CALLS_OF_MODULES)


def comparisons_of(expression: Any, sizes: Sizes) -> Iterator[tuple[Any, str, Any]]:
    """Yield dimensions and their relations that a condition consists of.

    Raises:
        CaptureError: a part of it has a form without a counterpart.
    """
    if type(expression).__name__ == "And":
        for part in expression.args:
            yield from comparisons_of(part, sizes)
    elif (relation := getattr(expression, "rel_op", None)) is None:
        if type(expression).__name__ != "BooleanTrue":
            raise CaptureError("model", None, f"{expression} is not a comparison")
    else:
        left, right = expression.args
        if relation in SPLIT_BY.get(type(left).__name__, ()):
            for part in left.args:
                yield from comparisons_of(type(expression)(part, right), sizes)
            return
        if REVERSED[relation] in SPLIT_BY.get(type(right).__name__, ()):
            for part in right.args:
                yield from comparisons_of(type(expression)(left, part), sizes)
            return
        left, right = _without_quotients(left, right)
        yield dim_of_expression(left, sizes), relation, dim_of_expression(right, sizes)


def _without_quotients(left: Any, right: Any) -> tuple[Any, Any]:
    """Return both sides of a comparison, multiplied by the divisors of real quotients, which are positive.

    Raises:
        CaptureError: a number is not a simple fraction, or a divisor may be negative.
    """
    import sympy

    if not any(
        part.is_Float or _is_quotient(part) for side in (left, right) for part in sympy.preorder_traversal(side)
    ):
        return left, right
    difference = (left - right).replace(_is_quotient, lambda quotient: quotient.args[0] / quotient.args[1])
    above, below = sympy.fraction(sympy.together(difference.replace(lambda part: part.is_Float, _fraction)))
    if not below.is_positive:
        raise CaptureError("model", None, f"the sign of {below} is unknown")
    return above, sympy.Integer(0)


def _is_quotient(expression: Any) -> bool:
    return type(expression).__name__ == "IntTrueDiv"


def _fraction(number: Any) -> Any:
    """Return a real number as the simple fraction that it is rounded from. Raise `CaptureError` if there is none."""
    import sympy

    simple = Fraction(float(number)).limit_denominator(LARGEST_DIVISOR)
    if float(simple) != float(number):
        raise CaptureError("model", None, f"{number} is not a simple fraction")
    return sympy.Rational(simple.numerator, simple.denominator)


def nearest_sizes(
    sizes: Mapping[str, int], wanted: Callable[[Mapping[str, int]], bool], varied: Collection[str], ranges: Ranges
) -> dict[str, int] | None:
    """Return wanted sizes as near as possible to the given ones, or ``None`` if the search finds none.

    Args:
        sizes: the given sizes.
        wanted: whether sizes are wanted.
        varied: names of the sizes that may be changed, `MOST_VARIED` at a time.
        ranges: smallest and largest value of restricted sizes.
    """
    if wanted(sizes):
        return dict(sizes)
    choices = {name: _choices(sizes[name], *ranges.get(name, (0, None))) for name in sorted(varied)}
    best, least = None, math.inf
    for count in range(1, min(len(choices), MOST_VARIED) + 1):
        for names in combinations(choices, count):
            for values in product(*(choices[name] for name in names)):
                changed = dict(zip(names, values, strict=True))
                far = sum(abs(math.log(value / max(sizes[name], 1))) for name, value in changed.items())
                if far < least and wanted({**sizes, **changed}):
                    best, least = {**sizes, **changed}, far
        if best is not None:
            return best
    return None


def _choices(size: int, low: int, high: int | None) -> list[int]:
    """Return the values of a size that are tried: small ones, those near the given one, and multiples of it."""
    values = {*range(1, NEAR + 1), *range(size - NEAR, size + NEAR + 1)}
    values |= {(size << k) + more for k in range(1, DOUBLED + 1) for more in (-1, 0, 1)}
    return sorted(value for value in values if max(low, 1) <= value and (high is None or value <= high))


def sizes_with_conditions(captured: Captured, sizes: Mapping[str, int], kept: Collection[str]) -> dict[str, int] | None:
    """Return the nearest sizes at which all conditions of a graph hold, or ``None``; those in ``kept`` stay as they
    are."""
    signature = captured.signature
    return nearest_sizes(sizes, lambda some: _hold(signature.conditions, some), sizes.keys() - kept, signature.ranges)


def _hold(conditions: Iterable[SizeCondition], sizes: Mapping[str, int]) -> bool:
    return all(condition.holds(sizes) for condition in conditions)
