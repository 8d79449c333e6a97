"""Writes that others can see: before a tensor is written to, what was deferred is computed and views share memory."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch

from intaglio.eager.activation import HELD_HERE, Activation
from intaglio.eager.events import Value, leaves, tensors
from intaglio.eager.tensor import QTensor, become, pending, plain


def targets(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """What an operator that works in place, or has ``out``, writes to."""
    if "out" in kwargs:
        return tensors(kwargs["out"])
    return tensors(args[0]) if args else tensors(list(kwargs.values())[:1])


def memory(tensor: torch.Tensor) -> int:
    """The storage a plain tensor lies in."""
    return tensor.untyped_storage()._cdata


def is_private(tensor: Any, activations: Collection[Activation]) -> bool:
    """Whether a deferred value has no view or base that anyone could see a write through."""
    if type(tensor) is not QTensor or tensor.activation is None:
        return False
    own = tensor.activation
    for number in own.chain.kin.get(tensor.slot, ()):
        if not isinstance(number, int) or number in own.bound:
            return False
        other = own.made.get(number)
        if other is not None and other is not tensor and sys.getrefcount(other) > HELD_HERE:
            return False
    return not any(known is tensor for a in activations if a is not own for known in a.bound.values())


def prepare_write(written: Sequence[torch.Tensor], activations: Collection[Activation]) -> set[int]:
    """Has nothing deferred depend on what these tensors are now; the storages that will change."""
    for activation in activations:
        activation.settle()
    for tensor in written:
        if type(tensor) is QTensor and tensor.activation is not None:
            release(tensor.activation, tensor.slot)
    places = {memory(plain(tensor)) for tensor in written}
    for activation in activations:
        for number, known in activation.bound.items():
            if memory(plain(known)) in places:
                activation.bound[number] = plain(known).clone()
    return places


def reshape(written: Sequence[torch.Tensor]) -> None:
    """What was written to has the shape that its numbers got, as by ``resize_``."""
    for tensor in written:
        if type(tensor) is QTensor and tensor.content is not None and tensor.content.shape != tensor.shape:
            become(tensor, tensor.content.shape)


def release(activation: Activation, number: int) -> None:
    """The value and all that is a view of the same memory become tensors that share it and belong to no recording; the
    recording keeps copies."""
    chain, made = activation.chain, activation.made
    contents = _contents(activation, chain.kin.get(number, (number,)))
    for slot in list(made):
        q = made[slot]
        if q.slot not in contents:
            continue
        twin = pending(q.shape, q.dtype, activation, q.slot)
        twin.content = contents[q.slot].clone()
        q.activation, q.content = None, contents[q.slot]
        made[slot] = twin
        activation.computed.add(twin.slot)


def _contents(activation: Activation, kin: Sequence[int | str]) -> dict[int, torch.Tensor]:
    """Values of one memory, made anew from the one they are views of, which comes first."""
    root, chain = kin[0], activation.chain
    found: dict[int, torch.Tensor] = {}
    if isinstance(root, int):
        base = activation.operand(root)
        if root not in activation.bound and _is_shared(activation, base, kin):
            base = base.clone()
        found[root] = base
    for event in activation.events[: activation.next]:
        views = [number for number, _ in event.views if chain.roots[number] == root]
        if views:
            spec, result = chain.run_event(
                event, lambda n: found[n] if n in found else activation.operand(n), activation.size
            )
            made = {
                leaf: tensor
                for leaf, tensor in zip(leaves(spec), leaves(result), strict=True)
                if isinstance(leaf, Value)
            }
            found.update({number: made[Value(number)] for number in views})
    return found


def _is_shared(activation: Activation, base: torch.Tensor, kin: Sequence[int | str]) -> bool:
    """Whether a graph gave, as the base of views, memory that another value lies in too."""
    known = [plain(tensor) for tensor in activation.bound.values()]
    known += [q.content for q in activation.made.values() if q.content is not None and q.slot not in kin]
    return memory(base) in {memory(tensor) for tensor in known}
