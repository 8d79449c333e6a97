"""`AutoQuantizationState`: what a module of a prepared or converted model saw, and how its calls are intercepted."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from intaglio.eager.run import current
from intaglio.eager.session import Session

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class AutoQuantizationState:
    """Of one module that is made of others; an attribute of it that no one who iterates modules sees."""

    def __init__(self, session: Session, path: str) -> None:
        self.session, self.path = session, path


class Call:
    """The forward of a module that is made of others."""

    def __init__(self, session: Session, module: nn.Module, path: str) -> None:
        self.session, self.module, self.path = session, module, path
        self.function = type(module).forward

    @property
    def __signature__(self) -> inspect.Signature:
        found = inspect.signature(self.function)
        return found.replace(parameters=list(found.parameters.values())[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = current.run
        if run is None or run.session is not self.session:
            return self.session.call(self.path, self._forward, args, kwargs)
        outer = run.path
        run.path = self.path
        if run.watches:
            run.enter(self.path)
        try:
            return self.function(self.module, *args, **kwargs)
        finally:
            run.path = outer
            if run.watches:
                run.leave(self.path)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.module, *args, **kwargs)


class LeafCall(Call):
    """The forward of a module of PyTorch's own: one operator."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = current.run
        if run is None or run.session is not self.session:
            return self.session.call(self.path, self, args, kwargs)
        return run.leaf(self.module, self.path, args, kwargs)


class OpaqueCall(Call):
    """The forward of a module that stays in float with all that is in it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = current.run
        if run is None or run.session is not self.session:
            return self._forward(*args, **kwargs)
        return run.opaque(self._forward, args, kwargs)


def attach(session: Session) -> None:
    """Has every module of the session's model intercepted."""
    inside: set[int] = set()
    for path, module in session.model.named_modules():
        if id(module) in inside or isinstance(module, torch.jit.ScriptModule):  # what those run is not intercepted
            continue
        kind = call_of(module, session.leaf_classes) if path else Call
        if kind is not Call:
            inside.update(map(id, module.modules()))
        if kind is Call or module is session.model:
            object.__setattr__(module, "_auto_quant_state", AutoQuantizationState(session, path))
        object.__setattr__(module, "forward", kind(session, module, path))


def call_of(module: nn.Module, leaf_classes: tuple[type, ...]) -> type[Call]:
    """How calls of a module are taken."""
    own = type(module)
    if isinstance(module, leaf_classes):
        return OpaqueCall
    if isinstance(module, CONTAINERS):
        return Call
    if _of_torch(own):
        return LeafCall
    base = next((kind for kind in own.__mro__ if _of_torch(kind) and kind is not nn.Module), None)
    if base is None or base in CONTAINERS:
        return Call
    overrides = own.forward is not base.forward  # type: ignore[attr-defined]
    return OpaqueCall if overrides else LeafCall


def _of_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.") and kind is not nn.Module and issubclass(kind, nn.Module)
