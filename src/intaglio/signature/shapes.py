"""Matching of the shapes in a call with the dimensions of a signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from intaglio.errors import InputError
from intaglio.ir import Dim, Input, Signature, SizeCondition, evaluate, solve, symbols_of


def match_shapes(signature: Signature, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Return the sizes of the dynamic dimensions in a call whose inputs have these shapes.

    Raises:
        InputError: a shape does not fit the captured type, or a dynamic dimension is out of its range.
    """
    symbols: dict[str, int] = {}
    matched: dict[Any, Any] = {}  # the keys and values of all layers have one type
    for entry, given in zip(signature.inputs, shapes, strict=True):
        shape, known = entry.type.shape, len(symbols)
        if matched.get(shape) == given:
            continue
        sizes = zip(shape, given, strict=False)
        if len(given) != len(shape) or not all(match_size(dim, size, symbols) for dim, size in sizes):
            raise input_error(entry, _shape_problem(given, shape), SHAPE_REMEDY)
        if len(symbols) > known and (limits := _range_violation(signature, symbols)) is not None:
            remedy = "split, pad or crop the input to such a size"
            raise input_error(entry, f"{_shape_problem(given, shape)} with {limits}", remedy)
        matched[shape] = given
    for condition in signature.conditions:
        if symbols_of(condition.left) | symbols_of(condition.right) <= symbols.keys() and not condition.holds(symbols):
            raise _branch_error(signature, condition, symbols)
    return symbols


def _branch_error(signature: Signature, condition: SizeCondition, symbols: Mapping[str, int]) -> InputError:
    """Return the error for sizes at which the model takes another branch than in the graph."""
    names = sorted(symbols_of(condition.left) | symbols_of(condition.right))
    inputs = [one for one in signature.inputs if any(symbols_of(dim) & set(names) for dim in one.type.shape)]
    shapes = ", ".join(f"'{one.name}' [{', '.join(map(str, one.type.shape))}]" for one in inputs)
    sizes = " and ".join(f"{name} is {symbols[name]}" for name in names)
    problem = (
        f"{sizes}; the model takes calls with {condition}, because {condition.where} takes another branch for others"
    )
    return InputError(f"inputs {shapes}", None, problem, remedy=OTHER_BRANCH)


OTHER_BRANCH = (
    "quantize again with batches of such sizes, whose branch the model then has, or use intaglio.eager, which has all "
    "branches"
)


def input_error(entry: Input, problem: str, remedy: str | None) -> InputError:
    """Return the error about an input of a call."""
    return InputError(f"input '{entry.name}'", None, problem, remedy=remedy)


def _shape_problem(given: Sequence[int], shape: Sequence[Dim]) -> str:
    return f"its shape is {list(given)}; the model takes [{', '.join(map(str, shape))}]"


def _range_violation(signature: Signature, symbols: Mapping[str, int]) -> str | None:
    """Return a text with the range of the first dynamic dimension that is outside of its range, or ``None``."""
    for name, (low, high) in signature.ranges.items():
        if name in symbols and not low <= symbols[name] <= (symbols[name] if high is None else high):
            return f"{name} of at least {low}" if high is None else f"{name} from {low} to {high}"
    return None


SHAPE_REMEDY = (
    "pass a tensor of that shape, or quantize again with example inputs or dynamic_shapes that allow this one"
)


def match_size(dim: Dim, size: int, symbols: dict[str, int]) -> bool:
    """Return whether an axis may have this size. If exactly one symbol of ``dim`` is unknown, solve for it and add its
    value to ``symbols``."""
    if isinstance(dim, int):
        return dim == size
    if name := dim.only_symbol:
        return symbols.setdefault(name, size) == size
    unknown = symbols_of(dim) - symbols.keys()
    if len(unknown) == 1:
        (name,) = unknown
        if (value := solve(dim, size, name, symbols)) is None:
            return False
        symbols[name] = value
    return len(unknown) < 2 and evaluate(dim, symbols) == size
