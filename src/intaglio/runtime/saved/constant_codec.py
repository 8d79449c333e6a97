"""Constants of a graph as arrays in a file: packed if they have few bits. Large ones stay there until they are read."""

from __future__ import annotations

import numpy as np

from intaglio.ir import Constants, Packing, StoredArray, TensorType
from intaglio.runtime.saved.bit_packing import pack, unpack

QUANTIZED_SUFFIX, GROUPS_SUFFIX = " levels", " multiples"
"""Suffixes of the keys of a packed constant: its quantized values, and the multiples or smallest values of groups.
Their space keeps them distinct from the names of values."""
STORED_BYTES = 1 << 14
"""Bytes from which a constant stays in the file until it is needed."""


def encode_constant(key: str, array: np.ndarray, packing: Packing | None) -> dict[str, np.ndarray]:
    """Return the arrays of a constant by key, packed if its type says so. A constant whose values no longer fit the
    bits is stored unpacked."""
    packed = pack(array, packing) if packing is not None else None
    if packed is None:
        return {key: np.asarray(array, order="C")}  # ascontiguousarray would turn a scalar into a 1-d array
    quantized, of_groups = packed
    return {key + QUANTIZED_SUFFIX: quantized} | ({key + GROUPS_SUFFIX: of_groups} if len(of_groups) else {})


def decode_constant(key: str, kind: TensorType, arrays: Constants) -> np.ndarray | StoredArray:
    """Return a constant, or the place of a large one in the file. Raise `TypeError` if the shape of a packed constant
    is symbolic."""
    packing, quantized = kind.packing, key + QUANTIZED_SUFFIX
    if packing is None or quantized not in arrays:
        shape, dtype = arrays.layout(key)
        found = StoredArray(shape, dtype, lambda: arrays[key])
        return found if arrays.is_stored(key) and found.nbytes >= STORED_BYTES else found.read()
    sizes = tuple(size for size in kind.shape if isinstance(size, int))
    if len(sizes) < len(kind.shape):
        raise TypeError(f"the shape {kind.shape} of a packed constant is symbolic")

    def packed() -> tuple[np.ndarray, np.ndarray]:
        return arrays[quantized], arrays.get(key + GROUPS_SUFFIX, np.zeros(0, np.uint8))

    def unpacked() -> np.ndarray:
        return unpack(*packed(), packing, sizes)

    found = StoredArray(sizes, np.dtype(np.int8), unpacked, packed)
    return found if arrays.is_stored(quantized) and found.nbytes >= STORED_BYTES else found.read()
