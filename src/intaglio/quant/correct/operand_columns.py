"""Operands of the weights of an anchor, as columns of matrices whose products with weights are its results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from intaglio.fxgraph.node_info import fixed_size, known_type
from intaglio.fxgraph.nodes import call_of, layer_operands
from intaglio.ir import QParams
from intaglio.quant.annotate.regions import Region


def groups_of(region: Region) -> int:
    """Return the number of groups of an anchor."""
    return int(call_of(region.anchor, region.record).arguments.get("groups", 1))


def row_length(region: Region) -> int:
    """Return the number of weights of one output."""
    return math.prod(_weight_sizes(region)[1:])


def weight_count(region: Region) -> int:
    """Return the number of elements of the weight."""
    return math.prod(_weight_sizes(region))


def _weight_sizes(region: Region) -> tuple[int, ...]:
    weight = layer_operands(region.anchor).weight
    return tuple(fixed_size(weight, axis) for axis in range(len(known_type(weight).shape)))


def operand_zero_points(region: Region, q: QParams, groups: int, k: int) -> torch.Tensor:
    """Return the zero points of the operands of each weight column, int64 [groups, k]."""
    zeros = torch.tensor(q.zeros)
    if len(q.zeros) == 1 or region.record.is_linear_layer:
        return zeros.expand(groups, k)
    return zeros.reshape(groups, -1).repeat_interleave(k * groups // len(q.zeros), 1)


def position_count(region: Region, batch: torch.Tensor) -> int:
    """Return the number of columns of a batch."""
    if region.record.is_linear_layer:
        return batch.numel() // max(1, batch.shape[-1])
    if not len(batch):
        return 0
    images = batch[:1, :, None] if batch.dim() == 3 else batch[:1]
    window = _window(region, batch)
    return len(batch) * math.prod(window.result_size(_padded(images, torch.zeros(1), window.padding).shape[2:]))


def operand_columns(region: Region, batch: torch.Tensor, q: QParams) -> Iterable[torch.Tensor]:
    """Yield u8 columns [groups, k, positions] of a few images at a time."""
    if region.record.is_linear_layer:
        yield batch.reshape(-1, batch.shape[-1]).t().contiguous()[None]
        return
    images = batch[:, :, None] if batch.dim() == 3 else batch
    window = _window(region, batch)
    zeros = torch.tensor(q.zeros).expand(images.shape[1])
    size = max(1, (1 << 25) // max(1, images[0].numel() * window.taps))
    for part in images.split(size):
        yield _patches(_padded(part, zeros, window.padding), window, groups_of(region))


def _window(region: Region, batch: torch.Tensor) -> ConvolutionWindow:
    """Return the geometry of a convolution of this batch."""
    given = call_of(region.anchor, region.record).arguments
    return ConvolutionWindow.of(given, _weight_sizes(region)[2:], batch.dim() - 2)


@dataclass(frozen=True)
class ConvolutionWindow:
    """Geometry of a convolution with two spatial axes; with one spatial axis, the first has size 1.

    ``padding`` is (top, bottom, left, right).
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[int, int, int, int]

    @property
    def taps(self) -> int:
        """Return the number of kernel elements for one channel."""
        return self.kernel[0] * self.kernel[1]

    def result_size(self, size: Sequence[int]) -> tuple[int, int]:
        """Return the height and width of the result for a padded image of this size."""
        rows, columns = (
            (whole - dilation * (taps - 1) - 1) // stride + 1
            for whole, taps, stride, dilation in zip(size, self.kernel, self.stride, self.dilation, strict=True)
        )
        return rows, columns

    @classmethod
    def of(cls, given: Mapping[str, Any], kernel: tuple[Any, ...], axes: int) -> ConvolutionWindow:
        """Return the geometry of a call from its arguments, the kernel size and the number of spatial axes."""

        def pair(values: Any, idle: int) -> tuple[int, int]:
            values = tuple(values)
            values = values * axes if len(values) == 1 else values
            return (idle, values[0]) if axes == 1 else (values[0], values[1])

        size, stride, dilation = pair(kernel, 1), pair(given["stride"], 1), pair(given["dilation"], 1)
        if given["padding"] == "same":
            total = [d * (k - 1) for d, k in zip(dilation, size, strict=True)]
            return cls(
                size,
                stride,
                dilation,
                (total[0] // 2, total[0] - total[0] // 2, total[1] // 2, total[1] - total[1] // 2),
            )
        if given["padding"] == "valid":
            return cls(size, stride, dilation, (0, 0, 0, 0))
        rows, columns = pair(given["padding"], 0)
        return cls(size, stride, dilation, (rows, rows, columns, columns))


def _padded(images: torch.Tensor, zeros: torch.Tensor, padding: tuple[int, int, int, int]) -> torch.Tensor:
    """Pad images with the zero point of each channel, as kernels do."""
    if not any(padding):
        return images
    top, bottom, left, right = padding
    zero = zeros.to(images.dtype).reshape(1, -1, 1, 1)
    inner = F.pad(images, (left, right, top, bottom))
    inner[:, :, :top], inner[:, :, inner.shape[2] - bottom :] = zero, zero
    inner[:, :, :, :left], inner[:, :, :, inner.shape[3] - right :] = zero, zero
    return inner


def _patches(images: torch.Tensor, window: ConvolutionWindow, groups: int) -> torch.Tensor:
    """Unfold u8 [n, c, h, w] into the operands of weight rows, [groups, c / groups * taps, positions]."""
    (kh, kw), (sh, sw), (dh, dw) = window.kernel, window.stride, window.dilation
    n, channels, height, width = images.shape
    rows, columns = window.result_size((height, width))
    a, b, c, d = images.contiguous().stride()
    view = images.contiguous().as_strided((channels, kh, kw, n, rows, columns), (b, c * dh, d * dw, a, c * sh, d * sw))
    return view.reshape(groups, channels // groups * kh * kw, n * rows * columns)
