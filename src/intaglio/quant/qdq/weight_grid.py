"""Quantization grids of weights: scales, multiples of groups, and rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from intaglio import numerics
from intaglio.errors import UnsupportedError
from intaglio.ir import DType, Origin
from intaglio.numerics import FloatArray
from intaglio.quant.qdq.row_blocks import by_row_blocks, errors_of_scales
from intaglio.quant.recipes.choices import ActivationMode, WeightScales
from intaglio.quant.recipes.datatypes import Datatype
from intaglio.quant.recipes.settings import DEFAULT, Setting


@dataclass(frozen=True)
class WeightGrid:
    """The values that the elements of a weight can take: ``q * scale * multiple`` with q in `low`..`high`.

    Rounding methods other than `nearest` choose other quantized values on the same grid.

    Attributes:
        scales: the scales, broadcastable to the weight.
        low: lowest quantized value.
        high: highest quantized value.
        multiples: multiple of each group of elements in a row, int8 [rows, groups], or ``None``: all are 1.
        group: number of neighbours in a row that share a multiple.
    """

    scales: FloatArray
    low: int
    high: int
    multiples: NDArray[np.int8] | None = None
    group: int = 0

    def steps(self, shape: tuple[int, ...]) -> FloatArray:
        """Return the distances of neighbouring values, broadcastable to a weight of this shape."""
        return self.scales if self.multiples is None else self.scales * self.element_multiples(shape).astype(np.float32)

    def element_multiples(self, shape: tuple[int, ...]) -> NDArray[np.int8]:
        """Return the multiple of each element of a weight of this shape."""
        assert self.multiples is not None
        columns = math.prod(shape[1:])
        return np.repeat(self.multiples, self.group, axis=1)[:, :columns].reshape(shape)

    def part(self, rows: slice) -> WeightGrid:
        """Return the grid of some rows of the weight."""
        scales = self.scales[rows] if len(self.scales) > 1 else self.scales
        return replace(self, scales=scales, multiples=None if self.multiples is None else self.multiples[rows])

    def nearest(self, weight: np.ndarray) -> NDArray[Any]:
        """Quantize a weight to the nearest values, ties to even."""

        def quantized(weight: np.ndarray, grid: WeightGrid) -> NDArray[Any]:
            return self.narrow(numerics.quantize(weight, grid.steps(weight.shape), 0, self.low, self.high))

        return self._by_row_blocks(quantized, weight)

    def narrow(self, quantized: np.ndarray) -> NDArray[Any]:
        """Return quantized values in the smallest signed integer type that holds all values of the grid."""
        return quantized.astype(np.min_scalar_type(min(self.low, -1 - self.high)))

    def clipped(self, weight: np.ndarray) -> FloatArray:
        """Return the weight divided by the steps and clipped to `low`..`high`, not rounded, for float datatypes."""
        return np.clip(weight / self.steps(weight.shape), np.float32(self.low), np.float32(self.high))

    def values(self, quantized: np.ndarray) -> FloatArray:
        """Return the values, float32, that quantized values stand for."""
        return self._by_row_blocks(lambda q, grid: (q * grid.steps(q.shape)).astype(np.float32), quantized)

    def as_s8(self, quantized: np.ndarray) -> NDArray[np.int8]:
        """Return quantized values as int8 in exact units of the channel's scale, which kernels compute with."""
        if self.multiples is None:
            return quantized.astype(np.int8, copy=False)
        return self._by_row_blocks(lambda q, grid: (q * grid.element_multiples(q.shape)).astype(np.int8), quantized)

    def _by_row_blocks(
        self, compute: Callable[[np.ndarray, WeightGrid], NDArray[Any]], array: np.ndarray
    ) -> NDArray[Any]:
        """Return what a function makes of an array, computed for blocks of its rows and the grid of each."""

        def of_block(block: np.ndarray, scales: FloatArray, *multiples: NDArray[np.int8]) -> NDArray[Any]:
            return compute(block, replace(self, scales=scales, multiples=multiples[0] if multiples else None))

        return by_row_blocks(of_block, array, self.scales, *(() if self.multiples is None else (self.multiples,)))


def weight_grid(weight: np.ndarray, scales: np.ndarray, kind: Datatype, group: int = 0, axis: int = 0) -> WeightGrid:
    """Return the grid of a weight with known scales.

    Args:
        weight: float weight.
        scales: one scale, or one per channel of `axis`.
        kind: datatype of the quantized values.
        group: number of neighbours in a channel that share a multiple, chosen for the least squared error; 0 for no
            groups. With groups `axis` is 0.
        axis: axis of the output channels.
    """
    spread = [1] * weight.ndim
    spread[axis] = len(scales)
    scales = np.asarray(scales, np.float32)
    if not group:
        return WeightGrid(scales.reshape(spread), kind.qmin, kind.qmax)

    def multiples_of(rows: np.ndarray, scales: np.ndarray) -> NDArray[np.int8]:
        bounds = kind.qmin, kind.qmax, kind.multiples
        return numerics.group_multiples(_groups(rows, group), scales, *bounds, errors_of_scales).astype(np.int8)

    multiples = by_row_blocks(multiples_of, weight.reshape(len(weight), -1), scales)
    return WeightGrid(scales.reshape(spread), kind.qmin, kind.qmax, multiples, group)


def group_of(where: Origin, setting: Setting, outputs: int = 0) -> int:
    """Return the group size of a weight, 0 without groups.

    Args:
        where: origin of the operator, for the error.
        setting: setting of the operator.
        outputs: axis of the weight that holds the output channels.

    Raises:
        UnsupportedError: the datatype, the operator or the mode of its activations does not support the setting.
    """
    group, kind, alone = setting.group, setting.weight, setting.activations == ActivationMode.FLOAT
    problem, remedy = None, 'weights = "channel"'
    if group and kind.multiples < 2:
        problem = f"only integer weights of fewer than 8 bits can be quantized in groups, not {kind.name} weights"
    elif group and outputs:
        problem = "the weights of transposed convolutions cannot be quantized in groups"
    elif kind.storage is DType.F16 and not alone:
        problem, remedy = f"{kind.name} weights need activations in float", 'activations = "float"'
    elif alone and not kind.native:
        problem, remedy = (
            f"weight-only quantization takes integer weights of up to 8 bits and f16, not {kind.name}",
            'weights_dtype = "f16"',
        )
    if problem is not None:
        raise UnsupportedError(
            where.path or "model",
            where.operator,
            problem,
            source=where.source or None,
            remedy=f"set {remedy} for {where.path!r} in the recipe",
        )
    return group


def channel_scales(rows: np.ndarray, kind: Datatype, group: int = 0) -> FloatArray:
    """Return the scale of each row, f32[C, K] -> f32[C], by the rule of the datatype."""

    def scales_of(rows: np.ndarray) -> FloatArray:
        if group:
            bounds = kind.qmin, kind.qmax, kind.multiples
            return numerics.group_scale(_groups(rows, group), *bounds, errors_of_scales)
        if kind.squares:
            return numerics.least_squares(rows, kind.qmin, kind.qmax, errors_of_scales)
        return numerics.symmetric_scale(np.abs(rows).max(1, initial=0), kind.qmax)

    return by_row_blocks(scales_of, rows)


def weight_scales(weight: np.ndarray, setting: Setting = DEFAULT, axis: int = 0) -> FloatArray:
    """Return the step of every element under a setting, broadcastable to the weight and not yet fitted to a bias."""
    kind, group = setting.weight, setting.group
    rows = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)
    rows = rows.reshape(1, -1) if setting.weights == WeightScales.TENSOR else rows
    return weight_grid(weight, channel_scales(rows, kind, group), kind, group, axis).steps(weight.shape)


def _groups(rows: np.ndarray, group: int) -> np.ndarray:
    """Reshape [C, K] to [C, groups, size]; the last group is padded with zeros."""
    missing = -rows.shape[1] % group
    return np.pad(rows, ((0, 0), (0, missing))).reshape(len(rows), -1, group)
