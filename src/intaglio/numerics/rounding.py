"""Round real values to quantized ones: the one rule that every other place calls.

``q = clamp(rne(x * inverse) + zero_point, low, high)`` with ``inverse = float32(1) / scale`` and ties to even.
`quantize` is the rule; `native/base/numerics.h` is its C++ counterpart, bit for bit.

`round_clamp` is the part of the rule behind the product, for NumPy arrays and torch tensors. What searches for
parameters or integers (range methods, SmoothQuant, GPTQ, training) calls it with quotients of its own, in float64 or
with gradients: they compare candidates, and what they choose is stored as integers, so their division need not be the
float32 product that kernels compute.

Rounding outside of this package is one of these, and `tests/numerics` holds the list: the operator ``round`` itself;
nodes of a torch.fx graph that write the rule out; a zero point or a count rounded to a whole number; statistics that
need the value before the clamp; sums kept in fixed point.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float32]

Int32Array = NDArray[np.int32]

LARGEST = np.float32(np.finfo(np.float32).max)

CONVERTIBLE = 2.0**30
"""Products below this survive conversion to int32 with any zero point added; above, kernels clamp in float first."""


class Affine(NamedTuple):
    """A scale (a float32 value held as a Python float) and a zero point."""

    scale: float
    zero_point: int


def reciprocal(scale: ArrayLike) -> FloatArray:
    """``float32(1) / scale``: what `quantize` multiplies by. Exact twin of torch's ``1.0 / scale``."""
    return np.float32(1) / np.asarray(scale, np.float32)


def quantize(x: ArrayLike, scale: ArrayLike, zero_point: ArrayLike, low: int, high: int) -> Int32Array:
    """f32[...] -> i32[...] in steps of ``scale``: ``clamp(rne(x * (1/scale)) + zero_point, low, high)``.

    Bit-equal to ``quantized_decomposed.quantize_per_tensor.default`` for finite and infinite x; NaN gives the
    zero point (torch: 0). Parameters broadcast against x.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        steps = np.rint(np.asarray(x, np.float32) * reciprocal(scale))
        shifted = np.where(np.isnan(steps), np.float32(0), steps) + np.asarray(zero_point, np.float32)
    levels: Int32Array = np.clip(shifted, np.float32(low), np.float32(high)).astype(np.int32)
    return levels


def dequantize(q: ArrayLike, scale: ArrayLike, zero_point: ArrayLike) -> FloatArray:
    """i[...] -> f32[...]: ``float32(q - zero_point) * scale``."""
    return (np.asarray(q, np.int32) - np.asarray(zero_point, np.int32)).astype(np.float32) * np.asarray(
        scale, np.float32
    )


def round_clamp(steps: Any, low: Any, high: Any, zero_point: Any = None) -> Any:
    """Return ``clamp(rne(steps) + zero_point, low, high)`` for a NumPy array or a torch tensor, of its own type.

    Args:
        steps: Values divided by their scale, any shape, float32 or float64.
        low: The smallest quantized value, a number or what broadcasts against ``steps``.
        high: The largest one, likewise.
        zero_point: A number or what broadcasts against ``steps``; ``None`` adds nothing.
    """
    rounded = steps.round()
    return (rounded if zero_point is None else rounded + zero_point).clip(low, high)


def finish(steps: FloatArray, zero_point: int, low: int, high: int) -> Int32Array:
    """Steps in float32 -> levels: ``clamp(rne(steps) + zero_point, low, high)``; steps beyond +-2^30 count as those."""
    shifted = np.rint(np.clip(steps, -CONVERTIBLE, CONVERTIBLE)).astype(np.int64) + zero_point
    return np.clip(shifted, low, high).astype(np.int32)


def clamp_levels(
    low: float | None, high: float | None, scale: float, zero_point: int, qmin: int, qmax: int
) -> tuple[int, int]:
    """Integer bounds of a float clamp: each bound is quantized (rounded, not truncated), so fused equals unfused."""

    def level(bound: float | None, fallback: int) -> int:
        return fallback if bound is None else int(quantize(np.float32(bound), scale, zero_point, qmin, qmax))

    bottom, top = level(low, qmin), level(high, qmax)
    return min(bottom, top), top
