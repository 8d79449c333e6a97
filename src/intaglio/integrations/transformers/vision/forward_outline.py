"""Runs of the forward of a module with other functions in place of those that its code calls, also without the results
of its submodules.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from intaglio.tracing.during_export.earlier_results import plain_attributes


def run_forward(module: nn.Module, replaced: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Run the forward of a module's class, without its decorators, with other values of names that its code reads.

    Args:
        module: the module.
        replaced: values by the names that they have in the Python module of the class.
        given: arguments of forward.
    """
    forward: Any = inspect.unwrap(type(module).forward)
    names = {**forward.__globals__, **replaced}
    own = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return own(module, **given)


def outline_of(module: nn.Module) -> nn.Module:
    """Return a module of the same class without tensors, whose submodules return `Unknown`."""
    found: nn.Module = object.__new__(type(module))
    nn.Module.__init__(found)
    vars(found).update(plain_attributes(module))
    first = next(module.parameters(), torch.empty(0))
    found.empty = nn.Parameter(torch.empty(0, dtype=first.dtype), requires_grad=False)  # models have its data type
    for name, _ in module.named_children():
        found.add_module(name, NotRun())
    return found


class Unknown:
    """The result of a module that was not run, and whatever attribute, item, sum or product is made of it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Unknown:
        """Return what is not known either."""
        return self

    def __getattr__(self, name: str) -> Unknown:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __call__


class NotRun(nn.Module):
    """A submodule, or a list of submodules, that is not run."""

    def forward(self, *args: Any, **kwargs: Any) -> Unknown:
        """Return what a submodule would."""
        return Unknown()

    def __getattr__(self, name: str) -> Any:
        return Unknown() if name[:1] != "_" else super().__getattr__(name)

    def __getitem__(self, key: Any) -> NotRun:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())
