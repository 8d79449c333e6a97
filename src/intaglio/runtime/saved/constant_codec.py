"""Constants of a graph as arrays in a file: packed if they have few bits. Large ones stay there until they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from intaglio.ir import Packing, StoredArray, TensorType
from intaglio.runtime.saved.bit_packing import pack, unpack
from intaglio.runtime.saved.stored_arrays import StoredArrays

QUANTIZED_SUFFIX, GROUPS_SUFFIX = " levels", " multiples"
"""Suffixes of the keys of a packed constant: its quantized values, and the multiples or smallest values of groups.
Their space keeps them distinct from the names of values."""
STORED_BYTES = 1 << 16
"""Bytes from which a constant stays in the file until it is needed."""


def encode_constant(key: str, array: np.ndarray, packing: Packing | None) -> dict[str, np.ndarray]:
    """Return the arrays of a constant by key, packed if its type says so. A constant whose values no longer fit the
    bits is stored unpacked."""
    packed = pack(array, packing) if packing is not None else None
    if packed is None:
        return {key: np.asarray(array, order="C")}  # ascontiguousarray would turn a scalar into a 1-d array
    quantized, of_groups = packed
    return {key + QUANTIZED_SUFFIX: quantized} | ({key + GROUPS_SUFFIX: of_groups} if len(of_groups) else {})


def decode_constant(key: str, kind: TensorType, arrays: Mapping[str, np.ndarray]) -> np.ndarray | StoredArray:
    """Return a constant, or the place of a large one in the file."""
    packing = kind.packing
    if packing is None or key + QUANTIZED_SUFFIX not in arrays:
        if not isinstance(arrays, StoredArrays):
            return arrays[key]
        shape, dtype = arrays.layout(key)
        return _in_memory_if_small(StoredArray(shape, dtype, lambda: arrays[key]))
    sizes = tuple(size for size in kind.shape if isinstance(size, int))

    def unpacked() -> np.ndarray:
        of_groups = arrays.get(key + GROUPS_SUFFIX, np.zeros(0, np.uint8))
        return unpack(arrays[key + QUANTIZED_SUFFIX], of_groups, packing, sizes)

    return _in_memory_if_small(StoredArray(sizes, np.dtype(np.int8), unpacked))


def _in_memory_if_small(array: StoredArray) -> np.ndarray | StoredArray:
    return array if math.prod(array.shape) * array.dtype.itemsize >= STORED_BYTES else array.read()
