"""Data movement as strided copies between buffers of any layout.

An operator that moves data is a list of `Box` objects: sizes, and for each side an offset and a stride per axis, all in
elements. All padding modes, slices, permutations and concatenations consist of them, and one kernel runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from intaglio.ir import Dim, DType, Graph, Op, Shape, evaluate, numel, symbols_of
from intaglio.ir.dims import divide
from intaglio.ir.verify import TypeRule

Strides = tuple[Dim, ...]
ELEMENT_BYTES = (2, 4, 8)
"""Numbers of bytes that a kernel copies at a time, besides single bytes and whole runs."""


@dataclass(frozen=True)
class Run:
    """Copy loop along an axis: ``size`` elements, with their strides in source and result."""

    size: Dim
    source: Dim
    result: Dim


@dataclass(frozen=True)
class Box:
    """One strided copy from operand ``operand``; with ``fill``, the zero point is written instead.

    In a copy in bytes, ``element`` is the number of bytes that the innermost run copies at a time.
    """

    runs: tuple[Run, ...]
    source: Dim = 0
    result: Dim = 0
    operand: int = 0
    fill: bool = False
    element: int = 1


def merged_copies(copies: Copies, op: Op, sources: Sequence[Side], to: Strides, size: int = 1) -> tuple[Box, ...]:
    """Return the strided copies of an operator, largest strides of the result first, with runs merged where possible.

    Strides are in elements, or in bytes if ``size`` is the number of bytes per element.
    """
    return tuple(_with_elements(_merged(_in_bytes(box, size)), size) for box in copies(op, sources, to))


def reshaped_copy(source: Side, result: Side, size: int) -> Box | None:
    """Return a copy in logical order between shapes as one strided copy in bytes, or ``None`` if it is none.

    Both shapes are divided into the same axes, from the last to the first. That is possible if, wherever axes of the
    two shapes overlap, the size of one is a multiple of the size of the other.

    Args:
        source: shape and strides of the operand, in elements.
        result: shape and strides of the result, in elements.
        size: bytes per element.
    """
    runs: list[Run] = []
    left, right = (list(zip(*side, strict=True)) for side in (source, result))
    while left and right:
        (rows, at), (wide, to) = left.pop(), right.pop()
        if (more := divide(rows, wide)) is not None:
            runs.append(Run(wide, at, to))
            left += [(more, at * wide)] if more != 1 else []
        elif (more := divide(wide, rows)) is not None:
            runs.append(Run(rows, at, to))
            right.append((more, to * rows))
        else:
            return None
    if any(dim != 1 for dim, _ in left + right):
        return None
    return _with_elements(_merged(_in_bytes(Box(tuple(reversed(runs))), size)), size)


def row_major_strides(shape: Shape) -> Strides:
    """Return the row-major strides of a shape, in elements."""
    found: list[Dim] = []
    step: Dim = 1
    for dim in reversed(shape):
        found.append(step)
        step = step * dim
    return tuple(reversed(found))


def _in_bytes(box: Box, size: int) -> Box:
    """Convert a box from elements to bytes, with an innermost run over the bytes of an element."""
    if size == 1:
        return box
    runs = tuple(Run(run.size, run.source * size, run.result * size) for run in box.runs)
    return replace(box, runs=(*runs, Run(size, 1, 1)), source=box.source * size, result=box.result * size)


def _with_elements(box: Box, size: int) -> Box:
    """Remove the run over the bytes of an element if it is not merged with other runs."""
    if size not in ELEMENT_BYTES or box.runs[-1:] != (Run(size, 1, 1),):
        return box
    return replace(box, runs=box.runs[:-1], element=size)


def _merged(box: Box) -> Box:
    """Sort runs by their stride in the result and merge neighbours that are contiguous on both sides.

    Free dimensions count as 64 when strides are compared; the order affects speed, not the result.
    """
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
    """Return the copy of a reshape that keeps its shape and changes the layout."""
    ((shape, at),) = sources
    return [Box(tuple(map(Run, shape, at, to)))]


def slice_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """Return the copy of every ``step``-th element of an axis from ``start`` on."""
    ((shape, at),) = sources
    axis, step = op.attrs["axis"], op.attrs["step"]
    runs = list(map(Run, shape, at, to))
    runs[axis] = Run(slice_length(op.attrs["start"], op.attrs["stop"], step), at[axis] * step, to[axis])
    return [Box(tuple(runs), at[axis] * op.attrs["start"])]


def slice_length(start: Dim, stop: Dim, step: int) -> Dim:
    """Return the number of indices that a slice selects; with free bounds, ``start`` must be at most ``stop``."""
    if isinstance(start, int) and isinstance(stop, int):
        return len(range(start, stop, step))
    return (stop - start + (step - 1)) // step


def flip_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """Return the copy of an axis from its last element to the first."""
    ((shape, at),) = sources
    axis = op.attrs["axis"]
    runs = list(map(Run, shape, at, to))
    runs[axis] = Run(shape[axis], -1 * at[axis], to[axis])
    return [Box(tuple(runs), at[axis] * (shape[axis] - 1))]


def permute_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """Return the copy of a permutation."""
    ((shape, at),) = sources
    return [Box(tuple(Run(shape[old], at[old], to[new]) for new, old in enumerate(op.attrs["order"])))]


def cat_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """Return the copies of a concatenation, one per operand."""
    axis, found = op.attrs["axis"], []
    begin: Dim = 0
    for operand, (shape, at) in enumerate(sources):
        found.append(Box(tuple(map(Run, shape, at, to)), 0, to[axis] * begin, operand))
        begin = begin + shape[axis]
    return found


def expand_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """Return the copy that repeats axes of one element."""
    ((shape, at),) = sources
    wide = op.attrs["shape"]
    return [Box(tuple(Run(n, 0 if m == 1 != n else s, t) for n, m, s, t in zip(wide, shape, at, to, strict=True)))]


def shuffle_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """Return the copy in which channel ``i * groups + g`` of the result is channel ``g * each + i`` of the operand."""
    ((shape, at),) = sources
    groups = op.attrs["groups"]
    each = shape[1] // groups
    split = (Run(groups, at[1] * each, to[1]), Run(each, at[1], to[1] * groups))
    return [Box((Run(shape[0], at[0], to[0]), *split, *map(Run, shape[2:], at[2:], to[2:])))]


def pixel_shuffle_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """Return the copy in which channel ``c * r * r + i * r + j`` becomes row ``h * r + i``, column ``w * r + j`` of
    channel c.
    """
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
    """Return the copy of the inverse of a pixel shuffle."""
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
    """Return the copy in which tap k of a depth window becomes channels: [n, (g, k, c), outputs, h, w].

    Here ``c`` counts the channels of each group g.
    """
    ((shape, at),) = sources
    groups, taps, step, spacing = (op.attrs[name] for name in ("groups", "taps", "stride", "dilation"))
    per_group = shape[1] // groups
    outputs = (shape[2] - spacing * (taps - 1) - 1) // step + 1
    runs = (
        Run(shape[0], at[0], to[0]),
        Run(groups, at[1] * per_group, to[1] * (taps * per_group)),
        Run(taps, at[2] * spacing, to[1] * per_group),
        Run(per_group, at[1], to[1]),
        Run(outputs, at[2] * step, to[2]),
        Run(shape[3], at[3], to[3]),
        Run(shape[4], at[4], to[4]),
    )
    return [Box(runs)]


@dataclass(frozen=True)
class _Part:
    """Part of a padded axis: its offsets in source and result, and its runs. With ``fill``, it reads nothing."""

    source: Dim
    result: Dim
    runs: tuple[Run, ...]
    fill: bool = False


def pad_copies(op: Op, sources: Sequence[Side], to: Strides) -> list[Box]:
    """Return the copies of a padding: the product of the parts of all axes. A part that is filled on any axis is
    filled.
    """
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
    """Return the parts of one axis: inside, gaps between elements, before and after."""
    spacing = between + 1
    inside = _Part(0, to * before, (Run(size, at, to * spacing),))
    behind = to * (size * spacing - between + before)
    found = [inside]
    if between:
        found.append(_Part(0, to * (before + 1), (Run(size - 1, 0, to * spacing), Run(between, 0, to)), True))
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
MOVED = TypeRule(((*MOVED_TYPES, DType.S8),), (*MOVED_TYPES, DType.S8), keeps_type=True)
"""Type rule of data movement: it accepts these element types, and int8 values of the caller, and keeps them."""
MANY = 4096
"""Assumed size of a free dimension."""


def stays_inside(copies: Copies) -> Callable[[Op, Graph], None]:
    """Return a check that raises `ValueError` if one of the copies would access memory outside of its tensors.

    The check uses row-major strides, which suffices because some copy spans all the other axes. Free sizes are assumed
    to be large; sizes that are too small are refused in each call (`OpDef.needs`).
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
                    raise ValueError(
                        f"{op.kind} with {dict(op.attrs)} accesses elements outside of %{name}, {graph.types[name]}"
                    )

    return check


def slice_inside(op: Op, graph: Graph) -> Iterable[tuple[Dim, str]]:
    """Yield the requirements that both bounds of a slice are inside its axis."""
    size = graph.types[op.inputs[0]].shape[op.attrs["axis"]]
    yield op.attrs["start"], f"a slice would begin at {op.attrs['start']}"
    yield size - op.attrs["stop"], f"a slice up to {op.attrs['stop']} of an axis of {size}"


def pad_inside(op: Op, graph: Graph) -> Iterable[tuple[Dim, str]]:
    """Yield the requirement that reflection and circular padding are not wider than the axis they repeat."""
    if op.attrs.get("mode") not in ("reflect", "circular"):
        return
    widths = zip(graph.types[op.inputs[0]].shape, op.attrs["before"], op.attrs["after"], strict=True)
    for size, before, after in widths:
        widest = max(before, after)
        if widest:
            own = int(op.attrs["mode"] == "reflect")
            yield size - widest - own, f"{op.attrs['mode']} padding by {widest} of an axis of {size}"
