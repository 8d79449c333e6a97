"""Data movement as strided copies between buffers of any layout.

An operator that moves data is a few `Box`es: sizes, and for each side an offset and a stride per axis, all in elements.
Every padding mode, slice, permutation and concatenation is made of them, and one kernel runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from intaglio.ir import Dim, DType, Graph, Op, Shape, evaluate, numel, symbols_of
from intaglio.ir.verify import TypeRule

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


def merged_copies(copies: Copies, op: Op, sources: Sequence[Side], to: Strides, size: int = 1) -> tuple[Box, ...]:
    """Return the strided copies of an operator, longest strides of the result first, runs merged where possible.

    ``size``: bytes of an element, for strides in bytes.
    """
    return tuple(_merged(_in_bytes(box, size)) for box in copies(op, sources, to))


def row_major_strides(shape: Shape) -> Strides:
    """Return the strides of a tensor whose memory order is its logical order."""
    found: list[Dim] = []
    step: Dim = 1
    for dim in reversed(shape):
        found.append(step)
        step = step * dim
    return tuple(reversed(found))


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
Copies = Callable[[Op, Sequence[Side], Strides], list[Box]]


def relayout_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """A reshape that keeps its shape: from one layout to another."""
    ((shape, at),) = sources
    return [Box(tuple(map(Run, shape, at, to)))]


def slice_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
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


def permute_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    ((shape, at),) = sources
    return [Box(tuple(Run(shape[old], at[old], to[new]) for new, old in enumerate(op.attrs["order"])))]


def cat_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    axis, found = op.attrs["axis"], []
    begin: Dim = 0
    for operand, (shape, at) in enumerate(sources):
        found.append(Box(tuple(map(Run, shape, at, to)), 0, to[axis] * begin, operand))
        begin = begin + shape[axis]
    return found


def expand_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """Axes of one element, repeated."""
    ((shape, at),) = sources
    wide = op.attrs["shape"]
    return [Box(tuple(Run(n, 0 if m == 1 != n else s, t) for n, m, s, t in zip(wide, shape, at, to, strict=True)))]


def shuffle_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """Channel ``i * groups + g`` of the result is channel ``g * each + i``."""
    ((shape, at),) = sources
    groups = op.attrs["groups"]
    each = shape[1] // groups
    split = (Run(groups, at[1] * each, to[1]), Run(each, at[1], to[1] * groups))
    return [Box((Run(shape[0], at[0], to[0]), *split, *map(Run, shape[2:], at[2:], to[2:])))]


def pixel_shuffle_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
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


def pixel_unshuffle_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
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


def unfold_depth_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
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


def pad_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
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


MOVED_TYPES = (DType.U8, DType.F32, DType.BF16, DType.I64, DType.BOOL)
MOVED = TypeRule((MOVED_TYPES,), MOVED_TYPES, keeps_type=True)
"""Data movement carries elements of these types and changes none of them."""
MANY = 4096
"""Assumed size of a free dimension."""


def stays_inside(copies: Copies) -> Callable[[Op, Graph], None]:
    """Return a check that raises ValueError where one of these copies would leave its tensors.

    Row-major tensors show it: some copy spans all their other axes. Free sizes are assumed to be large; those too small
    are refused call by call (`OpDef.needs`).
    """

    def check(op: Op, graph: Graph) -> None:
        if not all(isinstance(op.attrs.get(bound, 0), int) for bound in ("start", "stop")):
            return
        sizes = dict.fromkeys(graph.symbols(), MANY)
        sides = [(graph.types[name].shape, row_major_strides(graph.types[name].shape)) for name in op.inputs]
        result = graph.types[op.output].shape
        for box in merged_copies(copies, op, sides, row_major_strides(result)):
            spans = [(op.output, result, box.result, [run.result for run in box.runs])]
            if not box.fill:
                source = sides[box.operand][0]
                spans.append((op.inputs[box.operand], source, box.source, [run.source for run in box.runs]))
            for name, shape, start, steps in spans:
                reach = [(run.size - 1) * step for run, step in zip(box.runs, steps, strict=True)]
                first, size, *far = (evaluate(one, sizes) for one in (start, numel(shape), *reach))
                if first + sum(min(f, 0) for f in far) < 0 or first + sum(max(f, 0) for f in far) >= size:
                    raise ValueError(f"{op.kind} with {dict(op.attrs)} leaves %{name}, {graph.types[name]}")

    return check


def slice_inside(op: Op, graph: Graph) -> Iterable[tuple[Dim, str]]:
    """Yield that both bounds of a slice are inside its axis."""
    size = graph.types[op.inputs[0]].shape[op.attrs["axis"]]
    yield op.attrs["start"], f"a slice would begin at {op.attrs['start']}"
    yield size - op.attrs["stop"], f"a slice up to {op.attrs['stop']} of an axis of {size}"


def pad_inside(op: Op, graph: Graph) -> Iterable[tuple[Dim, str]]:
    """Yield that padding by reflection or in a circle is no wider than what it repeats."""
    if op.attrs.get("mode") not in ("reflect", "circular"):
        return
    widths = zip(graph.types[op.inputs[0]].shape, op.attrs["before"], op.attrs["after"], strict=True)
    for size, before, after in widths:
        widest = max(before, after)
        if widest:
            own = int(op.attrs["mode"] == "reflect")
            yield size - widest - own, f"{op.attrs['mode']} padding by {widest} of an axis of {size}"
