"""Types of tensors in GGUF files: blocks of bytes that hold integers, scales and offsets, or floats.

Weights have the bits of their definition, because the products of scales and integers are exact in float32: float16
has 11 significant bits, integers and the scales that it multiplies have at most 12 together, and float32 has 24.
Offsets are exact as well, and their sum with the product is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NAMES_IN_ORDER = """
F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S
IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 IQ4_NL_4_8 IQ4_NL_8_8 MXFP4
NVFP4 Q1_0
"""
TYPE_NAMES: Mapping[int, str] = dict(enumerate(NAMES_IN_ORDER.split()))
"""Names of the types by their number in the file."""


@dataclass(frozen=True)
class ScaledGroups:
    """Integers with scales: each value is ``float32(q) * scale + offset`` of its group of neighbours.

    Attributes:
        quantized: int8[blocks, values].
        scales: float32[blocks, groups].
        offsets: float32[blocks, groups], or ``None``.
    """

    quantized: NDArray[np.int8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32] | None = None

    @property
    def size(self) -> int:
        """Return the number of values in a group."""
        return self.quantized.shape[1] // self.scales.shape[1]

    def values(self) -> NDArray[np.float32]:
        """Return the values, float32[blocks, values]."""
        products = self.quantized.reshape(*self.scales.shape, -1) * self.scales[..., None]
        found = products if self.offsets is None else products + self.offsets[..., None]
        return found.reshape(self.quantized.shape)


@dataclass(frozen=True)
class BlockType:
    """A type of tensors.

    Attributes:
        values: number of values in a block.
        octets: number of bytes of a block.
        floats: function that returns the float32 values of blocks u8[blocks, octets], for float types.
        groups: function that returns their integers with scales, for quantized types.
    """

    values: int
    octets: int
    floats: Callable[[NDArray[np.uint8]], NDArray[np.float32]] | None = None
    groups: Callable[[NDArray[np.uint8]], ScaledGroups] | None = None


def _float32(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return blocks.view("<f4").astype(np.float32)


def _float16(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return float16 numbers u8[..., 2 n] as float32[..., n]."""
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _bfloat16(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _halves(octets: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the low four bits of all bytes and then the high four bits, along the last axis."""
    return np.concatenate([octets & np.uint8(15), octets >> np.uint8(4)], axis=-1)


def _signed(values: NDArray[np.uint8], middle: int) -> NDArray[np.int8]:
    return (values.astype(np.int16) - middle).astype(np.int8)


def _q4_0(blocks: NDArray[np.uint8]) -> ScaledGroups:
    """Return groups of a float16 scale and 32 integers of 4 bits minus 8."""
    return ScaledGroups(_signed(_halves(blocks[:, 2:]), 8), _float16(blocks[:, :2]))


def _q4_1(blocks: NDArray[np.uint8]) -> ScaledGroups:
    """Return groups of a float16 scale, a float16 offset and 32 integers of 4 bits."""
    return ScaledGroups(_halves(blocks[:, 4:]).view(np.int8), _float16(blocks[:, :2]), _float16(blocks[:, 2:4]))


def _q5_0(blocks: NDArray[np.uint8]) -> ScaledGroups:
    """Return groups of a float16 scale and 32 integers of 5 bits minus 16. Their highest bits are in the first four
    bytes, those of the first integers in the lowest bits."""
    return ScaledGroups(_signed(_five_bits(blocks[:, 2:]), 16), _float16(blocks[:, :2]))


def _q5_1(blocks: NDArray[np.uint8]) -> ScaledGroups:
    """Return groups of a float16 scale, a float16 offset and 32 integers of 5 bits, which are stored as in Q5_0."""
    return ScaledGroups(_five_bits(blocks[:, 4:]).view(np.int8), _float16(blocks[:, :2]), _float16(blocks[:, 2:4]))


def _five_bits(octets: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the 32 integers of 5 bits in 20 bytes, as u8[..., 32]."""
    high = np.unpackbits(octets[:, :4], axis=1, bitorder="little")
    return _halves(octets[:, 4:]) | (high << np.uint8(4))


def _q8_0(blocks: NDArray[np.uint8]) -> ScaledGroups:
    """Return groups of a float16 scale and 32 integers of 8 bits."""
    return ScaledGroups(blocks[:, 2:].view(np.int8), _float16(blocks[:, :2]))


def _q4_k(blocks: NDArray[np.uint8]) -> ScaledGroups:
    """Return groups of 32 integers of 4 bits. A block has eight, and two float16 numbers, which multiply the scales of
    6 bits and the minima of 6 bits of its groups."""
    return ScaledGroups(
        _halves(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256).view(np.int8), *_scales_and_offsets(blocks)
    )


def _q5_k(blocks: NDArray[np.uint8]) -> ScaledGroups:
    """Return groups as in Q4_K, but of integers of 5 bits. Byte i has the highest bits of integer i of all groups, that
    of the first group in its lowest bit."""
    high = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").swapaxes(1, 2).reshape(-1, 256)
    low = _halves(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 256)
    return ScaledGroups((low | (high << np.uint8(4))).view(np.int8), *_scales_and_offsets(blocks))


def _scales_and_offsets(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the scales and offsets at the beginning of blocks of Q4_K and Q5_K, as float32[blocks, 8] each."""
    steps, (scales, minima) = _float16(blocks[:, :4]), _six_bits(blocks[:, 4:16])
    return steps[:, :1] * scales, -(steps[:, 1:] * minima)


def _six_bits(octets: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the eight scales and eight minima of 6 bits in 12 bytes, as float32[..., 8] each.

    The first four scales are in the low bits of the first four bytes, and the first four minima in those of the next
    four. The last four bytes have the low four bits of the other scales and, above, of the other minima; their high two
    bits are the high two of the first eight bytes.
    """
    first, second, last = octets[:, :4], octets[:, 4:8], octets[:, 8:]
    low, high = np.uint8(63), np.uint8(48)
    scales = np.concatenate([first & low, (last & np.uint8(15)) | (first >> np.uint8(2) & high)], axis=1)
    minima = np.concatenate([second & low, (last >> np.uint8(4)) | (second >> np.uint8(2) & high)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q6_k(blocks: NDArray[np.uint8]) -> ScaledGroups:
    """Return groups of 16 integers of 6 bits minus 32. A block has 16, and a float16 number, which multiplies the int8
    scales of its groups.

    Each half of a block has 128 values: their low four bits in 64 bytes, and the high two bits of values 32 apart in a
    byte.
    """
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)
    values = (low | (high << np.uint8(4))).reshape(-1, 256)
    return ScaledGroups(_signed(values, 32), _float16(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8))


BLOCK_TYPES: Mapping[str, BlockType] = {
    "F32": BlockType(1, 4, floats=_float32),
    "F16": BlockType(1, 2, floats=_float16),
    "BF16": BlockType(1, 2, floats=_bfloat16),
    "Q4_0": BlockType(32, 18, groups=_q4_0),
    "Q4_1": BlockType(32, 20, groups=_q4_1),
    "Q5_0": BlockType(32, 22, groups=_q5_0),
    "Q5_1": BlockType(32, 24, groups=_q5_1),
    "Q8_0": BlockType(32, 34, groups=_q8_0),
    "Q4_K": BlockType(256, 144, groups=_q4_k),
    "Q5_K": BlockType(256, 176, groups=_q5_k),
    "Q6_K": BlockType(256, 210, groups=_q6_k),
}
"""Types that are read, by name."""
