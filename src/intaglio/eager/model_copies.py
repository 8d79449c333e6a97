"""Copies of a model: without what a preparation attached to its modules, with tensors of its own or the same ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from intaglio.runtime import QuantizedModel
from intaglio.torch_private import load_state_dict_pre_hooks, state_dict_hooks, submodules_of


class Attachment:
    """Base of what a preparation attaches to modules; copies for another preparation leave it out."""


NO_ATTRIBUTE = object()
"""What a copy has first in place of an attachment."""


def bare(model: nn.Module, tensors: dict[int, torch.Tensor] | None = None) -> nn.Module:
    """Modules of its own, without what its own preparation attached; a part that was prepared by itself stays what it
    is. ``tensors``: by id, those that both have; else they are copied too."""
    memo: dict[int, Any] = dict(tensors or {})
    for home in _attached(model):
        memo.update({id(value): NO_ATTRIBUTE for value in home.values() if isinstance(value, Attachment)})
    copied: nn.Module = copy.deepcopy(model, memo)
    for home in _attached(copied):
        for name in [name for name, value in home.items() if value is NO_ATTRIBUTE]:
            del home[name]
    return copied


def plain_copy(model: nn.Module) -> nn.Module:
    """A bare copy around the same tensors, for torch.export: without the parts that it does not take, and operators of
    its modules do not work in place."""
    copied = bare(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    for module in list(copied.modules()):
        if isinstance(module, torch.jit.ScriptModule):
            continue
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
        for name, child in list(module.named_children()):
            if isinstance(child, (torch.jit.ScriptModule, QuantizedModel)) or is_prepared(child):
                del submodules_of(module)[name]
    return copied


def is_prepared(module: nn.Module) -> bool:
    """Whether it was prepared, or converted, by itself."""
    state = vars(module).get("_auto_quant_state")
    return isinstance(state, Attachment) and cast("Any", state)._session.model is module


def parts_prepared(model: nn.Module) -> set[int]:
    """Ids of the modules in it that belong to another preparation."""
    roots = [module for module in model.modules() if module is not model and is_prepared(module)]
    return {id(inner) for root in roots for inner in root.modules()}


def _attached(model: nn.Module) -> Iterator[dict[Any, Any]]:
    """Where attachments of its own preparation are: attributes, and hooks of the state dictionary."""
    others = parts_prepared(model)
    for module in model.modules():
        if id(module) not in others:
            yield from (vars(module), state_dict_hooks(module), load_state_dict_pre_hooks(module))
