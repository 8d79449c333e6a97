"""Computation with blocks of rows of a weight, in several threads, so that intermediate results stay in the cache."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from intaglio import numerics
from intaglio.native.scale_errors import scale_errors
from intaglio.numerics import FloatArray

BLOCK = 1 << 18
"""Number of elements of a block."""


def by_row_blocks(compute: Callable[..., NDArray[Any]], weight: np.ndarray, *others: np.ndarray) -> NDArray[Any]:
    """Return ``compute(weight, *others)``, computed for blocks of rows in as many threads as PyTorch uses.

    Args:
        compute: a function of arrays whose rows do not depend on each other.
        weight: the array whose size determines the number of rows in a block.
        others: other arrays; those with another number of rows than the weight are passed whole.
    """
    rows = len(weight)
    step = max(1, BLOCK * rows // max(weight.size, 1))
    if step >= rows:
        return compute(weight, *others)

    def block(start: int) -> NDArray[Any]:
        here = slice(start, start + step)
        return compute(weight[here], *(one[here] if len(one) == rows else one for one in others))

    first = block(0)
    found = np.empty((rows, *first.shape[1:]), first.dtype)
    found[:step] = first

    def store(start: int) -> None:
        found[start : start + step] = block(start)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(store, range(step, rows, step)))
    return found


def errors_of_scales(rows: FloatArray, steps: FloatArray, qmin: int, qmax: int) -> NDArray[np.float64]:
    """Compute `intaglio.numerics.squared_errors`, by the compiled kernel if it can."""
    errors = scale_errors(rows, steps, qmin, qmax)
    return numerics.squared_errors(rows, steps, qmin, qmax) if errors is None else errors
