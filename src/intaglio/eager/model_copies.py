"""Copies of a model without the attributes and hooks that a preparation added, with shared or copied tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from intaglio.eager.recording.module_kinds import ids_inside_operators
from intaglio.runtime import QuantizedModel
from intaglio.torch_private import (
    buffers_of,
    call_hooks,
    load_state_dict_pre_hooks,
    parameters_of,
    state_dict_hooks,
    submodules_of,
)
from intaglio.tracing.copies.copy_model import copy_model


class Attachment:
    """Base class of the objects that a preparation attaches to modules. Copies for another preparation omit them."""


HOOKS_RECORDED = "_hooks_recorded"
"""Attribute of modules of a `plain_copy` whose hooks are recorded as operators of their own."""
NO_ATTRIBUTE = nn.Module()
"""Placeholder that a copy holds for an attachment until the attribute or submodule is deleted."""


def copy_without_attachments(model: nn.Module, tensors: dict[int, torch.Tensor] | None = None) -> nn.Module:
    """Copy a model without the attachments of its own preparation.

    Submodules that were prepared separately stay prepared.

    Args:
        model: Model to copy.
        tensors: Tensors by id that the copy shares with the model. All others are copied.
    """
    given: dict[int, Any] = dict(tensors or {})
    for attributes in _attached(model):
        given.update({id(value): NO_ATTRIBUTE for value in attributes.values() if isinstance(value, Attachment)})
    with torch.inference_mode(False):  # copies of inference tensors count their updates
        copied = copy_model(model, given)
    for attributes in _attached(copied):
        for name in [name for name, value in attributes.items() if value is NO_ATTRIBUTE]:
            del attributes[name]
    return copied


def plain_copy(model: nn.Module, leaf_classes: tuple[type, ...]) -> nn.Module:
    """Copy a model for `torch.export`, sharing its tensors.

    The copy has no submodules that export cannot trace (ScriptModules, compiled models, separately prepared modules),
    and no module of it works in place. Forward hooks of users, whose operators are recorded like those of the model,
    are left out, except inside of modules that count as one operator. Hooks of `torch.nn.utils`, which compute weights,
    stay.

    Args:
        model: Model to copy.
        leaf_classes: Modules of these classes stay in float.
    """
    copied = copy_without_attachments(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    inside = ids_inside_operators(copied, leaf_classes)
    for module in list(copied.modules()):
        if isinstance(module, torch.jit.ScriptModule):
            continue
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]  # nn.Module declares no attribute
        if id(module) not in inside:
            _leave_out_hooks(module)
        for name, child in list(module.named_children()):
            if isinstance(child, (torch.jit.ScriptModule, QuantizedModel)) or is_prepared(child):
                del submodules_of(module)[name]
    return copied


def _leave_out_hooks(module: nn.Module) -> None:
    object.__setattr__(module, HOOKS_RECORDED, True)
    for hooks in call_hooks(module):
        for key in [key for key, hook in hooks.items() if not _computes_weights(hook)]:
            del hooks[key]


def runs_global_hooks(module: nn.Module) -> bool:
    """Return whether hooks of all modules run for this module of a `plain_copy`. For others they are recorded."""
    return not hasattr(module, HOOKS_RECORDED)


def _computes_weights(hook: Any) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils.")


def own_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by path, without what a preparation attached."""
    return {path: module for path, module in model.named_modules() if not isinstance(module, Attachment)}


def is_prepared(module: nn.Module) -> bool:
    """Return whether `prepare` or `convert` was called on this module itself, not on a module that contains it."""
    state = getattr(module, "_auto_quant_state", None)
    return isinstance(state, Attachment) and cast("Any", state)._session.model is module


def ids_prepared_separately(model: nn.Module) -> set[int]:
    """Return the ids of all modules inside `model` that belong to a separate preparation."""
    roots = [module for module in model.modules() if module is not model and is_prepared(module)]
    return {id(inner) for root in roots for inner in root.modules()}


def _attached(model: nn.Module) -> Iterator[dict[Any, Any]]:
    """Yield the dictionaries that hold attachments: attributes, submodules and state dictionary hooks."""
    others = ids_prepared_separately(model)
    for module in model.modules():
        if id(module) not in others:
            yield from (vars(module), state_dict_hooks(module), load_state_dict_pre_hooks(module))
            yield submodules_of(module)


@contextlib.contextmanager
def restoring_state(model: nn.Module) -> Iterator[None]:
    """Restore the attributes, submodules and buffers of all modules after the `with` block."""
    tables = [
        (table, dict(table))
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for table in (vars(module), buffers_of(module), parameters_of(module), submodules_of(module))
    ]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    for table, before in tables:
        table.clear()
        table.update(before)
    for buffer, numbers in buffers:
        if not torch.equal(buffer, numbers):
            buffer.copy_(numbers)
