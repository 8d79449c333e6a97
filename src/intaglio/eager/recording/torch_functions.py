"""Classify functions of tensors: metadata queries, in-place operators, factories, and their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

METADATA_QUERIES = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "requires_grad",
        "requires_grad_",
        "is_leaf",
        "grad",
        "grad_fn",
        "names",
        "is_cpu",
        "is_cuda",
        "is_meta",
        "is_mkldnn",
        "is_mps",
        "is_quantized",
        "is_sparse",
        "is_nested",
        "itemsize",
        "nbytes",
        "size",
        "dim",
        "numel",
        "nelement",
        "ndimension",
        "stride",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "is_signed",
        "is_inference",
        "element_size",
        "get_device",
        "__len__",
        "__hash__",
        "is_same_size",
        "output_nr",
        "storage_offset",
        "_version",
        "is_tensor",
        "result_type",
        "can_cast",
        "promote_types",
    }
)
"""Names of functions and properties that neither read nor change the contents of a tensor."""
METADATA_FUNCTIONS = frozenset(
    getattr(found, "__get__", found) if inspect.isdatadescriptor(found) else found
    for home in (torch.Tensor, torch)
    for found in (getattr(home, name, None) for name in METADATA_QUERIES)
    if callable(found) or inspect.isdatadescriptor(found)
)
"""The functions with these names. A property is represented by its getter."""


def plain_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, for example `relu_`, or of the property of a getter, for example `shape`."""
    name: str = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        own = getattr(function, "__self__", None)
        return str(getattr(own, "__name__", "")) + ("" if name == "__get__" else f".{name}")
    return name


def works_in_place(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call changes its first argument."""
    name = plain_name(function)
    if name.endswith(".__set__") or kwargs.get("inplace") is True or name == "__setitem__":
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name.endswith("__") and hasattr(torch.Tensor, "__" + name[3:])
    return name.endswith("_") and not name.endswith("__")


def is_factory(function: Callable[..., Any] | None) -> bool:
    """Return whether a function reads shapes and data types of its arguments, but not their contents."""
    name = "" if function is None else plain_name(function)
    return name.endswith("_like") or (name.startswith("new_") and name != "new_tensor")


def is_uninitialized(function: Callable[..., Any] | None) -> bool:
    """Return whether a function allocates a tensor without writing to it."""
    return function is not None and plain_name(function).removeprefix("new_").startswith("empty")


def takes_numbers(function: Callable[..., Any] | None) -> bool:
    """Return whether a function makes a tensor of numbers of Python."""
    return function is not None and plain_name(function) in ("tensor", "as_tensor")


def initialized(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that fills with zeros what this one leaves uninitialized, so that a graph can be compared."""
    zeros: dict[str, Callable[..., Any]] = {"empty_like": torch.zeros_like, "new_empty": torch.Tensor.new_zeros}
    return zeros.get(plain_name(function), function)


def out_of_place(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the function of the usual name that computes the same out of place, or None if PyTorch lacks it."""
    name = plain_name(function)
    other = "__" + name[3:] if name.startswith("__i") else name.rstrip("_")
    if other == name or name == "__setitem__":
        return None
    home: Any = torch.Tensor if hasattr(torch.Tensor, name) else torch
    return getattr(home, other, None) or getattr(torch.nn.functional, other, None)


def attribute_path(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the attribute names that lead from `torch` to the function, or None if it is not a PyTorch function."""
    name = torch.overrides.resolve_name(function)
    if name is not None and name.startswith("torch."):
        parts = tuple(name.split(".")[1:])
        if function_at(parts) is function or function_at(parts) == function:
            return parts
    return None


def function_at(parts: tuple[str, ...]) -> Any:
    """Return the function that these attribute names lead to, starting at `torch`."""
    found: Any = torch
    for part in parts:
        found = getattr(found, part)
    return found
