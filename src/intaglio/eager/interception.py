"""Torch function mode that intercepts a model, and a context manager that suspends it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.overrides import TorchFunctionMode

from intaglio.torch_private import EnableTorchFunction, current_function_mode, without_current_function_mode


class InterceptionMode(TorchFunctionMode):
    """Base class of the torch function mode that intercepts the operators of a prepared or converted model."""


@contextlib.contextmanager
def without_interception() -> Iterator[None]:
    """Suspend every interception of the current thread inside the `with` block."""
    if isinstance(current_function_mode(), InterceptionMode):
        with without_current_function_mode(), without_interception():
            yield
    else:
        with EnableTorchFunction():
            yield
