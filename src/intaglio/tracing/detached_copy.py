"""Copies of models that hold results of earlier calls."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from intaglio.torch_private import pytree


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
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
