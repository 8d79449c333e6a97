"""In-place updates: before memory changes, compute deferred values that depend on it and make views share it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch

from intaglio.eager.recording.events import RecordedTensor, leaves, tensors
from intaglio.eager.segments.qtensor import QTensor, deferred_tensor, plain, set_shape
from intaglio.eager.segments.trace_frame import UNREFERENCED_COUNT, TraceFrame
from intaglio.torch_private import storage_key


def written_tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator that works in place or has an `out` argument writes to."""
    if "out" in kwargs:
        return tensors(kwargs["out"])
    return tensors(args[0]) if args else tensors(list(kwargs.values())[:1])


def is_private(tensor: Any, frames: Collection[TraceFrame]) -> bool:
    """Return whether a write to this deferred tensor cannot be observed through a view, a base or another frame."""
    if type(tensor) is not QTensor or not isinstance(tensor.frame, TraceFrame):
        return False
    own = tensor.frame
    for number in own.segment.memory_groups.get(tensor.slot, ()):
        if not isinstance(number, int) or number in own.bound:
            return False
        other = own.deferred.get(number)
        if other is not None and other is not tensor and sys.getrefcount(other) > UNREFERENCED_COUNT:
            return False
    return not any(known is tensor for a in frames if a is not own for known in a.bound.values())


def isolate_written(written: Sequence[torch.Tensor], frames: Collection[TraceFrame]) -> set[int]:
    """Make deferred values independent of the memory that an in-place update is about to change.

    All deferred values are computed, the written tensors and their views leave their recordings, and operands that
    share their memory are replaced by copies.

    Args:
        written: Tensors that will be written to.
        frames: All frames of the call.

    Returns:
        Storage keys of the memory that will change.
    """
    for frame in frames:
        frame.compute_referenced()
    for tensor in written:
        if type(tensor) is QTensor and isinstance(tensor.frame, TraceFrame):
            detach_views(tensor.frame, tensor.slot)
    places = {storage_key(plain(tensor)) for tensor in written}
    for frame in frames:
        for number, known in frame.bound.items():
            if storage_key(plain(known)) in places:
                frame.bound[number] = plain(known).clone()
    return places


def update_shapes(written: Sequence[torch.Tensor]) -> None:
    """Give written tensors the shape of their contents, which may have changed as by `resize_`."""
    for tensor in written:
        if type(tensor) is QTensor and tensor.content is not None and tensor.content.shape != tensor.shape:
            set_shape(tensor, tensor.content.shape)


def detach_views(frame: TraceFrame, number: int) -> None:
    """Detach a value and all views of its memory from the frame.

    The tensors that the model holds become computed tensors with shared memory that belong to no recording. The frame
    keeps copies of them.
    """
    segment, made = frame.segment, frame.deferred
    contents = _recomputed_views(frame, segment.memory_groups.get(number, (number,)))
    for slot in list(made):
        q = made[slot]
        if q.slot not in contents:
            continue
        detached = deferred_tensor(q.shape, q.dtype, frame, q.slot)
        detached.content = contents[q.slot].clone()
        q.frame, q.content = None, contents[q.slot]
        made[slot] = detached
        frame.computed.add(detached.slot)


def _recomputed_views(frame: TraceFrame, group: Sequence[int | str]) -> dict[int, torch.Tensor]:
    """Recompute the values that share one memory as views of their root, the first entry of `group`."""
    root, segment = group[0], frame.segment
    found: dict[int, torch.Tensor] = {}
    if isinstance(root, int):
        base = frame.operand(root)
        if root not in frame.bound and (_belongs_to_graph(frame, root, base) or _is_shared(frame, base, group)):
            base = base.clone()
        found[root] = base
    for event in frame.events[: frame.next]:
        views = [number for number, _ in event.views if segment.view_bases[number] == root]
        if views:
            spec, result = segment.run_event(event, lambda n: found[n] if n in found else frame.operand(n), frame.size)
            made = {
                leaf: tensor
                for leaf, tensor in zip(leaves(spec), leaves(result), strict=True)
                if isinstance(leaf, RecordedTensor)
            }
            found.update({number: made[RecordedTensor(number)] for number in views})
    return found


def _belongs_to_graph(frame: TraceFrame, number: int, value: torch.Tensor) -> bool:
    """Return whether a value may be a constant of the graph, or a number that is expanded to many elements."""
    return number in frame.segment.constant_values or any(
        size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)
    )


def _is_shared(frame: TraceFrame, base: torch.Tensor, group: Sequence[int | str]) -> bool:
    """Return whether the base of these views shares memory with an unrelated value."""
    known = [plain(tensor) for tensor in frame.bound.values()]
    known += [q.content for q in frame.deferred.values() if q.content is not None and q.slot not in group]
    return storage_key(base) in {storage_key(tensor) for tensor in known}
