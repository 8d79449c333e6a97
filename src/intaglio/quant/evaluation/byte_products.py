"""Exact products of matrices of signed bytes."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from intaglio.native.cpu import IsaName, isas
from intaglio.torch_private import int8_matmul

MOST_PRODUCTS = 1 << 16
"""Products of signed bytes whose sum always fits into an int32."""
EXACT_PRODUCTS = 1 << 10
"""Products of signed bytes, at most 2^14 each, whose sum float32 represents exactly."""


def byte_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a b^T`` of int8 [rows, k] in int32, for k up to `MOST_PRODUCTS`."""
    return integer_products(a, b) if IsaName.AVX512VNNI in isas() else float_products(a, b)


def integer_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a b^T`` of int8 [rows, k] in int32, by int8 products."""
    if a.shape[1] == 1:  # _int_mm misreads the strides of a single column.
        a, b = F.pad(a, (0, 1)), F.pad(b, (0, 1))
    return int8_matmul(a, b.t())


def float_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a b^T`` of int8 [rows, k] in int32, by exact float32 products of `EXACT_PRODUCTS` columns at a time.

    On a processor without VNNI this is 20 times as fast as PyTorch's int8 product (31 and 1.2 GMAC/s on a Zen 3 core).
    """
    total = torch.zeros(len(a), len(b), dtype=torch.int32)
    for part, other in zip(a.split(EXACT_PRODUCTS, 1), b.split(EXACT_PRODUCTS, 1), strict=True):
        total += (part.float() @ other.float().t()).to(torch.int32)
    return total
