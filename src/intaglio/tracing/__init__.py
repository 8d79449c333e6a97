"""nn.Module -> canonical functional ATen graph with free dimensions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from intaglio.fxgraph.graph_passes import run
from intaglio.tracing.capture_check import disagreement, resized
from intaglio.tracing.capture_passes import CAPTURE_PASSES
from intaglio.tracing.captured import Captured, fx_text

__all__ = ["CAPTURE_PASSES", "Captured", "capture", "disagreement", "fx_text", "resized", "run"]


def capture(
    model: nn.Module,
    example_inputs: Any,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    free: Mapping[int, Collection[int]] = MappingProxyType({}),
    train: bool = False,
) -> Captured:
    """The model as a functional ATen graph; its batch is free where the model's own code allows.

    ``example_inputs``: a tuple of positional arguments (or one tensor). torch specialises an example of batch 1, so it
    is repeated to 2. ``free``: leaf of the call -> axes to leave free besides the batch, and the length of token ids,
    where the model's own code allows; or ``dynamic_shapes``, as torch.export takes them, says it all. The graph is
    checked against the model at batch 1 and 3; where they differ the shapes of the example stay fixed and ``notes``
    says why. The model is copied and never changed. Raises `CaptureError`.
    """
    from intaglio.tracing.trace import trace  # torch.export takes a third of a second to import

    return trace(model, example_inputs, example_kwargs, dynamic_shapes, train, free)
