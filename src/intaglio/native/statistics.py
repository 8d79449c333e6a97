"""Statistics of float32 arrays for calibration: compiled kernels, and a NumPy fallback with identical results."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from intaglio.native import native_library as library

Float32Array = NDArray[np.float32]
Int64Array = NDArray[np.int64]

HALF_BINS = 4096
"""Number of histogram bins on each side of zero; ``kHalf`` of statistics.cpp."""
LOWEST_BINARY_EXPONENT = -160
"""Exponent for the smallest float32 denormal, 2^-149, and for arrays that contain only zeros."""
MANTISSA_BITS = 5
"""Mantissa bits that index a bin of the sketch; ``kKept`` of statistics.cpp."""
EXPONENT_BITS = 23 - MANTISSA_BITS
SKETCH = 1 << (9 + MANTISSA_BITS)
"""Number of bins of the sketch, by sign, exponent and leading mantissa bits; the upper half is for negative values."""
SIGNED_EXPONENTS = 1 << 9
BLOCK_OF_SUMS, PARTIAL_SUMS = 1 << 12, 16
"""Numbers of values and of partial sums of a block of `squared_sums`; ``kBlockOfSums`` and ``kPartial`` of
squared_sums.cpp."""
CHUNK = 1 << 20
"""Number of values that the NumPy fallback converts to float64 at a time."""

_MAGNITUDE, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)


@dataclass(frozen=True)
class Counts:
    """Statistics of one pass over ``f32[rows, columns]``. Zeros, NaN and infinities are in neither histogram.

    Attributes:
        count: Number of values.
        low: Smallest finite value; +inf if there is none; -0 counts as 0.
        high: Largest finite value; -inf if there is none.
        nans: Number of NaNs.
        infinities: Number of infinities.
        zeros: Number of zeros.
        exponent: Smallest exponent with which all values fit into ``bins``.
        bins: Histogram i64[2 * HALF_BINS]; bin i counts the values in ``[i - HALF, i - HALF + 1) * 2^exponent``.
        sketch: Histogram i64[SKETCH] by the upper bits of a value.
        total: Exact sum in units of 2^-149.
        lows: ``low`` of each row.
        highs: ``high`` of each row.
    """

    count: int
    low: float
    high: float
    nans: int
    infinities: int
    zeros: int
    exponent: int
    bins: Int64Array
    sketch: Int64Array
    total: int
    lows: Float32Array
    highs: Float32Array


def count(x: Float32Array, rows: int = 1, threads: int = 1) -> Counts:
    """Count the statistics of a float32 array, seen as ``rows`` rows of equal length, in one pass."""
    x = _contiguous(x)
    if rows < 0 or (x.size % rows if rows else x.size):
        raise ValueError(f"{x.size} values cannot be divided into {rows} rows of equal length")
    native = library.runtime_if_built()
    if native is None:
        return count_numpy(x, rows)
    lows, highs = np.empty(rows, np.float32), np.empty(rows, np.float32)
    bins, sketch, sums = (np.zeros(size, np.int64) for size in (2 * HALF_BINS, SKETCH, SIGNED_EXPONENTS))
    found, columns = library.NativeCounts(), x.size // rows if rows else 0
    arrays = (array.ctypes.data for array in (lows, highs, bins, sketch, sums))
    native.intaglio_count(x.ctypes.data, rows, columns, threads, *arrays, ctypes.byref(found))
    return Counts(
        x.size,
        found.low,
        found.high,
        found.nans,
        found.infinities,
        found.zeros,
        found.exponent,
        bins,
        sketch,
        _total(sums),
        lows,
        highs,
    )


def channel_extrema(
    x: Float32Array, outer: int, channels: int, inner: int, threads: int = 1
) -> tuple[Float32Array, Float32Array]:
    """Return the smallest and largest finite value f32[channels] of each channel of f32[outer, channels, inner]."""
    x = _contiguous(x)
    if x.size != outer * channels * inner:
        raise ValueError(f"{x.size} values do not have the shape [{outer}, {channels}, {inner}]")
    native = library.runtime_if_built()
    if native is None:
        return channel_extrema_numpy(x.reshape(outer, channels, inner))
    low, high = np.empty(channels, np.float32), np.empty(channels, np.float32)
    native.intaglio_channel_extrema(x.ctypes.data, outer, channels, inner, threads, low.ctypes.data, high.ctypes.data)
    return low, high


def squared_sums(exact: Float32Array, other: Float32Array, threads: int = 1) -> NDArray[np.float64]:
    """Return sums over two arrays of equally many values, f64[3]: of the squares of the exact values, of the squares of
    the other values, and of the squares of their differences. Positions where the exact value is not finite are left
    out.
    """
    exact, other = _contiguous(exact), _contiguous(other)
    if exact.size != other.size:
        raise ValueError(f"arrays of {exact.size} and {other.size} values cannot be compared")
    native = library.runtime_if_built()
    if native is None:
        return squared_sums_numpy(exact, other)
    blocks = np.empty((-(-exact.size // BLOCK_OF_SUMS), 3))
    native.intaglio_squared_sums(exact.ctypes.data, other.ctypes.data, exact.size, threads, blocks.ctypes.data)
    return blocks.sum(0)


def exponent_of(magnitude: float) -> int:
    """Return the smallest k with ``magnitude * 2^-k < HALF_BINS`` for a finite magnitude; `LOWEST_BINARY_EXPONENT` for
    zero.
    """
    if magnitude == 0:
        return LOWEST_BINARY_EXPONENT
    return math.frexp(magnitude)[1] - (HALF_BINS.bit_length() - 1)


def exact_sum(x: Float32Array) -> int:
    """Return the exact sum of finite values in units of 2^-149."""
    bits = x.reshape(-1).view(np.uint32)
    sums = np.zeros(SIGNED_EXPONENTS, np.int64)
    np.add.at(sums, (bits >> np.uint32(23)).astype(np.int64), _mantissas(bits))
    return _total(sums)


def _total(sums: Int64Array) -> int:
    """Return the sum in units of 2^-149 from sums of integer mantissas by sign and exponent."""
    parts = [(index, int(sums[index])) for index in np.flatnonzero(sums).tolist()]
    return sum((-part if index >> 8 else part) << (max(index & 255, 1) - 1) for index, part in parts)


def _mantissas(bits: NDArray[np.uint32]) -> Int64Array:
    """Return the integer mantissas of finite values given as bits, with the implicit leading one of normal values."""
    hidden = np.where((bits & np.uint32(0x7F800000)) > 0, np.uint32(1 << 23), np.uint32(0))
    return ((bits & np.uint32(0x7FFFFF)) | hidden).astype(np.int64)


def _contiguous(x: Float32Array) -> Float32Array:
    if x.dtype != np.float32:
        raise TypeError(f"statistics need float32 values, but the data type is {x.dtype}")
    return np.ascontiguousarray(x)


def count_numpy(x: Float32Array, rows: int) -> Counts:
    """Compute `count` in NumPy."""
    lows, highs = channel_extrema_numpy(x.reshape(1, rows, x.size // rows if rows else 0))
    low, high = float(_exact(lows).min(initial=np.inf)), float(_exact(highs).max(initial=-np.inf))
    nans = infinities = zeros = total = 0
    exponent = exponent_of(max(abs(low), abs(high))) if low < np.inf else LOWEST_BINARY_EXPONENT
    bins, sketch = np.zeros(2 * HALF_BINS, np.int64), np.zeros(SKETCH, np.int64)
    for part in _parts(x):
        magnitude = part.view(np.int32) & _MAGNITUDE
        nans += int((magnitude > _INFINITY).sum())
        infinities += int((magnitude == _INFINITY).sum())
        zeros += int((magnitude == 0).sum())
        counted = part[(magnitude > 0) & (magnitude < _INFINITY)]
        index = np.floor(np.ldexp(_exact(counted), -exponent)).astype(np.int64) + HALF_BINS
        bins += np.bincount(index, minlength=2 * HALF_BINS)
        sketch += np.bincount((counted.view(np.uint32) >> np.uint32(EXPONENT_BITS)).astype(np.int64), minlength=SKETCH)
        total += exact_sum(counted)
    return Counts(x.size, low, high, nans, infinities, zeros, exponent, bins, sketch, total, lows, highs)


def channel_extrema_numpy(x: Float32Array) -> tuple[Float32Array, Float32Array]:
    """Compute `channel_extrema` of f32[outer, channels, inner] in NumPy."""
    keys = x.view(np.int32) & _MAGNITUDE
    keys, finite = np.where(x.view(np.int32) < 0, -keys, keys), keys < _INFINITY
    low = np.where(finite, keys, _INFINITY).min(axis=(0, 2), initial=_INFINITY)
    high = np.where(finite, keys, -_INFINITY).max(axis=(0, 2), initial=-_INFINITY)
    return _values(low), _values(high)


def squared_sums_numpy(exact: Float32Array, other: Float32Array) -> NDArray[np.float64]:
    """Compute `squared_sums` in NumPy, with the sums of a block in the order of the kernel."""
    finite = np.isfinite(exact)
    a, b = (np.where(finite, x, np.float32(0)).astype(np.float64).reshape(-1) for x in (exact, other))
    squares = np.square(np.stack([a, b, a - b]))
    rest = -exact.size % BLOCK_OF_SUMS
    steps = np.pad(squares, ((0, 0), (0, rest))).reshape(3, -1, BLOCK_OF_SUMS // PARTIAL_SUMS, PARTIAL_SUMS)
    partial = np.add.accumulate(steps, 2)[:, :, -1]  # in order, which `sum` does not promise
    return np.add.accumulate(partial, 2)[:, :, -1].T.copy().sum(0)


def _values(keys: NDArray[np.int32]) -> Float32Array:
    """Return the float32 values of signed magnitude bits; such integers order like the values in every float mode."""
    return (np.abs(keys) | np.where(keys < 0, np.int32(-(2**31)), np.int32(0))).view(np.float32)


def _parts(x: Float32Array) -> list[Float32Array]:
    """Return the array in chunks of `CHUNK` values."""
    flat = x.reshape(-1)
    return [flat[start : start + CHUNK] for start in range(0, flat.size, CHUNK)]


def _exact(x: Float32Array) -> NDArray[np.float64]:
    """Convert f32 values without NaN to f64 from their bits, which keeps denormals under `torch.set_flush_denormal`."""
    bits = x.view(np.uint32)
    exponent = np.maximum(((bits >> np.uint32(23)) & np.uint32(255)).astype(np.int32), 1)
    size = np.where(exponent < 255, np.ldexp(_mantissas(bits).astype(np.float64), exponent - 150), np.inf)
    return np.where(bits >> np.uint32(31), -size, size)
