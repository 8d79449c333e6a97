"""Translation of PyTorch's quantize and dequantize operators to ONNX operators, for torch's ONNX exporter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from intaglio.quant.qdq.float8 import float8
from intaglio.torch_private import quantized_decomposed

CLIP_RANGES = {"UINT8": (0, 255), "INT8": (-128, 127)}
"""Element types that Clip accepts, and the range to which QuantizeLinear saturates."""

Translations = tuple[Callable[..., Any], Callable[..., Any]]
"""Functions that record the ONNX operators of quantize and of dequantize."""

ONNX_FLOAT = 1
"""ONNX's enumeration value of float32."""


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the functions that record ONNX operators, by operator overload. They are created on demand, because they
    need onnxscript."""
    import onnx_ir as ir
    from onnxscript import opset21 as op

    def constant(value: float, dtype: int) -> Any:
        kind = ir.DataType(dtype)
        tensor: Any = ir.Tensor(np.array(value, kind.numpy()), dtype=kind)
        return op.Constant(value=tensor)

    def clip(quantized: Any, low: int, high: int, dtype: int) -> Any:
        """Clip quantized values whose range is narrower than their type. Clip follows QuantizeLinear, so that engines
        still recognize the operator before it as quantized."""
        name = ir.DataType(dtype).name
        if name not in CLIP_RANGES or (low, high) == CLIP_RANGES[name]:
            return quantized
        return op.Clip(quantized, constant(low, dtype), constant(high, dtype))

    def quantize(x: Any, scale: float, zero: int, low: int, high: int, dtype: int) -> Any:
        if ir.DataType(dtype) == ir.DataType.INT16:  # ONNX has no Clip for int16, so clip the float input
            x = op.Clip(x, constant((low - zero) * scale, ONNX_FLOAT), constant((high - zero) * scale, ONNX_FLOAT))
        quantized = op.QuantizeLinear(x, constant(scale, ONNX_FLOAT), constant(zero, dtype))
        return clip(quantized, low, high, dtype)

    def dequantize(q: Any, scale: float, zero: int, low: int, high: int, dtype: int) -> Any:
        return op.DequantizeLinear(q, constant(scale, ONNX_FLOAT), constant(zero, dtype))

    def quantize_float8(x: Any, scale: float, zero: int, low: int, high: int, dtype: int) -> Any:
        """Quantize to float8 with Mul, Clip and Cast, as the reference does.

        ONNX Runtime treats QuantizeLinear and DequantizeLinear of any element type like those of its integer operators:
        it drops a ReLU before zero point 0 and fuses a Conv between them into QLinearConv, which then refuses float8.
        """
        steps = op.Mul(x, constant(1.0 / scale, ONNX_FLOAT))
        return op.Cast(op.Clip(steps, constant(low, ONNX_FLOAT), constant(high, ONNX_FLOAT)), to=dtype)

    def dequantize_float8(q: Any, scale: float, zero: int, low: int, high: int, dtype: int) -> Any:
        return op.Mul(op.Cast(q, to=ONNX_FLOAT), constant(scale, ONNX_FLOAT))

    def quantize_channels(x: Any, scales: Any, zeros: Any, axis: int, low: int, high: int, dtype: int) -> Any:
        return clip(op.QuantizeLinear(x, scales, zeros, axis=axis), low, high, dtype)

    def dequantize_channels(q: Any, scales: Any, zeros: Any, axis: int, low: int, high: int, dtype: int) -> Any:
        return op.DequantizeLinear(q, scales, zeros, axis=axis)

    channels = quantize_channels, dequantize_channels
    return {
        **_overloads(quantized_decomposed(), (quantize, dequantize), channels),
        **_overloads(float8(), (quantize_float8, dequantize_float8), channels),
    }


def _overloads(ops: Any, tensor: Translations, channels: Translations) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the functions of quantize and dequantize, per tensor and per channel, by the overloads of a namespace."""
    return {
        ops.quantize_per_tensor.default: tensor[0],
        ops.dequantize_per_tensor.default: tensor[1],
        ops.quantize_per_channel.default: channels[0],
        ops.dequantize_per_channel.default: channels[1],
    }
