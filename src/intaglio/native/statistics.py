"""Counting over float32 arrays: compiled kernels, and NumPy with the same results where nothing can be compiled."""

from __future__ import annotations

import ctypes
import warnings
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from intaglio.errors import BuildError
from intaglio.native import library

F32 = NDArray[np.float32]

HALF = 4096
"""Histogram bins on each side of zero; ``kHalf`` of statistics.cpp."""
CHUNK = 1 << 20
"""Values the NumPy fallback holds in float64 at once."""

_MAGNITUDE, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)


@dataclass(frozen=True)
class Extrema:
    """Smallest and largest finite value (+inf, -inf without one; -0 counts as 0), and how many of each kind."""

    low: float
    high: float
    nans: int
    infinities: int
    zeros: int
    count: int


def extrema(x: F32, threads: int = 1) -> Extrema:
    """Extrema and counts of a float32 array of any shape, in one pass."""
    x = _contiguous(x)
    native = _kernels()
    if native is None:
        return extrema_numpy(x)
    found = library.NativeExtrema()
    native.intaglio_extrema(x.ctypes.data, x.size, threads, ctypes.byref(found))
    return Extrema(found.low, found.high, found.nans, found.infinities, found.zeros, x.size)


def channel_extrema(x: F32, outer: int, channels: int, inner: int, threads: int = 1) -> tuple[F32, F32]:
    """f32[outer, channels, inner] -> (low f32[channels], high f32[channels]) of the finite values."""
    x = _contiguous(x)
    if x.size != outer * channels * inner:
        raise ValueError(f"{x.size} values are not [{outer}, {channels}, {inner}]")
    native = _kernels()
    if native is None:
        return channel_extrema_numpy(x.reshape(outer, channels, inner))
    low, high = np.empty(channels, np.float32), np.empty(channels, np.float32)
    native.intaglio_channel_extrema(x.ctypes.data, outer, channels, inner, threads, low.ctypes.data, high.ctypes.data)
    return low, high


def dyadic_histogram(x: F32, exponent: int, bins: NDArray[np.int64], threads: int = 1) -> None:
    """Adds to ``bins[2 * HALF]`` how many values have ``floor(x * 2^-exponent) + HALF`` as their bin.

    Zeros, NaN and infinities are not counted; a value beyond the bins goes into the end bin.
    """
    x = _contiguous(x)
    if bins.shape != (2 * HALF,) or bins.dtype != np.int64 or not bins.flags.c_contiguous:
        raise ValueError(f"bins must be a contiguous int64[{2 * HALF}]")
    native = _kernels()
    if native is None:
        dyadic_histogram_numpy(x, exponent, bins)
    else:
        native.intaglio_dyadic_histogram(x.ctypes.data, x.size, exponent, bins.ctypes.data, threads)


def _contiguous(x: F32) -> F32:
    if x.dtype != np.float32:
        raise TypeError(f"counting takes float32, not {x.dtype}")
    return np.ascontiguousarray(x)


@cache
def _kernels() -> ctypes.CDLL | None:
    try:
        return library.runtime()
    except BuildError as error:
        warnings.warn(f"statistics are counted in NumPy, several times slower: {error}", stacklevel=3)
        return None


def extrema_numpy(x: F32) -> Extrema:
    """`extrema` in NumPy."""
    low, high, nans, infinities, zeros = np.inf, -np.inf, 0, 0, 0
    for part in _parts(x):
        magnitude = part.view(np.uint32) & _MAGNITUDE
        finite = _exact(part[magnitude < _INFINITY])
        low = min(low, float(finite.min(initial=np.inf)))
        high = max(high, float(finite.max(initial=-np.inf)))
        nans += int((magnitude > _INFINITY).sum())
        infinities += int((magnitude == _INFINITY).sum())
        zeros += int((magnitude == 0).sum())
    return Extrema(low + 0.0, high + 0.0, nans, infinities, zeros, x.size)


def channel_extrema_numpy(x: F32) -> tuple[F32, F32]:
    """`channel_extrema` of f32[outer, channels, inner] in NumPy."""
    finite = np.isfinite(x)
    low = np.where(finite, x, np.float32(np.inf)).min(axis=(0, 2), initial=np.float32(np.inf))
    high = np.where(finite, x, np.float32(-np.inf)).max(axis=(0, 2), initial=np.float32(-np.inf))
    return low + np.float32(0), high + np.float32(0)


def dyadic_histogram_numpy(x: F32, exponent: int, bins: NDArray[np.int64]) -> None:
    """`dyadic_histogram` in NumPy."""
    for part in _parts(x):
        magnitude = part.view(np.uint32) & _MAGNITUDE
        counted = part[(magnitude > 0) & (magnitude < _INFINITY)]
        index = np.floor(np.ldexp(_exact(counted), -exponent)) + HALF
        bins += np.bincount(np.clip(index, 0, 2 * HALF - 1).astype(np.int64), minlength=2 * HALF)


def _parts(x: F32) -> list[F32]:
    flat = x.reshape(-1)
    return [flat[start : start + CHUNK] for start in range(0, flat.size, CHUNK)]


def _exact(x: F32) -> NDArray[np.float64]:
    """Finite f32 -> f64 from the bits, so that a flushed float mode (torch.set_flush_denormal) loses no denormal."""
    bits = x.view(np.uint32)
    exponent = ((bits >> np.uint32(23)) & np.uint32(255)).astype(np.int32)
    fraction = (bits & np.uint32(0x7FFFFF)).astype(np.float64)
    size = np.ldexp(np.where(exponent > 0, fraction + 2.0**23, fraction), np.maximum(exponent, 1) - 150)
    return np.where(bits >> np.uint32(31), -size, size)
