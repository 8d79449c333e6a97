"""Attribute names of a graph's constants."""

from __future__ import annotations

import torch
from torch import nn


def unique_name(module: nn.Module, stem: str) -> str:
    """Return the stem, with as many ``_`` behind it as make it a name that the module does not have."""
    while hasattr(module, stem):
        stem += "_"
    return stem


def add_constant(module: nn.Module, stem: str, tensor: torch.Tensor) -> str:
    """Register a buffer under a name of its own, made of the stem, and return the name."""
    name = unique_name(module, stem)
    module.register_buffer(name, tensor)
    return name
