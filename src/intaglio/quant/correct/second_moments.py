"""Second moments of the quantized operand of an anchor, as integers that add up exactly in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from intaglio.fxgraph.node_info import fixed_size, known_type
from intaglio.fxgraph.nodes import call_of, layer_operands
from intaglio.ir import DType, QParams
from intaglio.native.cpu import IsaName, isas
from intaglio.quant.annotate.regions import Region
from intaglio.quant.annotate.sites import Site
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.correct.linalg import OrderedFactor, ordered_factor
from intaglio.torch_private import int8_matmul

BYTE_OFFSET = 128
"""Difference of unsigned and signed bytes; products of signed bytes are accumulated by one instruction."""
ROWS_AT_ONCE = 1 << 16
"""Positions that are multiplied at once: 2^16 products of bytes fit into an int32 sum."""
EXACT_POSITIONS = 1 << 10
"""Positions whose products of signed bytes, at most 2^14 each, have a sum that float32 represents exactly."""
GATHERED = 1 << 25
"""Bytes of columns that are multiplied together if batches are small."""
LARGEST_MOMENTS = 1 << 27
"""Largest number of products that are computed for one weight, 1 GiB; the correction needs several times as much."""


@dataclass(frozen=True)
class Moments:
    """Moments of x over all positions that an anchor computes.

    The vector x has the quantized operands of one result minus their zero points, in the order of a row of the weight.

    Attributes:
        products: sum of x x^T, int64 [groups, k, k].
        sums: sum of x, int64 [groups, k].
        count: number of positions.
        samples: number of samples that they are from.
    """

    products: torch.Tensor
    sums: torch.Tensor
    count: int
    samples: int

    def __add__(self, other: Moments) -> Moments:
        """Return the moments over the positions of both."""
        counts = (self.count + other.count, self.samples + other.samples)
        return Moments(self.products + other.products, self.sums + other.sums, *counts)

    @cached_property
    def matrix(self) -> torch.Tensor:
        """Return ``products`` as float64."""
        return self.products.double()

    @cached_property
    def factor(self) -> OrderedFactor | None:
        """Return the factor of the matrix."""
        return ordered_factor(self.matrix)


def moments_refusal(region: Region, site: Site) -> bool:
    """Return whether moments of an anchor's operand cannot be computed; its weight is then rounded to nearest."""
    if region.record.name not in ("conv1d", "conv2d", "linear") or site.dtype not in (DType.U8, DType.S8):
        return True
    return _groups_of(region) * _row_length(region) ** 2 > LARGEST_MOMENTS


def _groups_of(region: Region) -> int:
    """Return the number of groups of an anchor."""
    return int(call_of(region.anchor, region.record).arguments.get("groups", 1))


def _row_length(region: Region) -> int:
    """Return the number of weights of one output."""
    return int(np.prod(_weight_sizes(region)[1:]))


def _weight_sizes(region: Region) -> tuple[int, ...]:
    weight = layer_operands(region.anchor).weight
    return tuple(fixed_size(weight, axis) for axis in range(len(known_type(weight).shape)))


def moments(region: Region, quantized: Iterable[torch.Tensor], q: QParams) -> Moments:
    """Return the moments of an anchor's operand.

    Args:
        region: the region of the anchor.
        quantized: batches of quantized operands, u8 in logical order; without batches all moments are zero.
        q: parameters of the operand.
    """
    groups, k = _groups_of(region), _row_length(region)
    samples = 0

    def columns_of_batches() -> Iterator[torch.Tensor]:
        nonlocal samples
        for batch in quantized:
            samples += len(batch)
            yield from _columns(region, batch, q)

    products, sums = torch.zeros(groups, k, k, dtype=torch.int64), torch.zeros(groups, k, dtype=torch.int64)
    count = 0
    for columns in _gathered(columns_of_batches()):
        signed = (columns.to(torch.int16) - BYTE_OFFSET).to(torch.int8)
        _add_products(products, signed)
        sums += signed.sum(2, dtype=torch.int64)
        count += signed.shape[2]
    return _shifted(Moments(products, sums, count, samples), BYTE_OFFSET - _operand_zero_points(region, q, groups, k))


def sum_over_ranks(found: Moments, group: Group) -> Moments:
    """Return the moments over the batches of all ranks."""
    if group.size == 1:
        return found
    parts = (found.products.flatten(), found.sums.flatten(), torch.tensor([found.count, found.samples]))
    flat = torch.from_numpy(group.total(torch.cat(parts).numpy()))
    products, sums, counts = flat.split([part.numel() for part in parts])
    return Moments(products.view_as(found.products), sums.view_as(found.sums), *map(int, counts))


def _gathered(parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield columns [groups, k, positions], joining small parts.

    Each product costs a pass over [groups, k, k], so there should be few of them.
    """
    pending: list[torch.Tensor] = []
    for part in parts:
        pending.append(part)
        if sum(one.numel() for one in pending) >= GATHERED:
            yield torch.cat(pending, 2)
            pending = []
    if pending:
        yield torch.cat(pending, 2)


def _add_products(total: torch.Tensor, signed: torch.Tensor) -> None:
    """Add the products of int8 [groups, k, positions] to int64 [groups, k, k]."""
    groups, _, count = signed.shape
    rows = ROWS_AT_ONCE if groups == 1 else max(1, ROWS_AT_ONCE // groups)
    for start in range(0, count, rows):
        part = signed[:, :, start : start + rows]
        if groups == 1:
            total[0] += integer_gram(part[0]) if IsaName.AVX512VNNI in isas() else float_gram(part[0])
        else:  # float64 represents these sums exactly and multiplies all small groups at once.
            wide = part.double()
            total += (wide @ wide.transpose(1, 2)).to(torch.int64)


def integer_gram(x: torch.Tensor) -> torch.Tensor:
    """Return ``x x^T`` of int8 [k, positions] in int32, by int8 products; at most `ROWS_AT_ONCE` positions."""
    x = F.pad(x, (0, 1)) if x.shape[1] == 1 else x  # _int_mm misreads the strides of a single column.
    return int8_matmul(x, x.t())


def float_gram(x: torch.Tensor) -> torch.Tensor:
    """Return ``x x^T`` of int8 [k, positions] in int64, by exact float32 products of `EXACT_POSITIONS` at a time.

    On a processor without VNNI this is 20 times as fast as PyTorch's int8 product (31 and 1.2 GMAC/s on a Zen 3 core).
    """
    total = torch.zeros(len(x), len(x), dtype=torch.int64)
    for part in x.split(EXACT_POSITIONS, 1):
        wide = part.float()
        total += (wide @ wide.t()).to(torch.int64)
    return total


def _shifted(total: Moments, offset: torch.Tensor) -> Moments:
    """Return the moments of x + offset, int64 [groups, k], computed from those of x."""
    products, row = total.products, total.sums[:, None, :] + total.count * offset[:, None, :]
    products += offset[:, :, None] * row
    products += total.sums[:, :, None] * offset[:, None, :]
    return Moments(products, total.sums + total.count * offset, total.count, total.samples)


def _operand_zero_points(region: Region, q: QParams, groups: int, k: int) -> torch.Tensor:
    """Return the zero points of the operands of each weight column, int64 [groups, k]."""
    zeros = torch.tensor(q.zeros)
    if len(q.zeros) == 1 or region.record.is_linear_layer:
        return zeros.expand(groups, k)
    return zeros.reshape(groups, -1).repeat_interleave(k * groups // len(q.zeros), 1)


def _columns(region: Region, batch: torch.Tensor, q: QParams) -> Iterable[torch.Tensor]:
    """Yield u8 columns [groups, k, positions] of a few images at a time."""
    if region.record.is_linear_layer:
        yield batch.reshape(-1, batch.shape[-1]).t().contiguous()[None]
        return
    given = call_of(region.anchor, region.record).arguments
    images = batch[:, :, None] if batch.dim() == 3 else batch
    window = ConvolutionWindow.of(given, _weight_sizes(region)[2:], batch.dim() - 2)
    zeros = torch.tensor(q.zeros).expand(images.shape[1])
    size = max(1, (1 << 25) // max(1, images[0].numel() * window.taps))
    for part in images.split(size):
        yield _patches(_padded(part, zeros, window.padding), window, given["groups"])


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
    rows, columns = (height - dh * (kh - 1) - 1) // sh + 1, (width - dw * (kw - 1) - 1) // sw + 1
    a, b, c, d = images.contiguous().stride()
    view = images.contiguous().as_strided((channels, kh, kw, n, rows, columns), (b, c * dh, d * dw, a, c * sh, d * sw))
    return view.reshape(groups, channels // groups * kh * kw, n * rows * columns)
