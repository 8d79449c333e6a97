"""Unique attribute names for constants of a graph."""

from __future__ import annotations

import unicodedata

import torch
from torch import nn


def unique_name(module: nn.Module, stem: str) -> str:
    """Return `stem` with as many ``_`` appended as make it unique in the module."""
    while hasattr(module, stem):
        stem += "_"
    return stem


def add_constant(module: nn.Module, stem: str, tensor: torch.Tensor) -> str:
    """Register a buffer under a unique name derived from `stem`, and return the name.

    The name is normalized as Python normalizes identifiers: torch.fx prints it as the name of an attribute, and Python
    reads "µ", the micro sign, as the Greek letter.
    """
    name = unique_name(module, unicodedata.normalize("NFKC", stem))
    module.register_buffer(name, tensor)
    return name
