"""Quantize and dequantize operators between float32 and float8.

They have the names and arguments of torch's `quantized_decomposed`, whose own operators round to integers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

SCHEMAS = (
    "quantize_per_tensor(Tensor x, float scale, int zero_point, int low, int high, ScalarType dtype) -> Tensor",
    "dequantize_per_tensor(Tensor q, float scale, int zero_point, int low, int high, ScalarType dtype) -> Tensor",
    "quantize_per_channel(Tensor x, Tensor scales, Tensor zero_points, int axis, int low, int high, ScalarType dtype)"
    " -> Tensor",
    "dequantize_per_channel(Tensor q, Tensor scales, Tensor zero_points, int axis, int low, int high, ScalarType dtype)"
    " -> Tensor",
)


@functools.cache
def float8() -> Any:
    """Define the operators on the first call, and return their namespace."""
    library = torch.library.Library("intaglio", "FRAGMENT")
    meanings = (_quantize, _dequantize, _quantize_per_channel, _dequantize_per_channel)
    for schema, meaning in zip(SCHEMAS, meanings, strict=True):
        library.define(schema)
        library.impl(schema.partition("(")[0], meaning, "CompositeExplicitAutograd")
    FLOAT8_LIBRARIES.append(library)
    return torch.ops.intaglio


FLOAT8_LIBRARIES: list[torch.library.Library] = []
"""Keeps the libraries alive, because operators are removed with their library."""


def _quantize(x: torch.Tensor, scale: float, zero_point: int, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x * (1 / scale)`` clamped to low..high and rounded to float8, ties to even; NaN gives 0."""
    return _round_and_clamp(x * (1.0 / scale), low, high, dtype)


def _dequantize(
    q: torch.Tensor, scale: float, zero_point: int, low: int, high: int, dtype: torch.dtype
) -> torch.Tensor:
    return q.to(torch.float32) * scale


def _quantize_per_channel(
    x: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, axis: int, low: int, high: int, dtype: torch.dtype
) -> torch.Tensor:
    return _round_and_clamp(x * (1.0 / _spread(scales, x, axis)), low, high, dtype)


def _dequantize_per_channel(
    q: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, axis: int, low: int, high: int, dtype: torch.dtype
) -> torch.Tensor:
    return q.to(torch.float32) * _spread(scales, q, axis)


def _round_and_clamp(steps: torch.Tensor, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
    """Clamp and cast to float8. Without the clamp a cast turns large values into NaN or infinity."""
    return steps.nan_to_num(nan=0.0).clamp(low, high).to(dtype)


def _spread(scales: torch.Tensor, x: torch.Tensor, axis: int) -> torch.Tensor:
    return scales.reshape([-1 if index == axis else 1 for index in range(x.dim())])
