"""Second moments of the quantized operand of an anchor, as integers that add up exactly in any order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from intaglio.ir import DType, QParams
from intaglio.native.row_errors import row_errors, split_rows
from intaglio.quant.annotate.regions import Region
from intaglio.quant.annotate.sites import Site
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.calibrate.float_run import linear
from intaglio.quant.correct.linalg import (
    Factor,
    operand_factor,
    ordered_factor,
)
from intaglio.quant.correct.operand_columns import (
    SHIFT_UNIT,
    groups_of,
    operand_columns,
    operand_zero_points,
    row_length,
)
from intaglio.quant.evaluation.byte_products import EXACT_PRODUCTS, MOST_PRODUCTS, byte_products

BYTE_OFFSET = 128
"""Difference of unsigned and signed bytes; products of signed bytes are accumulated by one instruction."""
GATHERED = 1 << 27
"""Bytes of columns that are multiplied together if batches are small."""
WEIGHTS_OF_A_POSITION = 3
"""With at least so many weights of one output for each position, operands are kept instead of their products: they take
less memory, and what is computed from them takes less time."""
GRAM_ROWS = 512
"""Rows of the products that are computed at once; products to the right of them are the same as those below."""
ERROR_BLOCK = 512
"""Columns of an error that are multiplied at once by those of the moments that are not left of them."""
LEAST_FLOAT32 = 1024
"""Weights of one output from which on errors are computed by float32 products, which take a quarter of the time."""
LEAST_PEAK = 1e-300
"""Divisor of rows of zeros."""
LEAST_SPLIT = 256
"""Weights of one output from which on errors are computed by products of bytes, with rows rounded to two bytes. Each
rounding is at most 2^-16 of the largest element of its row; together they change an error by about 1 in 100,000."""


class Operands(NamedTuple):
    """Operands x of all positions, in an order that their values define.

    Attributes:
        signed: x minus its offset, int8 [groups, k, positions].
        offset: int32 [groups, k].
    """

    signed: torch.Tensor
    offset: torch.Tensor

    @staticmethod
    def of(signed: torch.Tensor, offset: torch.Tensor) -> Operands:
        """Sort the positions by their bytes, whatever the order of the data was."""
        columns = signed.permute(2, 0, 1).contiguous().numpy()
        if len(columns):
            ordered = np.sort(columns.reshape(len(columns), -1).view(f"V{columns[0].nbytes}")[:, 0])
            signed = torch.from_numpy(ordered.view(np.int8).reshape(columns.shape)).permute(1, 2, 0).contiguous()
        return Operands(signed, offset.to(torch.int32))

    @property
    def wide(self) -> torch.Tensor:
        """Return x as float64."""
        return self.signed.double() + self.offset[..., None]

    def joined(self, other: Operands) -> Operands:
        """Return the positions of both, which have the same offset."""
        return Operands.of(torch.cat([self.signed, other.signed], 2), self.offset)

    def errors(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what `Moments.errors` returns, for one group."""
        threads = torch.get_num_threads()
        split = split_rows(rows[0].numpy(), self.offset[0].numpy(), threads)
        digits = torch.from_numpy(split.digits).flatten(0, 1)
        products = byte_products(digits, self.signed[0].t().contiguous())
        found = row_errors(products.unflatten(0, (2, -1)).numpy(), split, threads)
        return torch.from_numpy(found)[None]


class Shift(NamedTuple):
    """Differences of the operands in the float model from those in the model quantized so far, which are x.

    Attributes:
        products: sum of d x^T over all positions, where d is the difference, float64 [groups, k, k].
        squares: sum of d d^T.
    """

    products: torch.Tensor
    squares: torch.Tensor

    def __add__(self, other: tuple[Any, ...]) -> Shift:
        """Return the shift over the positions of both."""
        assert isinstance(other, Shift)
        return Shift(self.products + other.products, self.squares + other.squares)


@dataclass(frozen=True)
class Moments:
    """Moments of x over all positions that an anchor computes.

    The vector x has the quantized operands of one result minus their zero points, in the order of a row of the weight.

    Attributes:
        products: sum of x x^T, float64 [groups, k, k]; ``None`` if there are so few positions that x are kept instead.
        sums: sum of x, int64 [groups, k].
        count: number of positions.
        samples: number of samples that they are from.
        operands: x of all positions, if there are few.
        shift: products of x with their differences from the float model, where results are compared with those of the
            float model.
    """

    products: torch.Tensor | None
    sums: torch.Tensor
    count: int
    samples: int
    operands: Operands | None = None
    shift: Shift | None = None

    def __add__(self, other: Moments) -> Moments:
        """Return the moments over the positions of both."""
        sums, counts = self.sums + other.sums, (self.count + other.count, self.samples + other.samples)
        few = are_few(counts[0], sums.shape[1])
        operands = None
        if self.operands and other.operands and (few or are_kept(counts[0], *sums.shape)):
            operands = self.operands.joined(other.operands)
        shift = self.shift + other.shift if self.shift and other.shift else None
        return Moments(None if few else self.matrix + other.matrix, sums, *counts, operands, shift)

    def result_errors(self, weight: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        """Return the sum of squared errors of the results of each rounded row, [groups, rows], in squared steps of x.

        They are compared with what the exact weight computes from x or, with a shift, from the float model's operands:
        the error is then ``(weight - rounded) x + weight d``.
        """
        lost = weight - rounded
        error = self.errors(lost)
        if self.shift is None:
            return error
        crossed = (lost * row_products(weight, self.shift.products)).sum(2)
        missing = (weight * row_products(weight, self.shift.squares)).sum(2)
        return (error + 2 * crossed + missing).clamp_min(0)

    def target(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rows whose results from x are next to those of a weight from the float model's operands.

        They solve a least-squares problem, damped as for GPTQ, so that rows for few positions stay close to the weight.
        """
        if self.shift is None or self.factor is None:
            return weight
        return weight + self.factor.solve(row_products(weight, self.shift.products))

    def errors(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``row M row^T`` of each row, [groups, rows], for float64 [groups, rows, k] and M = sum of x x^T."""
        if self.operands is not None and are_kept(self.count, *self.sums.shape):
            return self.operands.errors(rows)
        if self.products is None:
            return (rows @ self._wide).square().sum(2)
        if rows.shape[0] == 1 and rows.shape[2] >= LEAST_FLOAT32:
            return float32_errors(self.products[0], rows[0])[None]
        total = rows.new_zeros(rows.shape[:2])
        for start in range(0, rows.shape[2], ERROR_BLOCK):
            stop, behind = start + ERROR_BLOCK, rows[..., start:]
            products = rows[..., start:stop] @ self.products[:, start:stop, start:]
            products[..., ERROR_BLOCK:] *= 2  # M is symmetric
            total += (products * behind).sum(2)
        return total

    @property
    def matrix(self) -> torch.Tensor:
        """Return the sum of x x^T as float64."""
        return self._wide @ self._wide.mT if self.products is None else self.products

    @cached_property
    def factor(self) -> Factor | None:
        """Return the factor of the matrix."""
        return operand_factor(self._wide) if self.products is None else ordered_factor(self.products, self.count)

    @cached_property
    def _wide(self) -> torch.Tensor:
        """Return the operands as float64."""
        assert self.operands is not None
        return self.operands.wide


def row_products(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return ``rows M`` for float64 [groups, rows, k] and [groups, k, k]; large ones by float32 products."""
    if rows.shape[0] > 1 or rows.shape[2] < LEAST_FLOAT32:
        return rows @ matrix
    peaks = rows.abs().amax(2, keepdim=True).clamp_min(LEAST_PEAK)
    scaled = (rows / peaks).float()[0]
    parts = [linear(scaled, part.mT.float()) for part in matrix[0].split(ERROR_BLOCK, 1)]
    return torch.cat(parts, 1).double()[None] * peaks


def float32_errors(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return ``row M row^T`` of each row of float64 [rows, k], by float32 products.

    Rows are scaled to a largest magnitude of 1, so that no product overflows.
    """
    peaks = rows.abs().amax(1, keepdim=True).clamp_min(LEAST_PEAK)
    scaled = (rows / peaks).float()
    total = rows.new_zeros(len(rows))
    for start in range(0, len(matrix), ERROR_BLOCK):
        stop = start + ERROR_BLOCK
        products = linear(scaled[:, start:stop], matrix[start:, start:stop].float())
        products[:, ERROR_BLOCK:] *= 2  # M is symmetric
        total += products.mul_(scaled[:, start:]).sum(1)
    return total.clamp_min(0) * peaks[:, 0].square()


def has_moments(region: Region, site: Site | None) -> bool:
    """Return whether an anchor is an operator whose operand has moments; other weights are rounded to nearest.

    ``site`` is that of the operand, or ``None`` for a dynamic layer.
    """
    is_int8 = site is None or site.dtype in (DType.U8, DType.S8)
    return is_int8 and region.record.name in ("conv1d", "conv2d", "linear")


def moments(region: Region, quantized: Iterable[torch.Tensor], q: QParams) -> Moments:
    """Return the moments of an anchor's operand.

    Args:
        region: the region of the anchor.
        quantized: batches of quantized operands, u8 in logical order; without batches all moments are zero.
        q: parameters of the operand.
    """
    groups, k = groups_of(region), row_length(region)
    count, samples, kept = 0, 0, True
    products, sums = None, torch.zeros(groups, k, dtype=torch.int64)
    pending = [torch.zeros(groups, k, 0, dtype=torch.int8)]
    for batch in quantized:
        samples += len(batch)
        for columns in operand_columns(region, batch, q):
            pending.append((columns ^ BYTE_OFFSET).view(torch.int8))
            count += columns.shape[2]
            # Each product costs a pass over [groups, k, k], so there should be few of them.
            kept = are_few(count, k) or are_kept(count, groups, k)
            if not kept and sum(part.numel() for part in pending) >= GATHERED:
                products, pending = _with_products(products, sums, torch.cat(pending, 2)), pending[:1]
    offset = BYTE_OFFSET - operand_zero_points(region, q, groups, k)
    rest = torch.cat(pending, 2)
    operands = Operands.of(rest, offset) if kept else None
    if are_few(count, k):
        sums = rest.sum(2, dtype=torch.int64) + count * offset
        return Moments(None, sums, count, samples, operands)
    found = _shifted(Moments(_with_products(products, sums, rest), sums, count, samples), offset)
    return replace(found, operands=operands)


def sum_over_ranks(found: Moments, group: Group) -> Moments:
    """Return the moments over the batches of all ranks."""
    if group.size == 1:
        return found
    sums = torch.from_numpy(group.total(found.sums.numpy()))
    count, samples = map(int, group.total(np.array([found.count, found.samples])))
    few, operands = are_few(count, sums.shape[1]), None
    if few or are_kept(count, *sums.shape):
        assert found.operands is not None
        parts = [torch.from_numpy(part) for part in group.gather(found.operands.signed.numpy())]
        operands = Operands.of(torch.cat(parts, 2), found.operands.offset)
    products = None if few else torch.from_numpy(group.total(found.matrix.numpy()))
    shift = found.shift
    if shift is not None:
        shift = Shift(*(torch.from_numpy(group.total(part.numpy())) for part in shift))
    return Moments(products, sums, count, samples, operands, shift)


def shift_of(
    region: Region, quantized: Iterable[torch.Tensor], differences: Iterable[torch.Tensor], q: QParams
) -> Shift:
    """Return the shift of an anchor's operand; products of bytes are exact, so they add up in any order.

    Args:
        region: the region of the anchor.
        quantized: batches of quantized operands, as for `moments`.
        differences: operands of the float model minus the quantized ones, int16 in units of `SHIFT_UNIT` steps, of
            magnitudes up to `LARGEST_SHIFT`.
        q: parameters of the operand.
    """
    groups, k = groups_of(region), row_length(region)
    offset = BYTE_OFFSET - operand_zero_points(region, q, groups, k).double()
    total = Shift(*(torch.zeros(groups, k, k, dtype=torch.float64) for _ in range(2)))
    pending: list[tuple[torch.Tensor, ...]] = []
    for batch, difference in zip(quantized, differences, strict=True):
        exact = operand_columns(region, difference, q.with_offset(-q.zero))
        for columns, d in zip(operand_columns(region, batch, q), exact, strict=True):
            total.products.add_(d.sum(2, dtype=torch.int64).double()[..., None] * offset[:, None])
            low = (d + BYTE_OFFSET).bitwise_and_(255).sub_(BYTE_OFFSET)
            digits = ((d - low) >> 8).to(torch.int8), low.to(torch.int8)
            pending.append(((columns ^ BYTE_OFFSET).view(torch.int8), *digits))
            # Each product costs a pass over [groups, k, k], so there should be few of them.
            if sum(parts[0].numel() for parts in pending) >= GATHERED:
                _add_shift(total, pending)
                pending = []
    if pending:
        _add_shift(total, pending)
    return Shift(total.products * SHIFT_UNIT, total.squares * SHIFT_UNIT**2)


def _add_shift(total: Shift, pending: list[tuple[torch.Tensor, ...]]) -> None:
    """Add the products of x and of the high and the low bytes of differences, int8 [groups, k, positions] each."""
    joined = (torch.cat(parts, 2) for parts in zip(*pending, strict=True))
    for products, squares, *whole in zip(*total, *joined, strict=True):
        for x, high, low in zip(*(part.split(MOST_PRODUCTS, 1) for part in whole), strict=True):
            products.add_(byte_products(high, x), alpha=256).add_(byte_products(low, x))
            crossed = byte_products(high, low)
            squares.add_(crossed, alpha=256).add_(crossed.mT, alpha=256)
            _add_gram(squares, high, 1 << 16)
            _add_gram(squares, low)


def are_few(positions: int, k: int) -> bool:
    """Return whether the operands of so many positions are kept instead of moments, for rows with k elements."""
    return positions * WEIGHTS_OF_A_POSITION <= k


def are_kept(positions: int, groups: int, k: int) -> bool:
    """Return whether the operands of so many positions are kept for errors, for rows with k elements."""
    return groups == 1 and LEAST_SPLIT <= k <= MOST_PRODUCTS and positions <= k


def _with_products(total: torch.Tensor | None, sums: torch.Tensor, signed: torch.Tensor) -> torch.Tensor:
    """Return float64 [groups, k, k] plus the products of int8 [groups, k, positions]; add their sums to ``sums``."""
    groups, k, count = signed.shape
    total = torch.zeros(groups, k, k, dtype=torch.float64) if total is None else total
    rows = MOST_PRODUCTS if groups == 1 else max(1, MOST_PRODUCTS // groups)
    for start in range(0, count, rows):
        part = signed[:, :, start : start + rows]
        if groups == 1:
            _add_gram(total[0], part[0])
            sums[0] += sum(few.float().sum(1).long() for few in part[0].split(EXACT_PRODUCTS, 1))
        else:  # float64 represents these sums exactly and multiplies all small groups at once.
            wide = part.double()
            total.baddbmm_(wide, wide.mT)
            sums += wide.sum(2).long()
    return total


def _add_gram(total: torch.Tensor, x: torch.Tensor, factor: int = 1) -> None:
    """Add ``factor x x^T`` of int8 [k, positions] to float64 [k, k]. Rows are multiplied by those up to them only."""
    for start in range(0, len(x), GRAM_ROWS):
        here, stop = slice(start, start + GRAM_ROWS), min(start + GRAM_ROWS, len(x))
        products = byte_products(x[here], x[:stop])
        total[here, :stop].add_(products, alpha=factor)
        total[:start, here].add_(products[:, :start].mT, alpha=factor)


def _shifted(total: Moments, offset: torch.Tensor) -> Moments:
    """Return the moments of x + offset, int64 [groups, k], computed from those of x."""
    assert total.products is not None
    sums, shift = total.sums.double(), offset.double()
    left, right = torch.stack([shift, sums], 2), torch.stack([sums + total.count * shift, shift], 1)
    products = total.products.baddbmm_(left, right)
    return Moments(products, total.sums + total.count * offset, total.count, total.samples)
