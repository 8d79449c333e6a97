"""The captured graph against the float model, at batch 1 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intaglio.calls import bind, dims_of
from intaglio.capture.captured import Captured
from intaglio.errors import InputError
from intaglio.ir import Expression, evaluate, symbol, symbols_of

BATCHES = (1, 3)


def free_symbols(captured: Captured) -> set[str]:
    """Names of the free dimensions."""
    dims = [dim for entry in captured.signature.inputs for dim in entry.type.shape]
    return set().union(*[symbols_of(dim) for dim in dims]) if dims else set()


def disagreement(captured: Captured, model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> str | None:
    """Where graph and model differ, or ``None``. Tried at every batch in `BATCHES` if the batch is free."""
    try:
        dims_of(captured.signature, bind(captured.signature, args, kwargs))
    except InputError as error:
        return f"it does not take the example inputs: {error.problem}"
    free = free_symbols(captured)
    sizes = {f"batch {size}": _sizes(captured, args, kwargs, size) for size in BATCHES}
    calls = [(label, resized(captured, args, kwargs, found)) for label, found in sizes.items()]
    for label, (some_args, some_kwargs) in calls if free else [("the example inputs", (args, kwargs))]:
        try:
            with torch.no_grad():
                expected = model(*_copied(some_args), **_copied(some_kwargs))
        except Exception as error:
            return f"at {label} the model itself fails: {error}"
        try:
            got = captured(*_copied(some_args), **_copied(some_kwargs))
        except Exception as error:
            return f"at {label} the graph fails: {error}"
        if (difference := _difference(got, expected)) is not None:
            return f"at {label} {difference}"
    return None


def _sizes(captured: Captured, args: tuple, kwargs: Mapping[str, Any], batch: int) -> dict[str, int]:
    """Free dimensions as in the example, those on the first axis of an input at another size."""
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    sizes: dict[str, int] = {}
    for entry in captured.signature.inputs:
        for axis, dim in enumerate(entry.type.shape):
            names = symbols_of(dim)
            if len(names) == 1 and dim == symbol(*names):
                (name,) = names
                sizes[name] = batch if axis == 0 else sizes.get(name, leaves[entry.leaf].shape[axis])
    return {name: sizes.get(name, batch) for name in free_symbols(captured)}


def resized(captured: Captured, args: tuple, kwargs: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[tuple, dict]:
    """The example with every free dimension at another size, made by repeating and cutting."""
    leaves, tree = pytree.tree_flatten((args, dict(kwargs)))
    for entry in captured.signature.inputs:
        for axis, dim in enumerate(entry.type.shape):
            if isinstance(dim, Expression):
                leaves[entry.leaf] = _stretch(leaves[entry.leaf], axis, evaluate(dim, sizes))
    return pytree.tree_unflatten(leaves, tree)


def _stretch(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    times = [1] * tensor.dim()
    times[axis] = -(-size // max(tensor.shape[axis], 1))
    return tensor.repeat(times).narrow(axis, 0, size).clone()


def _copied(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)


def _difference(got: Any, expected: Any) -> str | None:
    left, left_tree = pytree.tree_flatten(got)
    right, right_tree = pytree.tree_flatten(expected)
    if left_tree != right_tree:
        return "the result has another structure"
    for a, b in zip(left, right, strict=True):
        if isinstance(b, torch.Tensor):
            if a.shape != b.shape:
                return f"a result has shape {list(a.shape)}, the model's {list(b.shape)}"
            if not torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-4 * _peak(b), equal_nan=True):
                return f"a result differs by {(a.double() - b.double()).abs().max():.3g}"
        elif a != b:
            return f"a result is {a!r}, the model's {b!r}"
    return None


def _peak(tensor: torch.Tensor) -> float:
    finite = tensor.double().abs()
    finite = finite[torch.isfinite(finite)]
    return max(finite.max().item(), 1e-6) if finite.numel() else 1e-6
