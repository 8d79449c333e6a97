"""Copies of float models, in which capture can change modes, attributes and buffers."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from intaglio.errors import CaptureError
from intaglio.torch_private import pytree
from intaglio.tracing.already_quantized import refuse_quantized


def copy_model(model: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a model.

    Tensors with a gradient history, which `copy.deepcopy` refuses, are detached in the copy: activations that a forward
    stored in an attribute, and weights that `torch.nn.utils.weight_norm` or pruning computed.

    Args:
        model: the model to copy.
        memo: what the copy has in place of other objects, by their id.
    """
    memo = dict(memo or {})
    for module in model.modules():
        for value in pytree.tree_leaves(vars(module)):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                memo.setdefault(id(value), value.detach().clone())
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied


def copy_with_parameters(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode that shares the parameters of a model, but not its buffers."""
    return copy_model(model, {id(one): one for one in model.parameters() if one.grad_fn is None}).eval()


def frozen_copy(model: nn.Module, training: bool, shared: Mapping[int, torch.Tensor]) -> nn.Module:
    """Return a copy of a float model in training or evaluation mode, so that the caller's model never changes.

    Args:
        model: the float model.
        training: the mode.
        shared: tensors of the model that the copy shares with it, by their id.

    Raises:
        CaptureError: the model is quantized, scripted, not on the CPU, cannot be copied, or has a name that the code of
            a graph cannot contain.
    """
    refuse_quantized(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "cpu":
            raise CaptureError(
                name,
                None,
                f"it is on device {tensor.device}; models are quantized on the CPU",
                remedy="load the weights first" if tensor.is_meta else "pass model.cpu(), and batches on the CPU",
            )
    _check_names(model)
    try:
        own = copy_model(model, shared)
        # torch.export replaces `train` of an exported module by a function that raises.
        if isinstance(own, fx.GraphModule):
            vars(own).pop("train", None)
        return own.train(training)
    except Exception as error:
        raise CaptureError(
            type(model).__name__, None, f"the model cannot be copied: {error}", remedy="make copy.deepcopy(model) work"
        ) from error


NOT_IN_CODE = re.compile(r'["\\\n\r\0\ud800-\udfff]')
"""Characters that torch.fx writes into the code of a graph as they are, where Python does not read them back."""


def _check_names(model: nn.Module) -> None:
    """Refuse names that the code of a graph cannot contain.

    Raises:
        CaptureError: a module, parameter or buffer has such a name.
    """
    parts = (model.named_modules(), model.named_parameters(), model.named_buffers())
    for path in (path for found in parts for path, _ in found):
        if NOT_IN_CODE.search(path):
            raise CaptureError(
                repr(path),
                None,
                "torch.fx cannot write a graph with this name; names may have no double quote, backslash, line break, "
                "null character or surrogate",
                remedy="give the module, parameter or buffer another name",
            )
