"""Constants of a graph: unique attribute names, and large tensors in temporary files."""

from __future__ import annotations

import mmap
import tempfile
import unicodedata

import torch
from torch import nn

LARGE_CONSTANT = 1 << 22
"""Bytes from which `in_file` moves a tensor to a file: 1024 x 1024 floats."""


def in_file(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor, which is in a temporary file that is mapped into memory if it is large.

    The system can use the memory of its pages for something else, so that a second copy of all weights of a model does
    not have to fit into memory. The file has no name and ends with the tensor. Without space for the file, the tensor
    is in memory.
    """
    tensor = tensor.contiguous()
    if tensor.nbytes < LARGE_CONSTANT:
        return tensor
    try:
        with tempfile.TemporaryFile() as file:
            file.write(tensor.view(torch.uint8).numpy().data)
            file.flush()
            memory = mmap.mmap(file.fileno(), tensor.nbytes, access=mmap.ACCESS_COPY)
    except OSError:
        return tensor
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


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
