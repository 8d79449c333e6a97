"""Sizes and strides as the kernels of indexing take them, see native/sequences/indexing.h."""

import ctypes
from collections.abc import Sequence
from typing import Any

from intaglio.ops.direct.direct_operands import MAX_INDEXED_AXES

Axes: Any = ctypes.c_int64 * MAX_INDEXED_AXES


def padded(numbers: Sequence[int], missing: int) -> ctypes.Array[ctypes.c_int64]:
    """Numbers of the last axes, behind one value for the axes that a tensor does not have."""
    return Axes(*[missing] * (MAX_INDEXED_AXES - len(numbers)), *numbers)
