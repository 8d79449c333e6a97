"""Unique attribute names for constants of a graph."""

from __future__ import annotations

import torch
from torch import nn


def unique_name(module: nn.Module, stem: str) -> str:
    """Return `stem` with as many ``_`` appended as make it unique in the module."""
    while hasattr(module, stem):
        stem += "_"
    return stem


def add_constant(module: nn.Module, stem: str, tensor: torch.Tensor) -> str:
    """Register a buffer under a unique name derived from `stem`, and return the name."""
    name = unique_name(module, stem)
    module.register_buffer(name, tensor)
    return name
