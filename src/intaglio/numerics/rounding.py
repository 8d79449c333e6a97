"""Rounding of real values to quantized values. All other modules call these functions.

``q = clamp(rne(x * inverse) + zero_point, low, high)`` with ``inverse = float32(1) / scale`` and ties to even (`rne`).
`quantize` is the reference implementation; `native/base/numerics.h` is its C++ counterpart and agrees bit for bit.

`round_clamp` is the part of the formula after the product, for NumPy arrays and torch tensors. Algorithms that search
for parameters or integers (range methods, SmoothQuant, GPTQ, training) call it with quotients of their own, in float64
or with gradients. They compare candidates, and their choice is stored as integers, so that their division need not be
the float32 product that kernels compute.

Code outside of this package may round only in these cases, which `tests/numerics` lists: the operator ``round`` itself;
nodes of a torch.fx graph that write the formula out; a zero point or a count rounded to an integer; statistics that
need the value before the clamp; sums in fixed point.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float32]

Int32Array = NDArray[np.int32]

LARGEST = np.float32(np.finfo(np.float32).max)

CONVERTIBLE = 2.0**30
"""Bound on products that fit into int32 with any zero point added; larger ones are clamped in float first."""


class Affine(NamedTuple):
    """Scale (a float32 value held as a Python float) and zero point of per-tensor quantization."""

    scale: float
    zero_point: int


def reciprocal(scale: ArrayLike) -> FloatArray:
    """Return ``float32(1) / scale``, the factor that `quantize` multiplies by; bit-equal to torch's ``1.0 / scale``."""
    return np.float32(1) / np.asarray(scale, np.float32)


def quantize(x: ArrayLike, scale: ArrayLike, zero_point: ArrayLike, low: int, high: int) -> Int32Array:
    """Quantize f32[...] to i32[...]: ``clamp(rne(x * (1/scale)) + zero_point, low, high)``.

    The result is bit-equal to ``quantized_decomposed.quantize_per_tensor.default`` for finite and infinite x. NaN
    becomes the zero point (torch: 0). The parameters broadcast against x.

    Args:
        x: Values, any shape.
        scale: Distance between neighbouring quantized values.
        zero_point: Quantized value of 0.
        low: Smallest quantized value.
        high: Largest quantized value.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        steps = np.rint(np.asarray(x, np.float32) * reciprocal(scale))
        shifted = np.where(np.isnan(steps), np.float32(0), steps) + np.asarray(zero_point, np.float32)
    quantized: Int32Array = np.clip(shifted, np.float32(low), np.float32(high)).astype(np.int32)
    return quantized


def dequantize(q: ArrayLike, scale: ArrayLike, zero_point: ArrayLike) -> FloatArray:
    """Dequantize i[...] to f32[...]: ``float32(q - zero_point) * scale``.

    Args:
        q: Quantized values, any shape.
        scale: Distance between neighbouring quantized values; broadcasts against ``q``.
        zero_point: Quantized value of 0; broadcasts against ``q``.
    """
    return (np.asarray(q, np.int32) - np.asarray(zero_point, np.int32)).astype(np.float32) * np.asarray(
        scale, np.float32
    )


def round_clamp(steps: Any, low: Any, high: Any, zero_point: Any = None) -> Any:
    """Return ``clamp(rne(steps) + zero_point, low, high)`` as the NumPy array or torch tensor that ``steps`` is.

    Args:
        steps: Values divided by their scale, any shape, float32 or float64.
        low: Smallest quantized value, a number or an array that broadcasts against ``steps``.
        high: Largest quantized value, likewise.
        zero_point: A number or an array that broadcasts against ``steps``; ``None`` adds nothing.
    """
    rounded = steps.round()
    return (rounded if zero_point is None else rounded + zero_point).clip(low, high)


def round_clamp_i32(steps: FloatArray, zero_point: int, low: int, high: int) -> Int32Array:
    """Round and clamp f32 ``steps`` to i32: ``clamp(rne(steps) + zero_point, low, high)``.

    ``steps`` are values divided by their scale. Those beyond +-2^30 are clamped to +-2^30 before the conversion.
    """
    shifted = np.rint(np.clip(steps, -CONVERTIBLE, CONVERTIBLE)).astype(np.int64) + zero_point
    return np.clip(shifted, low, high).astype(np.int32)


def clamp_bounds(
    low: float | None, high: float | None, scale: float, zero_point: int, qmin: int, qmax: int
) -> tuple[int, int]:
    """Return the integer bounds of a float clamp ``[low, high]``.

    Each bound is quantized (rounded, not truncated), so that a fused clamp gives the same result as a separate one.
    ``None`` means no bound and gives ``qmin`` or ``qmax``.
    """

    def quantize_bound(bound: float | None, fallback: int) -> int:
        return fallback if bound is None else int(quantize(np.float32(bound), scale, zero_point, qmin, qmax))

    bottom, top = quantize_bound(low, qmin), quantize_bound(high, qmax)
    return min(bottom, top), top
