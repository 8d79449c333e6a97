"""In-place updates: before memory changes, compute deferred values that depend on it and make views share it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch

from intaglio.eager.recording.events import RecordedTensor, leaves, tensors
from intaglio.eager.segments.qtensor import QTensor, become, pending, plain
from intaglio.eager.segments.trace_frame import HELD_HERE, TraceFrame
from intaglio.torch_private import storage_key


def targets(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator that works in place or has an `out` argument writes to."""
    if "out" in kwargs:
        return tensors(kwargs["out"])
    return tensors(args[0]) if args else tensors(list(kwargs.values())[:1])


def memory(tensor: torch.Tensor) -> int:
    """Return the storage key of a plain tensor."""
    return storage_key(tensor)


def is_private(tensor: Any, frames: Collection[TraceFrame]) -> bool:
    """Return whether a write to this deferred tensor cannot be observed through a view, a base or another frame."""
    if type(tensor) is not QTensor or not isinstance(tensor.frame, TraceFrame):
        return False
    own = tensor.frame
    for number in own.segment.kin.get(tensor.slot, ()):
        if not isinstance(number, int) or number in own.bound:
            return False
        other = own.made.get(number)
        if other is not None and other is not tensor and sys.getrefcount(other) > HELD_HERE:
            return False
    return not any(known is tensor for a in frames if a is not own for known in a.bound.values())


def prepare_write(written: Sequence[torch.Tensor], frames: Collection[TraceFrame]) -> set[int]:
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
        frame.settle()
    for tensor in written:
        if type(tensor) is QTensor and isinstance(tensor.frame, TraceFrame):
            release(tensor.frame, tensor.slot)
    places = {memory(plain(tensor)) for tensor in written}
    for frame in frames:
        for number, known in frame.bound.items():
            if memory(plain(known)) in places:
                frame.bound[number] = plain(known).clone()
    return places


def reshape(written: Sequence[torch.Tensor]) -> None:
    """Give written tensors the shape of their contents, which may have changed as by `resize_`."""
    for tensor in written:
        if type(tensor) is QTensor and tensor.content is not None and tensor.content.shape != tensor.shape:
            become(tensor, tensor.content.shape)


def release(frame: TraceFrame, number: int) -> None:
    """Detach a value and all views of its memory from the frame.

    The tensors that the model holds become computed tensors with shared memory that belong to no recording. The frame
    keeps copies of them.
    """
    segment, made = frame.segment, frame.made
    contents = _contents(frame, segment.kin.get(number, (number,)))
    for slot in list(made):
        q = made[slot]
        if q.slot not in contents:
            continue
        twin = pending(q.shape, q.dtype, frame, q.slot)
        twin.content = contents[q.slot].clone()
        q.frame, q.content = None, contents[q.slot]
        made[slot] = twin
        frame.computed.add(twin.slot)


def _contents(frame: TraceFrame, kin: Sequence[int | str]) -> dict[int, torch.Tensor]:
    """Recompute the values that share one memory as views of their root, which is the first entry of `kin`."""
    root, segment = kin[0], frame.segment
    found: dict[int, torch.Tensor] = {}
    if isinstance(root, int):
        base = frame.operand(root)
        if root not in frame.bound and _is_shared(frame, base, kin):
            base = base.clone()
        found[root] = base
    for event in frame.events[: frame.next]:
        views = [number for number, _ in event.views if segment.roots[number] == root]
        if views:
            spec, result = segment.run_event(event, lambda n: found[n] if n in found else frame.operand(n), frame.size)
            made = {
                leaf: tensor
                for leaf, tensor in zip(leaves(spec), leaves(result), strict=True)
                if isinstance(leaf, RecordedTensor)
            }
            found.update({number: made[RecordedTensor(number)] for number in views})
    return found


def _is_shared(frame: TraceFrame, base: torch.Tensor, kin: Sequence[int | str]) -> bool:
    """Return whether the base of these views shares memory with an unrelated value."""
    known = [plain(tensor) for tensor in frame.bound.values()]
    known += [q.content for q in frame.made.values() if q.content is not None and q.slot not in kin]
    return memory(base) in {memory(tensor) for tensor in known}
