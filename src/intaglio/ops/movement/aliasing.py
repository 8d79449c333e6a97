"""Strides of results of data movement that are views of their source, as lists of factors along each axis.

A value has a list of factors (size, stride) along each logical axis. Reshapes regroup the factors, so that an axis
merged from two others can be split again by a later reshape, as in multi-head attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from intaglio.ir import Dim, Op, Shape
from intaglio.ir.dims import divide

Factor = tuple[Dim, Dim]
Axes = tuple[tuple[Factor, ...], ...]


@dataclass(frozen=True)
class Alias:
    """View rules of one operator.

    Attributes:
        result: Called with (operator, axes of the source, its shape, shape of the result); returns offset in elements
            and axes of the result, or ``None`` if strides cannot express it.
        source: Called with (operator, axes of the result, shape of the source); returns the axes of the source. Only
            for operators whose source can be written directly into the memory of the result.
    """

    result: Callable[[Op, Axes, Shape, Shape], tuple[Dim, Axes] | None]
    source: Callable[[Op, Axes, Shape], Axes | None] | None = None


def joined(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    """Drop factors of size 1 and merge factors that are contiguous in memory."""
    found: list[Factor] = []
    for size, stride in factors:
        if size == 1:
            continue
        if found and found[-1][1] == stride * size:
            found[-1] = found[-1][0] * size, stride
        else:
            found.append((size, stride))
    return tuple(found)


def regrouped(axes: Axes, shape: Shape) -> Axes | None:
    """Return factors of the same elements in the same order for axes of other sizes; ``None`` if a factor does not
    divide.
    """
    rest, found = list(joined(factor for axis in axes for factor in axis)), []
    for size in shape:
        taken: list[Factor] = []
        while size != 1:
            if not rest:
                return None
            factor, stride = rest[0]
            if (left := divide(size, factor)) is not None:
                taken.append(rest.pop(0))
                size = left
            elif (inner := divide(factor, size)) is not None:
                taken.append((size, stride * inner))
                rest[0], size = (inner, stride), 1
            else:
                return None
        found.append(joined(taken))
    return None if rest else tuple(found)


def _reshaped(op: Op, axes: Axes, source: Shape, result: Shape) -> tuple[Dim, Axes] | None:
    """Return the axes of a reshape's result."""
    found = regrouped(axes, result)
    return None if found is None else (0, found)


def _before_reshape(op: Op, axes: Axes, source: Shape) -> Axes | None:
    """Return the axes of a reshape's source."""
    return regrouped(axes, source)


def _permuted(op: Op, axes: Axes, source: Shape, result: Shape) -> tuple[Dim, Axes] | None:
    """Return the axes of a permutation's result."""
    return 0, tuple(axes[old] for old in op.attrs["order"])


def _before_permute(op: Op, axes: Axes, source: Shape) -> Axes | None:
    """Return the axes of a permutation's source."""
    order = op.attrs["order"]
    return tuple(axes[order.index(axis)] for axis in range(len(order)))


def _expanded(op: Op, axes: Axes, source: Shape, result: Shape) -> tuple[Dim, Axes] | None:
    """Return the axes of an expanded tensor; repeated axes have stride 0."""
    wide = zip(axes, source, result, strict=True)
    return 0, tuple(((n, 0),) if n != m else axis for axis, m, n in wide)


def _sliced(op: Op, axes: Axes, source: Shape, result: Shape) -> tuple[Dim, Axes] | None:
    """Return offset and axes of a slice; ``None`` if the sliced axis has several factors."""
    axis, step, begin = (op.attrs[key] for key in ("axis", "step", "start"))
    if len(axes[axis]) != 1:
        return None
    stride = axes[axis][0][1]
    taken = joined([(result[axis], stride * step)])
    return stride * begin, (*axes[:axis], taken, *axes[axis + 1 :])


def _flipped(op: Op, axes: Axes, source: Shape, result: Shape) -> tuple[Dim, Axes] | None:
    """Return offset and axes of a tensor with a reversed axis; ``None`` if that axis has several factors."""
    axis = op.attrs["axis"]
    if len(axes[axis]) != 1:
        return None
    size, stride = axes[axis][0]
    return stride * (size - 1), (*axes[:axis], ((size, -1 * stride),), *axes[axis + 1 :])


RESHAPED = Alias(_reshaped, _before_reshape)
PERMUTED = Alias(_permuted, _before_permute)
EXPANDED = Alias(_expanded)
SLICED = Alias(_sliced)
FLIPPED = Alias(_flipped)
