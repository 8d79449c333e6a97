"""The PyTorch operator that dequantizes weights whose scales belong to groups of inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from intaglio.fxgraph.nodes import is_constant, operator
from intaglio.fxgraph.overloads import DEQUANTIZE_GROUPS_TARGET


def grouped_weight(node: fx.Node | None) -> tuple[fx.Node, fx.Node, int] | None:
    """Return the constants with the integers and the steps that a node dequantizes, and the size of the groups.

    ``None`` for any other node.
    """
    if node is None or operator(node) != DEQUANTIZE_GROUPS_TARGET:
        return None
    quantized, steps, group = node.args
    return (quantized, steps, group) if is_constant(quantized) and is_constant(steps) else None


def dequantize_groups(quantized: torch.Tensor, steps: torch.Tensor, group: int) -> torch.Tensor:
    """Compute `numerics.float_math.dequantize_groups` with ATen operators, with the same bits."""
    rows = quantized.reshape(quantized.shape[0], -1)
    count = rows.shape[1]
    scales, *offsets = (part.repeat_interleave(group, 1)[:, :count] for part in steps.unbind(0))
    real = rows.to(torch.float32) * scales
    for offset in offsets:
        real = real + offset
    return real.reshape(quantized.shape)


def _dequantize_fake(quantized: torch.Tensor, steps: torch.Tensor, group: int) -> torch.Tensor:
    return torch.empty_like(quantized, dtype=torch.float32)


@functools.cache
def dequantize_groups_operator() -> Any:
    """Return the operator ``intaglio::dequantize_groups``, which is registered on first use."""
    library = torch.library.Library("intaglio", "FRAGMENT")
    library.define("dequantize_groups(Tensor quantized, Tensor steps, int group) -> Tensor")
    library.impl("dequantize_groups", dequantize_groups, "CPU")
    torch.library.register_fake("intaglio::dequantize_groups", _dequantize_fake, lib=library)
    GROUP_LIBRARIES.append(library)
    return torch.ops.intaglio.dequantize_groups.default


GROUP_LIBRARIES: list[torch.library.Library] = []
"""Keeps the library alive, because an operator is removed together with its library."""


def group_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decomposition of the operator into ATen operators, with bit-identical results."""
    return {dequantize_groups_operator(): dequantize_groups}
