"""Copies of a model: without what a preparation attached to its modules, with tensors of its own or the same ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class Attachment:
    """Base of what a preparation attaches to modules; copies for another preparation leave it out."""


ABSENT = object()
"""What a copy has first in place of an attachment."""


def bare(model: nn.Module, tensors: dict[int, torch.Tensor] | None = None) -> nn.Module:
    """Modules of its own, without attachments. ``tensors``: by id, those that both have; else they are copied too."""
    memo: dict[int, Any] = dict(tensors or {})
    for module in model.modules():
        for home in _homes(module):
            memo.update({id(value): ABSENT for value in home.values() if isinstance(value, Attachment)})
    copied: nn.Module = copy.deepcopy(model, memo)
    for module in copied.modules():
        for home in _homes(module):
            for name in [name for name, value in home.items() if value is ABSENT]:
                del home[name]
    return copied


def plain_copy(model: nn.Module) -> nn.Module:
    """A bare copy around the same tensors; operators of its modules do not work in place."""
    copied = bare(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    for module in list(copied.modules()):
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
        for name, child in module.named_children():
            if isinstance(child, torch.jit.ScriptModule):  # torch.export takes no model that has one
                del module._modules[name]
    return copied


def _homes(module: nn.Module) -> Iterator[dict[Any, Any]]:
    """Where attachments are: attributes, and hooks of the state dictionary."""
    yield from (vars(module), module._state_dict_hooks, module._load_state_dict_pre_hooks)
