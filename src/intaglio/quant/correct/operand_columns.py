"""Operands of the weights of an anchor, as columns of matrices whose products with weights are its results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.nn import functional as F

from intaglio import numerics
from intaglio.fxgraph.node_info import fixed_size, known_type
from intaglio.fxgraph.nodes import call_of, layer_operands
from intaglio.fxgraph.padding_masks import PaddedAxes, VisibleTokens, padded_axes, visible_groups
from intaglio.ir import SIGN_OFFSET, QParams, Signature
from intaglio.numerics.row_quantization import MIN_ROW_ABSMAX
from intaglio.quant.annotate.regions import Region
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.evaluation.layerwise_eval import LayerwiseEvaluation
from intaglio.quant.qdq.row_blocks import by_row_blocks

SHIFT_UNIT = 1 / 256
"""Unit of differences between float and quantized operands, in steps of the operand."""
LARGEST_SHIFT = 127 * 257
"""Largest difference in this unit, 127.5 steps: 127 * 256 + 127 is the largest number of two signed bytes."""


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


@dataclass
class OperandReader:
    """Reads the operands of layers from an evaluation; those of linear layers without padding.

    Attributes:
        evaluation: the evaluation of the model, layer by layer.
        signature: signature of the model.
        visible: the tokens of each batch that padding masks do not hide.
        group: the processes that take part.
        peaks: operand of dynamic layers -> its largest magnitude.
    """

    evaluation: LayerwiseEvaluation
    signature: Signature
    visible: tuple[VisibleTokens, ...]
    group: Group
    peaks: dict[str, float] = field(default_factory=dict)

    def batches(self, region: Region, x: fx.Node) -> Iterator[torch.Tensor]:
        """Yield the quantized operand of a region's anchor, of this rank's batches in groups of samples."""
        axes = self._padded_axes(region, x)
        for call, visible in enumerate(self.visible):
            yield from visible_groups(self.values(x, call), axes, visible)

    def differences(self, region: Region, x: fx.Node) -> Iterator[torch.Tensor]:
        """Yield the operand of the float model minus that of the model quantized so far, in groups of samples.

        It is an integer number of `SHIFT_UNIT` steps of the operand, int16, so that products add up exactly.
        """
        axes, place = self._padded_axes(region, x), region.activations().index(x)
        unit = self.parameters(x).step * SHIFT_UNIT
        for call, visible in enumerate(self.visible):
            exact = self.evaluation.unquantized_inputs(region, call)[place]
            found = torch.nan_to_num((exact - self.evaluation.quantized_inputs(region, call)[place]) / unit)
            rounded = torch.atleast_2d(numerics.round_clamp(found, -LARGEST_SHIFT, LARGEST_SHIFT).to(torch.int16))
            yield from visible_groups(rounded, axes, visible)

    def _padded_axes(self, region: Region, x: fx.Node) -> PaddedAxes | None:
        """Return the axes of an operand along which a padding mask applies. Convolutions over tokens keep the padding,
        which their windows reach.
        """
        return padded_axes(known_type(x).shape, self.signature) if region.record.is_linear_layer else None

    def values(self, x: fx.Node, call: int) -> torch.Tensor:
        """Return the quantized values of an operand; a vector, which is one sample, gets an axis for it.

        Operands of dynamic layers are rounded with one scale here, which weighs tokens by their magnitudes.
        """
        if x.name in self.evaluation.sites:
            return torch.atleast_2d(self.evaluation.quantized_values(x, call))
        q = self.parameters(x)
        return self.evaluation.derived_value(x, call, lambda: as_bytes(self.evaluation.float_values(x, call), q))

    def parameters(self, x: fx.Node) -> QParams:
        """Return the parameters of `values`."""
        if (site := self.evaluation.sites.get(x.name)) is not None:
            return self.evaluation.qparams[site.name]
        if x.name not in self.peaks:
            calls = range(len(self.visible))
            own = self.group.run_on_all_ranks(
                lambda: max((largest_magnitude(self.evaluation.float_values(x, call)) for call in calls), default=0.0)
            )
            self.peaks[x.name] = max(*self.group.gather(own), float(MIN_ROW_ABSMAX))
        return QParams((float(np.float32(self.peaks[x.name] / 127)),), (SIGN_OFFSET,), 1, 255)


def as_bytes(values: torch.Tensor, q: QParams) -> torch.Tensor:
    """Quantize values, f32[..., k], to u8[..., k] with one scale; a vector gets an axis.

    Values that are not finite count as zero.
    """
    step = np.float32(q.step)

    def rounded(rows: np.ndarray) -> np.ndarray:
        steps = np.where(np.isfinite(rows), rows, np.float32(0)) / step
        quantized: np.ndarray = numerics.round_clamp(steps, q.qmin, q.qmax, q.zero).astype(np.uint8)
        return quantized

    values = torch.atleast_2d(values)
    rows = values.numpy().reshape(-1, values.shape[-1])
    return torch.from_numpy(by_row_blocks(rounded, rows)).reshape(values.shape)


def largest_magnitude(values: torch.Tensor) -> float:
    """Return the largest magnitude of finite values, 0 without any."""
    if not values.numel():
        return 0.0
    low, high = (end.item() for end in values.aminmax())
    if math.isfinite(low) and math.isfinite(high):
        return float(max(-low, high))
    return float(torch.nan_to_num(values, 0.0, 0.0, 0.0).abs().max())
