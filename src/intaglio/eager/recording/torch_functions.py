"""What functions of tensors are to an interception: operators, questions about a tensor, reads of its numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

QUESTIONS = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "requires_grad",
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
"""Answered without the numbers of a tensor."""
QUESTION_FUNCTIONS = frozenset(
    getattr(found, "__get__", found) if inspect.isdatadescriptor(found) else found
    for home in (torch.Tensor, torch)
    for found in (getattr(home, name, None) for name in QUESTIONS)
    if callable(found) or inspect.isdatadescriptor(found)
)
"""The same as functions; of a property it is the getter."""


def plain_name(function: Callable[..., Any]) -> str:
    """``shape`` of a property's getter, ``relu_`` of a function or method."""
    name: str = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        own = getattr(function, "__self__", None)
        return str(getattr(own, "__name__", "")) + ("" if name == "__get__" else f".{name}")
    return name


def works_in_place(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call changes its first argument."""
    name = plain_name(function)
    if name.endswith(".__set__") or kwargs.get("inplace") is True or name == "__setitem__":
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name.endswith("__") and hasattr(torch.Tensor, "__" + name[3:])
    return name.endswith("_") and not name.endswith("__")


def is_factory(function: Callable[..., Any] | None) -> bool:
    """Whether a function reads sizes and types of its arguments, but none of their numbers."""
    name = "" if function is None else plain_name(function)
    return name.endswith("_like") or (name.startswith("new_") and name != "new_tensor")


def out_of_place(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function that computes the same without changing its argument, if PyTorch has it under the usual name."""
    name = plain_name(function)
    other = "__" + name[3:] if name.startswith("__i") else name.rstrip("_")
    if other == name or name == "__setitem__":
        return None
    home: Any = torch.Tensor if hasattr(torch.Tensor, name) else torch
    return getattr(home, other, None) or getattr(torch.nn.functional, other, None)


def spelling(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Attribute names that lead from torch to the function, for files; `None` of one that is not PyTorch's."""
    name = torch.overrides.resolve_name(function)
    if name is not None and name.startswith("torch."):
        parts = tuple(name.split(".")[1:])
        if named(parts) is function or named(parts) == function:
            return parts
    return None


def named(parts: tuple[str, ...]) -> Any:
    """What these attribute names lead to."""
    found: Any = torch
    for part in parts:
        found = getattr(found, part)
    return found
