"""Squared errors of weights rounded with a scale for each row: a compiled kernel.

Its results are those of `intaglio.numerics.squared_errors`, the reference implementation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from intaglio.native import native_library as library

LONGEST_ROW = 128
"""Most elements of a row whose squares NumPy adds in the order of the kernel."""
LARGEST_QUANTIZED = 1 << 22
"""Bound on the magnitude of quantized values that the kernel rounds exactly."""


def scale_errors(
    rows: NDArray[np.float32], steps: NDArray[np.float32], qmin: int, qmax: int, threads: int = 1
) -> NDArray[np.float64] | None:
    """Return the squared distance f64[...] of each row of f32[..., K] to its nearest quantized values.

    Args:
        rows: the rows.
        steps: their scales f32[...].
        qmin: smallest quantized value.
        qmax: largest quantized value.
        threads: number of threads.

    Returns:
        The errors; ``None`` if the kernel cannot be built, rows are too long or quantized values too large.
    """
    native = library.runtime_if_built()
    if native is None or rows.shape[-1] > LONGEST_ROW or max(-qmin, qmax) >= LARGEST_QUANTIZED:
        return None
    rows, steps = np.ascontiguousarray(rows, np.float32), np.ascontiguousarray(steps, np.float32)
    errors = np.empty(steps.shape)
    sizes = steps.size, rows.shape[-1]
    native.intaglio_scale_errors(rows.ctypes.data, steps.ctypes.data, *sizes, qmin, qmax, threads, errors.ctypes.data)
    return errors
