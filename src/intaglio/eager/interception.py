"""The function mode that marks intercepted code, and work in the middle of it that is not intercepted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.overrides import TorchFunctionMode

from intaglio.torch_private import EnableTorchFunction, current_function_mode, without_current_function_mode


class InterceptionMode(TorchFunctionMode):
    """Base class of the mode that intercepts a call of a prepared or converted model."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Suspend every interception of the current thread for our own work inside the ``with``."""
    if isinstance(current_function_mode(), InterceptionMode):
        with without_current_function_mode(), uninterrupted():
            yield
    else:
        with EnableTorchFunction():
            yield
