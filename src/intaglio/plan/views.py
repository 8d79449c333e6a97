"""View assignment: data movement that needs no copy, because its readers or the writer of its source support strides.

The location of a value is a list of factors (size, stride) along each logical axis. Reshapes regroup the factors, so
that an axis merged from two others can be split again by a later reshape, as in multi-head attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from intaglio.ir import Dim, Graph, Op, Shape
from intaglio.ops import Layout, op_def
from intaglio.ops.movement.aliasing import Axes, joined
from intaglio.plan.buffers import Buffer, caller_strides, strides
from intaglio.plan.execution_plan import Plan
from intaglio.plan.plan_records import Choice, TensorView


@dataclass(frozen=True)
class _Location:
    """Location of a value: its elements start at element ``start`` of ``root``."""

    root: str
    start: Dim
    axes: Axes

    def view(self) -> TensorView | None:
        """Return the location with one stride per axis; ``None`` if an axis needs several."""
        if any(len(axis) > 1 for axis in self.axes):
            return None
        return TensorView(self.root, self.start, tuple(axis[0][1] if axis else 0 for axis in self.axes))


def assign_views(plan: Plan) -> Plan:
    """Make views of results of data movement that can stay in the memory of their source, and of results that can be
    written directly to where data movement would copy them. Views have no buffer.
    """
    graph, buffers, row_major = plan.graph, plan.buffers, plan.row_major
    users = graph.users()
    in_place, reasons = _written_in_place(graph, users, buffers, row_major)
    refused: dict[str, str] = {}
    while True:
        found = {**in_place, **_read_in_place(plan, in_place, refused)}
        wrong = {
            name: f"{reader} needs contiguous elements along the last axis"
            for name, at in found.items()
            if name not in in_place and (reader := _unsuited_reader(name, at, users[name], found)) is not None
        }
        if not wrong:
            break
        refused |= wrong
    for name, at in found.items():  # the aliased value may be written elsewhere now
        found[name] = replace(at, root=in_place[at.root].root) if at.root in in_place else at
        if name not in reasons:
            reasons[name] = f"read with strides by {', '.join(dict.fromkeys(op.kind for op in users[name]))}"
    views = {name: at.view() or TensorView(at.root, at.start, ()) for name, at in found.items()}
    left = {name: _realiased(buffer, buffers, views) for name, buffer in buffers.items() if name not in views}
    refused = {name: reason for name, reason in refused.items() if left[name].alias is None}
    return replace(plan, views=views, buffers=left).with_reasons(Choice.VIEW, {**refused, **reasons})


def _realiased(buffer: Buffer, buffers: Mapping[str, Buffer], views: Mapping[str, TensorView]) -> Buffer:
    """Return a buffer whose aliased value may have become a view.

    Its alias becomes the root of that view if the root was an alias of the same value, else ``None``.
    """
    if buffer.alias is None or buffer.alias not in views:
        return buffer
    root = views[buffer.alias].root
    alike = root in buffers and root != buffer.value and buffers[root].alias == buffer.alias
    return replace(buffer, alias=root if alike else None)


def _written_in_place(
    graph: Graph, users: Mapping[str, tuple[Op, ...]], buffers: Mapping[str, Buffer], row_major: frozenset[str]
) -> tuple[dict[str, _Location], dict[str, str]]:
    """Return results that can be written where later reshapes and permutations would copy them, and the reasons."""
    found: dict[str, _Location] = {}
    reasons: dict[str, str] = {}
    for maker, name in ((op, name) for op in graph.ops if op_def(op).any_strides for name in _results(op, users)):
        path, end = _following_movement(name, users, graph)
        if not path or (all(op_def(op).any_strides for op in users[end]) and end not in graph.outputs):
            continue
        buffer = buffers.get(end)
        if buffer is not None and (any(buffer.halo) or buffer.first_channel is not None):
            continue
        at: _Location | None = _locate(end, graph, buffers, row_major, own=True)
        places = {}
        for op in reversed(path):
            at = None if at is None else _source_location(op, at, graph.types[op.inputs[0]].shape)
            if at is not None:
                places[op.inputs[0]] = at
        if at is not None and _last_axis_contiguous(at.view()):
            found.update(places)
            reasons |= dict.fromkeys(places, f"written where %{end} is: {maker.kind} writes any strides")
    return found, reasons


def _results(op: Op, users: Mapping[str, tuple[Op, ...]]) -> tuple[str, ...]:
    """Return the values that an operator writes; for a product, those of the operator that reads its accumulator."""
    if not op_def(op).accumulates:
        return op.outputs
    (tail,) = users[op.output]
    tables = [
        reader for reader in users[tail.output] if op_def(reader).follows_product and len(users[tail.output]) == 1
    ]
    return (tables or [tail])[0].outputs


def _following_movement(name: str, users: Mapping[str, tuple[Op, ...]], graph: Graph) -> tuple[list[Op], str]:
    """Return the chain of reshapes and permutations that are the only readers of a value, and the chain's result."""
    path: list[Op] = []
    while name not in graph.outputs and len(users[name]) == 1 and _is_written_through(users[name][0]):
        path.append(users[name][0])
        name = path[-1].output
    return path, name


def _is_written_through(op: Op) -> bool:
    """Return whether the source of an operator can be written directly to the location of its result."""
    alias = op_def(op).alias
    return alias is not None and alias.source is not None


def _read_in_place(plan: Plan, in_place: Mapping[str, _Location], refused: Mapping[str, str]) -> dict[str, _Location]:
    """Return results of data movement that can stay in the memory of their source, before their readers are checked."""
    graph, buffers = plan.graph, plan.buffers
    found: dict[str, _Location] = {name: _caller_location(name, graph) for name in plan.strided}
    own = {*in_place, *(at.root for at in in_place.values()), *refused, *graph.outputs}
    for op in graph.ops:
        if op_def(op).alias is None or op.output in own:
            continue
        buffer, source = buffers.get(op.output), found.get(op.inputs[0]) or in_place.get(op.inputs[0])
        if buffer is None or any(buffer.halo) or (buffer.alias is not None and buffer.alias not in found):
            continue
        source = source or _locate(op.inputs[0], graph, buffers, plan.row_major, separate=found)
        at = _result_location(op, source, graph)
        if at is not None:
            found[op.output] = at
    return {name: at for name, at in found.items() if name not in plan.strided}


def _caller_location(name: str, graph: Graph) -> _Location:
    """Return the location of a caller's tensor with the strides of each call."""
    shape = graph.types[name].shape
    return _Location(name, 0, tuple(joined([pair]) for pair in zip(shape, caller_strides(name, shape), strict=True)))


def _unsuited_reader(name: str, at: _Location, readers: Sequence[Op], found: Mapping[str, _Location]) -> str | None:
    """Return the kind of the first reader that cannot read a value at this location, or ``None``."""
    view = at.view()

    def takes(op: Op) -> bool:
        record = op_def(op)
        if record.moves_data:
            return op.output in found or (view is not None and record.layout is not Layout.CHANNELS_LAST)
        anyhow = record.accumulates and op.inputs[0] != name and view is not None
        return record.any_strides and (anyhow or _last_axis_contiguous(view))

    return next((op.kind for op in readers if not takes(op)), None) if readers else "nothing"


def _last_axis_contiguous(view: TensorView | None) -> bool:
    """Return whether elements along the last axis are contiguous, or there is only one."""
    return view is not None and (not view.strides or view.strides[-1] in (0, 1))


def _locate(
    name: str,
    graph: Graph,
    buffers: Mapping[str, Buffer],
    row_major: frozenset[str],
    own: bool = False,
    separate: Mapping[str, _Location] | None = None,
) -> _Location | None:
    """Return the location of a value in a buffer, a constant or a dense tensor; ``None`` for a part of a concatenation.

    The root is the aliased buffer, unless that is in ``separate`` or ``own`` is set.
    """
    kind = graph.types[name]
    buffer = buffers.get(name) or Buffer(
        name, kind.shape, kind.dtype, row_major=name in row_major or name in graph.constants
    )
    if buffer.first_channel is not None:
        return None
    (above, beside), (_, _, width, pixel) = buffer.halo, buffer.nhwc_sizes()
    start = (above * (width + 2 * beside) + beside) * pixel
    root = name if own or buffer.alias is None or buffer.alias in (separate or ()) else buffer.alias
    axes = tuple(joined([pair]) for pair in zip(kind.shape, strides(buffer), strict=True))
    return _Location(root, start, axes)


def _result_location(op: Op, source: _Location | None, graph: Graph) -> _Location | None:
    """Return the location of the result of data movement that is not copied; ``None`` if strides cannot express it."""
    alias = op_def(op).alias
    if source is None or alias is None:
        return None
    found = alias.result(op, source.axes, graph.types[op.inputs[0]].shape, graph.types[op.output].shape)
    return None if found is None else _Location(source.root, source.start + found[0], found[1])


def _source_location(op: Op, result: _Location, shape: Shape) -> _Location | None:
    """Return the location that the source of a reshape or permutation must have for its result to be at ``result``."""
    alias = op_def(op).alias
    axes = None if alias is None or alias.source is None else alias.source(op, result.axes, shape)
    return None if axes is None else replace(result, axes=axes)
