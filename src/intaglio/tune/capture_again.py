"""Capture of a float model with the dynamic sizes that its quantized model was captured with."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from intaglio.errors import CaptureError
from intaglio.ir import Signature
from intaglio.quant.calibrate.batches import Call, binder_for
from intaglio.torch_private import pytree
from intaglio.tracing import Captured, capture

Axes = dict[int, tuple[int, ...]]
"""Leaf of a call -> its axes whose sizes are dynamic."""


def capture_again(model: nn.Module, item: Any, quantized: Any) -> Captured:
    """Capture a float model with one call, so that the sizes are dynamic that are dynamic in its quantized model.

    Args:
        model: the float model.
        item: a batch, or the arguments of a call.
        quantized: a quantized model or stage. Without a signature, the automatic choices of `capture` stay.
    """
    return capture_call_again(model, binder_for(model)(item), quantized)


def capture_call_again(model: nn.Module, call: Call, quantized: Any) -> Captured:
    """Return `capture_again` for the arguments of one call."""
    args, kwargs = call
    signature = getattr(quantized, "signature", None)
    if not isinstance(signature, Signature):
        return capture(model, args, example_kwargs=kwargs)
    wanted = _dynamic_axes(signature)
    captured = capture(model, args, example_kwargs=kwargs, free=wanted)
    if _dynamic_axes(captured.signature) != wanted:
        from intaglio.tracing.torch_export import free_axes  # late, because importing torch.export takes long

        leaves = pytree.tree_leaves((args, dict(kwargs)))
        axes = [wanted.get(leaf, ()) for leaf in range(len(leaves))]
        with contextlib.suppress(CaptureError):
            shapes = free_axes(model, args, kwargs, axes)
            return capture(model, args, example_kwargs=kwargs, dynamic_shapes=shapes)
    return captured


def _dynamic_axes(signature: Signature) -> Axes:
    found = Axes()
    for entry in signature.inputs:
        axes = tuple(axis for axis, size in enumerate(entry.type.shape) if not isinstance(size, int))
        if axes:
            found[entry.leaf] = axes
    return found
