"""Constants of few bits as a file holds them: levels one after the other, and the multiples of groups. Exact."""

from __future__ import annotations

import math

import numpy as np

from intaglio.ir import Packing

MULTIPLE_BITS = 4
"""Of a multiple less one."""
BITS_AT_ONCE = 1 << 20
"""Levels whose bits are in memory at a time; a multiple of 8, so that blocks end where bytes do."""


def pack(array: np.ndarray, packing: Packing) -> tuple[np.ndarray, np.ndarray] | None:
    """int8 [C, ...] -> bytes of levels and of multiples; ``None`` when the numbers are none that ``packing`` says.

    A group's multiple is the smallest that leaves whole levels within the bits: dividing by it loses nothing.
    """
    rows = array.reshape(len(array), -1).astype(np.int16)
    high = packing.low + 2**packing.bits - 1
    multiples = np.ones((len(rows), 1), np.int16)
    if packing.group:
        groups = _groups(rows, packing.group)
        multiples = _multiples(groups, packing.low, high)
        rows = (groups // multiples[..., None]).reshape(len(rows), -1)[:, : rows.shape[1]]
    if rows.size and not packing.low <= rows.min() <= rows.max() <= high:
        return None
    levels = pack_bits(rows.ravel() - packing.low, packing.bits)
    return levels, pack_bits(multiples.ravel() - 1, MULTIPLE_BITS) if packing.group else np.zeros(0, np.uint8)


def unpack(levels: np.ndarray, multiples: np.ndarray, packing: Packing, shape: tuple[int, ...]) -> np.ndarray:
    """Return int8 values of ``shape``, the inverse of `pack`.

    Raises `ValueError` for another number of bytes, or for values that int8 cannot hold.
    """
    count = math.prod(shape)
    wide = unpack_bits(levels, packing.bits, count).astype(np.int16) + packing.low
    if packing.group and count:
        rows = wide.reshape(shape[0], -1)
        group = min(packing.group, rows.shape[1])
        parts = -(-rows.shape[1] // group)
        each = unpack_bits(multiples, MULTIPLE_BITS, shape[0] * parts).astype(np.int16).reshape(shape[0], parts) + 1
        wide = (rows * np.repeat(each, group, axis=1)[:, : rows.shape[1]]).ravel()
    if count and not -128 <= wide.min() <= wide.max() <= 127:
        raise ValueError("levels beyond 8 bits")
    return wide.astype(np.int8).reshape(shape)


def pack_bits(values: np.ndarray, bits: int) -> np.ndarray:
    """Numbers below ``2**bits`` one after the other, highest bit first; the last byte is filled up with zeros."""
    blocks = [values[start : start + BITS_AT_ONCE].astype(np.uint8) for start in range(0, len(values), BITS_AT_ONCE)]
    packed = [np.packbits(np.unpackbits(block[:, None], axis=1)[:, 8 - bits :]) for block in blocks]
    return np.concatenate(packed) if packed else np.zeros(0, np.uint8)


def unpack_bits(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Inverse of `pack_bits`: u8[count]. `ValueError` when the bytes are not as many as that takes."""
    if data.dtype != np.uint8 or data.shape != (-(-count * bits // 8),):
        raise ValueError(f"{data.dtype}{list(data.shape)} for {count} numbers of {bits} bits")
    values = np.zeros(count, np.uint8)
    for start in range(0, count, BITS_AT_ONCE):
        part = values[start : start + BITS_AT_ONCE]
        found = np.unpackbits(data[start * bits // 8 :][: -(-len(part) * bits // 8)])[: len(part) * bits]
        for bit in found.reshape(len(part), bits).T:
            part[:] = part << 1 | bit
    return values


def _groups(rows: np.ndarray, group: int) -> np.ndarray:
    """[C, K] -> [C, groups, size]; the last group is filled up with zeros."""
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % group))).reshape(len(rows), -1, group)


def _multiples(groups: np.ndarray, low: int, high: int) -> np.ndarray:
    """int16 [C, G]: the smallest divisor of each group that brings it into low..high; 1 where there is none."""
    common, best = np.gcd.reduce(groups, axis=-1), np.ones(groups.shape[:2], np.int16)
    lowest, highest = groups.min(-1), groups.max(-1)
    for multiple in range(2**MULTIPLE_BITS, 0, -1):
        fits = (common % multiple == 0) & (lowest >= low * multiple) & (highest <= high * multiple)
        best = np.where(fits, np.int16(multiple), best)
    return best
