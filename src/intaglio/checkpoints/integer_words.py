"""Integers of 2, 4 and 8 bits in int32 words, and their zero points."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from intaglio.checkpoints.tensor_folder import DAMAGED
from intaglio.errors import ArtifactError
from intaglio.quant.imported_weights.quantized_weight import QuantizedWeight

WORD_BITS = (2, 4, 8)
"""Numbers of bits that divide a byte, so that no value is split between words."""


def unpack_words(words: torch.Tensor, bits: int) -> NDArray[np.uint8]:
    """Return the unsigned values in int32 words, the lowest bits first, as u8[..., 32 W / bits].

    Args:
        words: int32[..., W].
        bits: number of bits of a value, one of `WORD_BITS`.
    """
    octets = np.ascontiguousarray(words.numpy()).astype("<i4", copy=False).view(np.uint8)
    parts = [octets >> np.uint8(shift) for shift in range(0, 8, bits)]
    values: NDArray[np.uint8] = np.stack(parts, axis=-1) & np.uint8(2**bits - 1)
    return values.reshape(*octets.shape[:-1], -1)


def zero_centered(
    quantized: NDArray[np.uint8],
    zeros: NDArray[np.uint8],
    scales: torch.Tensor,
    group: int,
    activations: str = "float",
    order: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Return the weight ``scale * (q - zero)`` of unsigned integers with zero points.

    Integers whose distances from the zero point exceed int8 keep half of it as an offset, which is exact for scales of
    float16 and bfloat16.

    Args:
        quantized: u8[N, K].
        zeros: u8[N, G].
        scales: [N, G], of any floating-point type.
        group: number of inputs in a group.
        activations: see `QuantizedWeight`.
        order: see `QuantizedWeight`.
    """
    spread = np.repeat(zeros, group, axis=1)[:, : quantized.shape[1]]
    centered = quantized.astype(np.int16) - spread
    if centered.min(initial=0) >= -128 and centered.max(initial=0) <= 127:
        return QuantizedWeight.of(torch.from_numpy(centered.astype(np.int8)), scales, None, activations, group, order)
    signed = torch.from_numpy((quantized ^ np.uint8(128)).view(np.int8))
    offsets = (128 - torch.from_numpy(zeros.astype(np.float32))) * scales.to(torch.float32)
    return QuantizedWeight.of(signed, scales, offsets, activations, group, order)


def check_tensor(where: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise `ArtifactError` unless a tensor has this shape and one of these types."""
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        problem = f"it is {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}, not {names}{list(shape)}"
        raise ArtifactError(where, None, problem, remedy=DAMAGED)
