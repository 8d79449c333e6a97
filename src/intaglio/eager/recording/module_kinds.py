"""The kinds of modules: those whose operators are intercepted one by one, and those that count as one operator."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeGuard

from torch import nn

from intaglio.runtime import QuantizedModel

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class ModuleKind(StrEnum):
    """One of the ways in which the call of a module is handled."""

    INTERCEPTED = "intercepted"
    """Its operators are intercepted one by one."""
    OPERATOR = "operator"
    """It is one operator, with everything inside it."""
    OPAQUE = "opaque"
    """It runs as it is, with everything inside it."""


def kind_of(module: nn.Module, leaf_classes: tuple[type, ...]) -> ModuleKind:
    """Return the kind of a module inside a model.

    Leaf classes, compiled models, and subclasses of `torch.nn` modules that override forward are opaque. Modules of
    `torch.nn` except containers, and subclasses that keep their forward, are operators. All others are intercepted.
    """
    own = type(module)
    if isinstance(module, (*leaf_classes, QuantizedModel)):
        return ModuleKind.OPAQUE
    if isinstance(module, CONTAINERS):
        return ModuleKind.INTERCEPTED
    if _of_torch(own):
        return ModuleKind.OPERATOR
    base = next((kind for kind in own.__mro__ if _of_torch(kind) and kind is not nn.Module), None)
    if base is None or base in CONTAINERS:
        return ModuleKind.INTERCEPTED
    return ModuleKind.OPAQUE if own.forward is not base.forward else ModuleKind.OPERATOR


def ids_inside_operators(model: nn.Module, leaf_classes: tuple[type, ...]) -> set[int]:
    """Return the ids of all modules that run as a part of another module, which counts as one operator."""
    found: set[int] = set()
    for path, module in model.named_modules():
        if path and id(module) not in found and kind_of(module, leaf_classes) is not ModuleKind.INTERCEPTED:
            found.update(id(inner) for inner in module.modules() if inner is not module)
    return found


def _of_torch(kind: type) -> TypeGuard[type[nn.Module]]:
    return kind.__module__.startswith("torch.nn.") and kind is not nn.Module and issubclass(kind, nn.Module)
