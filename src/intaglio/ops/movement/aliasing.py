"""How the result of data movement can be a view of its source: strides along each axis, as factors.

A value has a list of factors (size, stride) along each logical axis. Reshapes regroup factors, so an axis that two
others were joined in is no obstacle as long as a later reshape splits it again, as multi-head attention does.
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
    """How one operator makes views.

    result: (operator, axes of the source, its shape, shape of the result) -> offset in elements and axes of the result;
    ``None`` where no strides express it. source: (operator, axes of the result, shape of the source) -> axes of the
    source, for operators whose source can be written where the result belongs.
    """

    result: Callable[[Op, Axes, Shape, Shape], tuple[Dim, Axes] | None]
    source: Callable[[Op, Axes, Shape], Axes | None] | None = None


def joined(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    """Return factors without those of one element, neighbours in memory joined."""
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
    """Return the same elements in the same order along axes of other sizes; ``None`` where a factor does not divide."""
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
    found = regrouped(axes, result)
    return None if found is None else (0, found)


def _before_reshape(op: Op, axes: Axes, source: Shape) -> Axes | None:
    return regrouped(axes, source)


def _permuted(op: Op, axes: Axes, source: Shape, result: Shape) -> tuple[Dim, Axes] | None:
    return 0, tuple(axes[old] for old in op.attrs["order"])


def _before_permute(op: Op, axes: Axes, source: Shape) -> Axes | None:
    order = op.attrs["order"]
    return tuple(axes[order.index(axis)] for axis in range(len(order)))


def _expanded(op: Op, axes: Axes, source: Shape, result: Shape) -> tuple[Dim, Axes] | None:
    wide = zip(axes, source, result, strict=True)
    return 0, tuple(((n, 0),) if n != m else axis for axis, m, n in wide)


def _sliced(op: Op, axes: Axes, source: Shape, result: Shape) -> tuple[Dim, Axes] | None:
    axis, step, begin = (op.attrs[key] for key in ("axis", "step", "start"))
    if len(axes[axis]) != 1:
        return None
    stride = axes[axis][0][1]
    taken = joined([(result[axis], stride * step)])
    return stride * begin, (*axes[:axis], taken, *axes[axis + 1 :])


RESHAPED = Alias(_reshaped, _before_reshape)
PERMUTED = Alias(_permuted, _before_permute)
EXPANDED = Alias(_expanded)
SLICED = Alias(_sliced)
