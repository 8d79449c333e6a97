"""The PyTorch operator for linear layers of mixtures of experts, which graphs have in place of grouped products."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional as F

from intaglio.ops.products.grouped_linear import rows_of_groups

GROUPED_LINEAR_SCHEMA = "grouped_linear(Tensor input, Tensor weight, Tensor? bias, Tensor ends) -> Tensor"
GROUPED_LINEAR_LIBRARIES: list[torch.library.Library] = []
"""Keeps the library alive, because an operator is removed together with its library."""


@functools.cache
def grouped_linear() -> Any:
    """Return the operator, registered on first use.

    It multiplies each group of rows of f32[rows, K] by its part of a weight f32[groups * N, K], and adds its part of a
    bias f32[groups * N] if there is one. `intaglio.ops.products.grouped_linear` defines the groups.
    """
    library = torch.library.Library("intaglio", "FRAGMENT")
    library.define(GROUPED_LINEAR_SCHEMA)
    library.impl("grouped_linear", _multiply, "CPU")
    torch.library.register_fake("intaglio::grouped_linear", _fake, lib=library)
    torch.library.register_autograd("intaglio::grouped_linear", _gradients, setup_context=_save_operands, lib=library)
    GROUPED_LINEAR_LIBRARIES.append(library)
    return torch.ops.intaglio.grouped_linear.default


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor) -> torch.Tensor:
    groups = len(ends)
    found = x.new_zeros(len(x), len(weight) // groups)
    weights, biases = weight.chunk(groups), (None,) * groups if bias is None else bias.chunk(groups)
    for rows, own, offset in zip(rows_of_groups(ends.numpy(), len(x)), weights, biases, strict=True):
        found[rows] = F.linear(x[rows], own, offset)
    return found


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // ends.shape[0])


def _save_operands(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    x, weight, bias, ends = inputs
    ctx.save_for_backward(x, weight, ends)
    ctx.has_bias = bias is not None


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the rows, the weight and the bias."""
    x, weight, ends = ctx.saved_tensors
    of_x, of_weight = torch.zeros_like(x), torch.zeros_like(weight)
    of_bias = weight.new_zeros(len(weight)) if ctx.has_bias else None
    outputs = len(weight) // len(ends)
    for group, rows in enumerate(rows_of_groups(ends.numpy(), len(x))):
        own = slice(group * outputs, (group + 1) * outputs)
        of_x[rows] = gradient[rows] @ weight[own]
        of_weight[own] = gradient[rows].t() @ x[rows]
        if of_bias is not None:
            of_bias[own] = gradient[rows].sum(0)
    return of_x, of_weight, of_bias, None
