"""The function mode that marks intercepted code, and work in the middle of it that is not intercepted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily


class InterceptionMode(TorchFunctionMode):
    """Base class of the mode that intercepts a call of a prepared or converted model."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Suspend every interception of the current thread for our own work inside the ``with``."""
    if isinstance(_get_current_function_mode(), InterceptionMode):
        with _pop_mode_temporarily(), uninterrupted():
            yield
    else:
        with torch._C._EnableTorchFunction():
            yield
