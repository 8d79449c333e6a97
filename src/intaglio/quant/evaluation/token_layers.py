"""Linear layers with scales per token, computed as their kernels do: integer products, scaled afterwards."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from intaglio import numerics
from intaglio.numerics.row_quantization import ROW_STEPS
from intaglio.quant.evaluation.byte_products import byte_products
from intaglio.quant.qdq.row_blocks import by_row_blocks

SIGN_BIT = np.uint8(128)
"""Changes an unsigned byte with zero point 128 to a signed one."""


class TokenWeight(NamedTuple):
    """The quantized weight of a layer with scales per token.

    Attributes:
        quantized: the quantized values, int8 [outputs, inputs].
        scales: the scale of each output, or one for all, float32 [outputs] or [1].
    """

    quantized: torch.Tensor
    scales: torch.Tensor


def token_layer(x: torch.Tensor, weight: TokenWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the result of a layer for f32[..., inputs], with the bits of its kernels.

    It is `numerics.dequantize_rows` of the integer products of `numerics.quantize_rows`. Products of integers are
    exact, and take a quarter of the time of float32 products with VNNI.
    """
    rows = x.reshape(-1, x.shape[-1]).numpy()
    peaks = by_row_blocks(numerics.row_absmax, rows)
    quantized = by_row_blocks(lambda x, peaks: numerics.quantize_rows(x, peaks)[0] ^ SIGN_BIT, rows, peaks)
    products = byte_products(torch.from_numpy(quantized.view(np.int8)), weight.quantized).numpy()
    columns, added = weight.scales.numpy(), np.float32(0) if bias is None else bias.numpy()
    found = by_row_blocks(
        lambda products, scales: numerics.dequantize_rows(products, scales, columns, added),
        products,
        peaks / np.float32(ROW_STEPS),
    )
    return torch.from_numpy(found).reshape(*x.shape[:-1], len(weight.quantized))
