"""Names of ATen overloads that modules look for, as `nodes.operator` returns them, and how to register others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

ADD_TARGET = "aten.add.Tensor"
DEQUANTIZE_GROUPS_TARGET = "intaglio.dequantize_groups.default"
"""Dequantizes a weight whose scales belong to groups of inputs; see `quant.imported_weights.group_operator`."""
CONV2D_TARGET = "aten.conv2d.default"
EMBEDDING_TARGET = "aten.embedding.default"
LINEAR_TARGET = "aten.linear.default"
RELU_TARGET = "aten.relu.default"
SDPA_TARGET = "aten.scaled_dot_product_attention.default"
SLICE_TARGET = "aten.slice.Tensor"
ARITHMETIC_TARGETS = (ADD_TARGET, "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor")
"""Elementwise arithmetic of two tensors; addition and subtraction may have a factor ``alpha``."""
OPERATOR_LIBRARIES: list[torch.library.Library] = []
"""Keeps libraries alive, because an operator is removed together with its library."""


def register_operators(operators: Mapping[str, tuple[str, Callable[..., Any], Callable[..., Any]]]) -> Any:
    """Register operators of PyTorch's library "intaglio" and return the namespace that has them.

    Args:
        operators: name -> schema, implementation, and implementation for fake tensors.
    """
    library = torch.library.Library("intaglio", "FRAGMENT")
    for name, (schema, meaning, fake) in operators.items():
        library.define(name + schema)
        library.impl(name, meaning, "CPU")
        torch.library.register_fake(f"intaglio::{name}", fake, lib=library)
    OPERATOR_LIBRARIES.append(library)
    return torch.ops.intaglio
