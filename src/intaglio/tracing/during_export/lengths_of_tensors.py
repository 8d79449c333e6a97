"""``len(tensor)`` as a dynamic size while a model is exported."""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

OWN_LENGTHS = ("torch", "intaglio", *sys.stdlib_module_names)
"""Packages whose Python modules keep the ``len`` of Python."""


def size_or_length(value: Any) -> Any:
    """Return the first size of a tensor, which may be a ``torch.SymInt``, and the length of anything else."""
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else builtins.len(value)


@contextlib.contextmanager
def dynamic_lengths(model: nn.Module) -> Iterator[None]:
    """Let ``len(tensor)`` in the code of a model's modules return a dynamic size.

    Python's own ``len`` returns an ``int``, so that torch.export fixes the batch size of ``x.reshape(len(x), -1)``.
    The name ``len`` is defined in the Python modules that define classes of the model, other than those of PyTorch and
    of Python itself, and deleted again. Python modules that have their own ``len`` keep it.
    """
    changed = [scope for scope in _scopes(model) if "len" not in scope]
    for scope in changed:
        scope["len"] = size_or_length
    try:
        yield
    finally:
        for scope in changed:
            del scope["len"]


def _scopes(model: nn.Module) -> list[dict[str, Any]]:
    """Return the global variables of the Python modules that define classes of the model."""
    classes = {base for module in model.modules() for base in type(module).__mro__}
    names = {base.__module__ for base in classes if base.__module__ in sys.modules}
    return [vars(sys.modules[name]) for name in names if name.partition(".")[0] not in OWN_LENGTHS]
