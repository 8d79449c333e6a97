"""Checks of tensors that users give to intaglio, whatever their shape and element type."""

from __future__ import annotations

from operator import mul
from typing import Any

import torch

from intaglio.errors import InputError
from intaglio.torch_private import pytree

PLAIN_TENSORS = "call the model outside of torch.func and of fake tensors, with tensors that hold their data"
TO_DENSE_ON_CPU = "convert it with .cpu(), .to_dense() or torch.nested.to_padded_tensor"


def unsupported_reason(tensor: torch.Tensor) -> str | None:
    """Return why a graph cannot take this tensor, or ``None`` if it is a dense tensor on the CPU."""
    if tensor.is_nested:
        return "it is a nested tensor; the model takes dense tensors"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; the model takes dense tensors"
    if tensor.device.type != "cpu":
        return f"it is on device {tensor.device}; the model runs on the CPU"
    return None


def memory_problem(tensor: torch.Tensor) -> str | None:
    """Return why the elements of a dense tensor cannot be read, or ``None`` if its storage holds all of them.

    Tensors of transforms (``torch.func``), fake tensors and wrapper subclasses have no memory of their own, and a
    storage may have been resized after the tensor was made.
    """
    if tensor.is_meta:
        return "it is on device meta, which holds no data"
    try:
        end = tensor.nbytes if tensor.is_contiguous() else bytes_spanned(tensor)
        held = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
        if not end or held >= end + tensor.storage_offset() * tensor.itemsize:
            return None
        problem = "its memory is smaller than its shape, or was freed"
    except (RuntimeError, NotImplementedError):  # of data_ptr() or untyped_storage()
        problem = "it has no memory"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        problem += f" ({type(tensor).__name__})"
    return problem


def bytes_spanned(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last one."""
    if not tensor.numel():
        return 0
    strides = tensor.stride()
    last = sum(map(mul, tensor.shape, strides)) - sum(strides)  # the sum of (size - 1) * stride
    return (last + 1) * tensor.itemsize


def check_memory_of(value: Any, where: str = "arguments") -> None:
    """Check that the dense tensors in nested arguments or data are in memory. Others are left to the model.

    Args:
        value: the arguments of a call, or a batch.
        where: what the value is, for the error.

    Raises:
        InputError: a tensor is not in memory.
    """
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, torch.Tensor) or leaf.is_nested or leaf.layout is not torch.strided:
            continue
        if leaf.device.type in ("cpu", "meta") and (problem := memory_problem(leaf)) is not None:
            raise InputError(where, None, f"a tensor cannot be read: {problem}", remedy=PLAIN_TENSORS)
