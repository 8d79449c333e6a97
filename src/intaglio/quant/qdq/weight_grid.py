"""Quantization grids of weights: scales, multiples of groups, and rounding."""

from __future__ import annotations

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
    """The values that the elements of a weight can take: ``q * steps`` with q in `low`..`high`.

    Rounding methods other than `nearest` choose other quantized values on the same grid.

    Attributes:
        steps: channel scale times multiple, broadcastable to the weight.
        multiples: multiple of each group, broadcastable to the weight; 1 without groups.
        low: lowest quantized value.
        high: highest quantized value.
    """

    steps: FloatArray
    multiples: NDArray[np.int8]
    low: int
    high: int

    def nearest(self, weight: np.ndarray) -> NDArray[Any]:
        """Quantize a weight to the nearest values, ties to even."""

        def quantized(weight: np.ndarray, steps: FloatArray) -> NDArray[Any]:
            return self.narrow(numerics.quantize(weight, steps, 0, self.low, self.high))

        return by_row_blocks(quantized, weight, self.steps)

    def narrow(self, quantized: np.ndarray) -> NDArray[Any]:
        """Return quantized values in the smallest signed integer type that holds all values of the grid."""
        return quantized.astype(np.min_scalar_type(min(self.low, -1 - self.high)))

    def clipped(self, weight: np.ndarray) -> FloatArray:
        """Return the weight divided by the steps and clipped to `low`..`high`, not rounded, for float datatypes."""
        return np.clip(weight / self.steps, np.float32(self.low), np.float32(self.high))

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> WeightGrid:
        """Return the grid with other steps and multiples, each computed from those of this grid."""
        return replace(self, steps=change(self.steps), multiples=change(self.multiples))

    def as_s8(self, quantized: np.ndarray) -> NDArray[np.int8]:
        """Return quantized values as int8 in exact units of the channel's scale, which kernels compute with."""
        return by_row_blocks(lambda q, multiples: (q * multiples).astype(np.int8), quantized, self.multiples)


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
    steps = scales.reshape(spread)
    if not group:
        return WeightGrid(steps, np.ones_like(steps, np.int8), kind.qmin, kind.qmax)
    rows = weight.reshape(len(weight), -1)

    def multiples_of(rows: np.ndarray, scales: np.ndarray) -> NDArray[np.int8]:
        bounds = kind.qmin, kind.qmax, kind.multiples
        found = numerics.group_multiples(_groups(rows, group), scales, *bounds, errors_of_scales)
        return np.repeat(found.astype(np.int8), group, axis=1)[:, : rows.shape[1]]

    multiples = by_row_blocks(multiples_of, rows, scales).reshape(weight.shape)
    steps = by_row_blocks(lambda multiples, steps: steps * multiples.astype(np.float32), multiples, steps)
    return WeightGrid(steps, multiples, kind.qmin, kind.qmax)


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
    return weight_grid(weight, channel_scales(rows, kind, group), kind, group, axis).steps


def _groups(rows: np.ndarray, group: int) -> np.ndarray:
    """Reshape [C, K] to [C, groups, size]; the last group is padded with zeros."""
    missing = -rows.shape[1] % group
    return np.pad(rows, ((0, 0), (0, missing))).reshape(len(rows), -1, group)
