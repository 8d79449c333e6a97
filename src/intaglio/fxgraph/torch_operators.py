"""Operators of PyTorch's library "intaglio", which graphs call and whose implementations are reference functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

LIBRARIES: list[torch.library.Library] = []
"""Keeps the libraries alive, because an operator is removed together with its library."""


def register_operators(operators: Mapping[str, tuple[str, Callable[..., Any], Callable[..., Any]]]) -> Any:
    """Register operators and return the namespace that has them.

    Args:
        operators: name -> schema, implementation, and implementation for fake tensors.
    """
    library = torch.library.Library("intaglio", "FRAGMENT")
    for name, (schema, meaning, fake) in operators.items():
        library.define(name + schema)
        library.impl(name, meaning, "CPU")
        torch.library.register_fake(f"intaglio::{name}", fake, lib=library)
    LIBRARIES.append(library)
    return torch.ops.intaglio
