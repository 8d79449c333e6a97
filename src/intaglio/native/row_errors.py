"""Rows of float64 matrices as integers of two bytes, and the sums of squares of their products with bytes: compiled
kernels, and a NumPy fallback with identical results."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from intaglio.native import native_library as library

MOST = 127 * 256
"""Integer that the largest element of a row becomes; ``kMost`` of row_errors.cpp."""
SUMS_OF_ROW = 16
"""Number of partial sums of a row; ``kSumsOfRow`` of row_errors.cpp."""


class SplitRows(NamedTuple):
    """Rows as integers of two bytes.

    Attributes:
        digits: upper and lower bytes, int8 [2, rows, k]; an element is ``unit * (256 * upper + lower)``, rounded.
        units: the unit of each row, float64 [rows].
        shifts: sum of the integers of each row times the offsets of their operands, float64 [rows].
    """

    digits: NDArray[np.int8]
    units: NDArray[np.float64]
    shifts: NDArray[np.float64]


def split_rows(rows: NDArray[np.float64], offset: NDArray[np.int32], threads: int = 1) -> SplitRows:
    """Write finite rows, float64 [rows, k], as integers of two bytes.

    Args:
        rows: the rows.
        offset: what is added to the operands of each element, int32 [k], at most 2^15 in magnitude.
        threads: number of threads.
    """
    native = library.runtime_if_built()
    if native is None:
        return split_rows_numpy(rows, offset)
    rows, offset = np.ascontiguousarray(rows), np.ascontiguousarray(offset, np.int32)
    found = SplitRows(np.empty((2, *rows.shape), np.int8), np.empty(len(rows)), np.empty(len(rows)))
    native.intaglio_split_rows(*_addresses(rows, offset), *rows.shape, threads, *_addresses(*found))
    return found


def row_errors(products: NDArray[np.int32], split: SplitRows, threads: int = 1) -> NDArray[np.float64]:
    """Return the sum of squares of the results of each row, float64 [rows].

    Args:
        products: products of both bytes with the operands, int32 [2, rows, positions].
        split: the rows.
        threads: number of threads.
    """
    native = library.runtime_if_built()
    if native is None:
        return row_errors_numpy(products, split)
    products, errors = np.ascontiguousarray(products), np.empty(products.shape[1])
    sizes = products.shape[1:]
    native.intaglio_row_errors(*_addresses(products, split.units, split.shifts), *sizes, threads, errors.ctypes.data)
    return errors


def _addresses(*arrays: NDArray[Any]) -> list[int]:
    return [array.ctypes.data for array in arrays]


def split_rows_numpy(rows: NDArray[np.float64], offset: NDArray[np.int32]) -> SplitRows:
    """Compute `split_rows` in NumPy."""
    most = np.abs(rows).max(1, initial=0.0)
    units = np.where(most > 0, most / MOST, 1.0)
    integers = np.rint(rows / units[:, None]).astype(np.int32)
    upper = (integers + 128) >> 8
    digits = np.stack([upper, integers - 256 * upper]).astype(np.int8)
    return SplitRows(digits, units, (integers.astype(np.int64) @ offset.astype(np.int64)).astype(np.float64))


def row_errors_numpy(products: NDArray[np.int32], split: SplitRows) -> NDArray[np.float64]:
    """Compute `row_errors` in NumPy, with the partial sums of the kernel."""
    upper, lower = products.astype(np.float64)
    results = 256.0 * upper + lower + split.shifts[:, None]
    blocks = -(-results.shape[1] // SUMS_OF_ROW)
    padded = np.pad(np.square(results), ((0, 0), (0, blocks * SUMS_OF_ROW - results.shape[1])))
    sums = np.zeros((len(results), SUMS_OF_ROW))
    for block in range(blocks):
        sums += padded[:, block * SUMS_OF_ROW : (block + 1) * SUMS_OF_ROW]
    total = np.zeros(len(results))
    for lane in range(SUMS_OF_ROW):
        total += sums[:, lane]
    return total * split.units * split.units
