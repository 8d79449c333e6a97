"""Operators that only move levels, as strided copies between buffers of any layout.

A move is a few `Box`es: sizes, and for each side an offset and a stride per axis, all in elements. Every padding mode,
slice, permutation and concatenation is made of them, and one kernel runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from intaglio.ir.dims import Dim, Shape, evaluate, symbols_of
from intaglio.ir.graph import Op

Strides = tuple[Dim, ...]


@dataclass(frozen=True)
class Run:
    """``size`` elements along an axis, so far apart in source and result."""

    size: Dim
    source: Dim
    result: Dim


@dataclass(frozen=True)
class Box:
    """One strided copy from operand ``operand``; with ``fill`` the zero point is written instead."""

    runs: tuple[Run, ...]
    source: Dim = 0
    result: Dim = 0
    operand: int = 0
    fill: bool = False


def copies(op: Op, sources: Sequence[Side], to: Strides, size: int = 1) -> tuple[Box, ...]:
    """The same between any strides, in bytes of elements that have ``size`` of them."""
    return tuple(_merged(_in_bytes(box, size)) for box in MOVES[op.kind](op, sources, to))


def _in_bytes(box: Box, size: int) -> Box:
    if size == 1:
        return box
    runs = tuple(Run(run.size, run.source * size, run.result * size) for run in box.runs)
    return replace(box, runs=(*runs, Run(size, 1, 1)), source=box.source * size, result=box.result * size)


def _merged(box: Box) -> Box:
    """Free dimensions count as 64 when strides are compared: the order decides speed, not the result."""
    runs = [run for run in box.runs if run.size != 1]
    runs.sort(key=lambda run: -abs(evaluate(run.result, dict.fromkeys(symbols_of(run.result), 64))))
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        if last and last.source == run.source * run.size and last.result == run.result * run.size:
            merged[-1] = Run(last.size * run.size, run.source, run.result)
        else:
            merged.append(run)
    return replace(box, runs=tuple(merged))


Side = tuple[Shape, Strides]
Move = Callable[[Op, Sequence[Side], Strides], list[Box]]


def _same(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """A reshape that keeps its shape: from one layout to another."""
    ((shape, at),) = sources
    return [Box(tuple(map(Run, shape, at, to)))]


def _slice(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """Every ``step``-th of an axis from ``start``; negative steps run backwards."""
    ((shape, at),) = sources
    axis, step = op.attrs["axis"], op.attrs["step"]
    runs = list(map(Run, shape, at, to))
    runs[axis] = Run(slice_length(op.attrs["start"], op.attrs["stop"], step), at[axis] * step, to[axis])
    return [Box(tuple(runs), at[axis] * op.attrs["start"])]


def slice_length(start: Dim, stop: Dim, step: int) -> Dim:
    """How many indices a slice takes; of free bounds, ``start`` is at most ``stop``."""
    if isinstance(start, int) and isinstance(stop, int):
        return len(range(start, stop, step))
    return (stop - start + (step - 1)) // step


def _permute(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    ((shape, at),) = sources
    return [Box(tuple(Run(shape[old], at[old], to[new]) for new, old in enumerate(op.attrs["order"])))]


def _cat(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    axis, found = op.attrs["axis"], []
    begin: Dim = 0
    for operand, (shape, at) in enumerate(sources):
        found.append(Box(tuple(map(Run, shape, at, to)), 0, to[axis] * begin, operand))
        begin = begin + shape[axis]
    return found


def _expand(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """Axes of one element, repeated."""
    ((shape, at),) = sources
    wide = op.attrs["shape"]
    return [Box(tuple(Run(n, 0 if m == 1 != n else s, t) for n, m, s, t in zip(wide, shape, at, to, strict=True)))]


def _shuffle(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """Channel ``i * groups + g`` of the result is channel ``g * each + i``."""
    ((shape, at),) = sources
    groups = op.attrs["groups"]
    each = shape[1] // groups
    split = (Run(groups, at[1] * each, to[1]), Run(each, at[1], to[1] * groups))
    return [Box((Run(shape[0], at[0], to[0]), *split, *map(Run, shape[2:], at[2:], to[2:])))]


def _pixel_shuffle(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """Channel ``c * r * r + i * r + j`` becomes row ``h * r + i``, column ``w * r + j`` of channel c."""
    (((n, c, h, w), (sn, sc, sh, sw)),) = sources
    r = op.attrs["factor"]
    runs = (
        Run(n, sn, to[0]),
        Run(c // (r * r), sc * (r * r), to[1]),
        Run(h, sh, to[2] * r),
        Run(r, sc * r, to[2]),
        Run(w, sw, to[3] * r),
        Run(r, sc, to[3]),
    )
    return [Box(runs)]


def _pixel_unshuffle(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """The inverse of a pixel shuffle."""
    (((n, c, h, w), (sn, sc, sh, sw)),) = sources
    r = op.attrs["factor"]
    runs = (
        Run(n, sn, to[0]),
        Run(c, sc, to[1] * (r * r)),
        Run(h // r, sh * r, to[2]),
        Run(r, sh, to[1] * r),
        Run(w // r, sw * r, to[3]),
        Run(r, sw, to[1]),
    )
    return [Box(runs)]


def _unfold_depth(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """Tap k of a depth window becomes channels: [n, (g, k, c), outputs, h, w], ``c`` of each group."""
    ((shape, at),) = sources
    groups, taps, step, apart = (op.attrs[name] for name in ("groups", "taps", "stride", "dilation"))
    each = shape[1] // groups
    outputs = (shape[2] - apart * (taps - 1) - 1) // step + 1
    runs = (
        Run(shape[0], at[0], to[0]),
        Run(groups, at[1] * each, to[1] * (taps * each)),
        Run(taps, at[2] * apart, to[1] * each),
        Run(each, at[1], to[1]),
        Run(outputs, at[2] * step, to[2]),
        Run(shape[3], at[3], to[3]),
        Run(shape[4], at[4], to[4]),
    )
    return [Box(runs)]


@dataclass(frozen=True)
class _Part:
    """Part of a padded axis: where it begins in source and result, its runs; ``fill``: nothing of the source."""

    source: Dim
    result: Dim
    runs: tuple[Run, ...]
    fill: bool = False


def _pad(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """Before, inside and after of every axis, combined; what touches a filled part is filled."""
    ((shape, at),) = sources
    mode, between = op.attrs.get("mode", "constant"), op.attrs.get("between", (0,) * len(shape))
    sides = zip(op.attrs["before"], op.attrs["after"], between, shape, at, to, strict=True)
    parts = [_padded_axis(mode, *side) for side in sides]
    found = []
    for chosen in product(*parts):
        fill = any(part.fill for part in chosen)
        runs = tuple(run for part in chosen for run in part.runs)
        if all(run.size != 0 for run in runs):
            begin: tuple[Dim, Dim] = (sum((p.source for p in chosen), 0), sum((p.result for p in chosen), 0))
            found.append(Box(runs, 0 if fill else begin[0], begin[1], fill=fill))
    return found


def _padded_axis(mode: str, before: int, after: int, between: int, size: Dim, at: Dim, to: Dim) -> list[_Part]:
    apart = between + 1
    inside = _Part(0, to * before, (Run(size, at, to * apart),))
    behind = to * (size * apart - between + before)
    found = [inside]
    if between:
        found.append(_Part(0, to * (before + 1), (Run(size - 1, 0, to * apart), Run(between, 0, to)), True))
    if not before and not after:
        return found
    last = at * (size - 1)
    begins: Mapping[str, tuple[tuple[Dim, Dim], tuple[Dim, Dim]]] = {
        "constant": ((0, 0), (0, 0)),
        "reflect": ((at * before, -1 * at), (last - at, -1 * at)),
        "replicate": ((0, 0), (last, 0)),
        "circular": ((at * (size - before), at), (0, at)),
    }
    fill = mode == "constant"
    for (source, step), count, result in zip(begins[mode], (before, after), (0, behind), strict=True):
        found.append(_Part(source, result, (Run(count, step, to),), fill))
    return found


MOVES: Mapping[str, Move] = {
    "reshape": _same,
    "slice": _slice,
    "permute": _permute,
    "cat": _cat,
    "expand": _expand,
    "shuffle": _shuffle,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    "unfold_depth": _unfold_depth,
    "pad": _pad,
}
"""Kind -> its copies; a reshape that changes its shape is one only where both sides lie in order."""
