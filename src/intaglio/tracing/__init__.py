"""Capture of an nn.Module as a canonical functional ATen graph with dynamic dimensions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from intaglio.argument_checks import check_arguments_except
from intaglio.errors import InputError
from intaglio.fxgraph.graph_passes import run
from intaglio.progress import report_progress
from intaglio.tracing.capture_check import disagreement, resized
from intaglio.tracing.capture_passes import CAPTURE_PASSES
from intaglio.tracing.captured import Captured, fx_text

__all__ = ["CAPTURE_PASSES", "Captured", "capture", "disagreement", "fx_text", "resized", "run"]


@check_arguments_except("model")
def capture(
    model: nn.Module,
    example_inputs: Any,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    free: Mapping[int, Collection[int]] = MappingProxyType({}),
    train: bool = False,
    copies_parameters: bool = True,
) -> Captured:
    """Capture a model as a functional ATen graph whose batch is dynamic if the model allows it.

    The graph is compared with the model at batch 1 and 3. If they differ, the shapes of the example stay fixed and the
    notes say why. The model is copied and never changed.

    Args:
        model: the float model.
        example_inputs: tuple of positional arguments, or one tensor. torch.export specializes batch 1, so such an
            example is repeated to batch 2.
        example_kwargs: keyword arguments (default: none).
        dynamic_shapes: shapes in the format of torch.export, which replace all automatic choices (default: the batch
            and the length of token ids are dynamic).
        free: leaf of the call -> axes that should be dynamic besides the batch and the length of token ids. With
            an empty set for a leaf, only its batch is.
        train: capture the model in training mode.
        copies_parameters: whether the captured model has parameters of its own. Without them it takes less memory, but
            changes to the model's parameters change it, too.

    Returns:
        The captured model, whose ``text()`` prints the graph and which can be called like the float model.

    Raises:
        CaptureError: the model cannot be captured.

    Examples:
        >>> captured = stages.capture(model, (torch.randn(2, 3, 224, 224),))
        >>> print(captured.text())
    """
    if isinstance(dynamic_shapes, (torch.Tensor, np.ndarray)):
        given = "a tensor" if isinstance(dynamic_shapes, torch.Tensor) else "an array"
        problem = f"dynamic_shapes is {given}; it takes dimensions in the format of torch.export"
        raise InputError("capture", None, problem, remedy="pass dynamic_shapes that fit the model: ({0: Dim('n')},)")
    report_progress("capture")
    from intaglio.tracing.trace import trace  # imported late, because torch.export takes a third of a second to import

    return trace(model, example_inputs, example_kwargs, dynamic_shapes, train, free, copies_parameters)
