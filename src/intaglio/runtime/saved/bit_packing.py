"""Lossless packing of constants with fewer than 8 bits: consecutive quantized values, and for each group a multiple or
a smallest value."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from intaglio.ir import Packing
from intaglio.numerics.multiples_of_groups import LARGEST_MULTIPLE, smallest_multiples

MULTIPLE_BITS = (LARGEST_MULTIPLE - 1).bit_length()
"""Number of bits in which ``multiple - 1`` is stored."""
HALF_BYTE = 4
"""Number of bits in half a byte, which need no arrays of bits."""
BITS_AT_ONCE = 1 << 20
"""Number of quantized values that are unpacked at a time, a multiple of 8, so that blocks end at byte boundaries."""


def pack(array: np.ndarray, packing: Packing) -> tuple[np.ndarray, np.ndarray] | None:
    """Pack an int8 array into bits.

    The multiple of a group is the smallest divisor for which all quotients are integers that fit the bits, so that the
    division is exact.

    Args:
        array: s8[c, ...].
        packing: number of bits, lowest value and group size.

    Returns:
        u8 bytes of quantized values and u8 bytes of multiples or of smallest values, or ``None`` if the array does not
        fit the packing.
    """
    flat = array.reshape(len(array), -1)
    rows = flat.astype(np.int16)
    if packing.lows:
        lowest = _groups(rows, packing.lows, "edge").min(-1)
        above = rows - _of_values(lowest, packing.lows, rows.shape[1])
        if above.max(initial=0) >= 2**packing.bits:
            return None
        return pack_bits(above.ravel(), packing.bits), (lowest + 128).astype(np.uint8).ravel()
    high = packing.low + 2**packing.bits - 1
    multiples = np.ones((len(rows), 1), np.uint8)
    if packing.group:
        multiples = smallest_multiples(_groups(flat, packing.group), packing.low, high)
        rows //= _of_values(multiples, packing.group, rows.shape[1])
    if rows.size and not packing.low <= rows.min() <= rows.max() <= high:
        return None
    quantized = pack_bits(rows.ravel() - packing.low, packing.bits)
    return quantized, pack_bits(multiples.ravel() - 1, MULTIPLE_BITS) if packing.group else np.zeros(0, np.uint8)


def unpack(quantized: np.ndarray, of_groups: np.ndarray, packing: Packing, shape: tuple[int, ...]) -> np.ndarray:
    """Return int8 values of ``shape``, the inverse of `pack`.

    Raises `ValueError` for another number of bytes, or for values that int8 cannot hold.
    """
    count = math.prod(shape)
    values = unpack_bits(quantized, packing.bits, count)
    if count and packing.group and count % (shape[0] * packing.group) == 0 and _fits_int8(packing):
        multiples = unpack_bits(of_groups, MULTIPLE_BITS, count // packing.group).view(np.int8) + np.int8(1)
        found = values.view(np.int8).reshape(-1, packing.group)
        found += packing.low
        found *= multiples[:, None]
        return found.reshape(shape)
    wide = values.astype(np.int16)
    if not packing.lows:
        wide += packing.low
    if (packing.group or packing.lows) and count:
        rows = wide.reshape(shape[0], -1)
        group = min(packing.group or packing.lows, rows.shape[1])
        parts, bits = -(-rows.shape[1] // group), MULTIPLE_BITS if packing.group else 8
        each = unpack_bits(of_groups, bits, shape[0] * parts).astype(np.int16).reshape(shape[0], parts)
        each += 1 if packing.group else -128
        own = _of_values(each, group, rows.shape[1])
        (np.multiply if packing.group else np.add)(rows, own, out=rows)
    if count and not -128 <= wide.min() <= wide.max() <= 127:
        raise ValueError("the quantized values exceed 8 bits")
    return wide.astype(np.int8).reshape(shape)


def _fits_int8(packing: Packing) -> bool:
    """Return whether int8 holds every value times every multiple."""
    low, high = packing.low, packing.low + 2**packing.bits - 1
    return -128 <= LARGEST_MULTIPLE * low <= LARGEST_MULTIPLE * high <= 127


def pack_bits(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack numbers below ``2**bits`` without gaps, highest bit first. The last byte is padded with zeros."""
    if bits == HALF_BYTE:
        pairs = np.zeros((len(values) + 1) // 2 * 2, np.uint8)
        pairs[: len(values)] = values
        return pairs[::2] << HALF_BYTE | pairs[1::2]
    blocks = [values[start : start + BITS_AT_ONCE].astype(np.uint8) for start in range(0, len(values), BITS_AT_ONCE)]
    packed = [np.packbits(np.unpackbits(block[:, None], axis=1)[:, 8 - bits :]) for block in blocks]
    return np.concatenate(packed) if packed else np.zeros(0, np.uint8)


def unpack_bits(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return u8[count], the inverse of `pack_bits`. Raise `ValueError` if the number of bytes is wrong."""
    if data.dtype != np.uint8 or data.shape != (-(-count * bits // 8),):
        raise ValueError(f"{data.dtype}{list(data.shape)} cannot hold {count} numbers of {bits} bits")
    if bits == HALF_BYTE:
        return np.stack([data >> HALF_BYTE, data & ((1 << HALF_BYTE) - 1)], axis=1).ravel()[:count]
    values = np.zeros(count, np.uint8)
    for start in range(0, count, BITS_AT_ONCE):
        part = values[start : start + BITS_AT_ONCE]
        found = np.unpackbits(data[start * bits // 8 :][: -(-len(part) * bits // 8)])[: len(part) * bits]
        for bit in found.reshape(len(part), bits).T:
            part[:] = part << 1 | bit
    return values


def _groups(rows: np.ndarray, group: int, padding: Literal["constant", "edge"] = "constant") -> np.ndarray:
    """Reshape [c, k] to [c, groups, size], with zeros, or the last value, as padding of the last group."""
    mode = padding if rows.size else "constant"
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % group)), mode).reshape(len(rows), -1, group)


def _of_values(of_groups: np.ndarray, group: int, count: int) -> np.ndarray:
    """Repeat numbers of groups [c, groups] for the values of each group, [c, count]."""
    return np.repeat(of_groups, group, axis=1)[:, :count]
