"""From a weight to its levels: scales, the multiples of groups, and the grid that rounding chooses from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from intaglio import numerics
from intaglio.errors import UnsupportedError
from intaglio.ir import DType, Origin
from intaglio.numerics import FloatArray, Int32Array
from intaglio.quant.recipes.choices import ActivationMode, WeightScales
from intaglio.quant.recipes.datatypes import Datatype
from intaglio.quant.recipes.settings import DEFAULT, Setting


@dataclass(frozen=True)
class Grid:
    """The values that a weight's elements can take: ``level * steps``, levels in low..high.

    ``steps`` and ``multiples`` broadcast against the weight; a step is the channel's scale times the multiple. Who
    rounds otherwise than `nearest` chooses other levels, and leaves the rest as it is.
    """

    steps: FloatArray
    multiples: Int32Array
    low: int
    high: int

    def nearest(self, weight: np.ndarray) -> Int32Array:
        """The closest levels; ties to even."""
        return numerics.quantize(weight, self.steps, 0, self.low, self.high)

    def clipped(self, weight: np.ndarray) -> FloatArray:
        """In steps, within low..high and not rounded: levels that are floating-point numbers themselves."""
        return np.clip(weight / self.steps, np.float32(self.low), np.float32(self.high))

    def stored(self, levels: np.ndarray) -> NDArray[np.int8]:
        """int8 in units of the channel's scale, exact: what kernels compute with."""
        return (levels * self.multiples).astype(np.int8)


def weight_grid(weight: np.ndarray, scales: np.ndarray, kind: Datatype, group: int = 0, axis: int = 0) -> Grid:
    """The grid of a weight whose scales (one, or one for each channel of ``axis``) are known.

    ``group``: so many neighbours of a channel share a multiple, that of least squared error; ``axis`` is 0 then.
    """
    spread = [1] * weight.ndim
    spread[axis] = len(scales)
    scales = np.asarray(scales, np.float32)
    steps = scales.reshape(spread)
    if not group:
        return Grid(steps, np.ones_like(steps, np.int32), kind.qmin, kind.qmax)
    rows = weight.reshape(len(weight), -1)
    found = numerics.group_multiples(_groups(rows, group), scales, kind.qmin, kind.qmax, kind.multiples)
    multiples = np.repeat(found, group, axis=1)[:, : rows.shape[1]].reshape(weight.shape)
    return Grid(steps * multiples.astype(np.float32), multiples, kind.qmin, kind.qmax)


def group_of(where: Origin, setting: Setting, outputs: int = 0) -> int:
    """Size of a weight's groups, 0 without. ``outputs``: axis of the weight that holds output channels.
    `UnsupportedError` where the datatype, the operator or what it computes with has none such."""
    group, kind, alone = setting.group, setting.weight, setting.activations == ActivationMode.FLOAT
    problem, remedy = None, 'weights = "channel"'
    if group and kind.multiples < 2:
        problem = f"groups of {kind.name} weights; levels times multiples must stay in 8 bits"
    elif group and outputs:
        problem = "groups of the weights of a transposed convolution; they run along the inputs of one output"
    elif kind.storage is DType.F16 and not alone:
        problem, remedy = f"{kind.name} weights and activations that are levels", 'activations = "float"'
    elif alone and not kind.native:
        problem, remedy = f"{kind.name} weights alone; only s8, what is packed as s8, and f16", 'weights_dtype = "f16"'
    if problem is not None:
        raise UnsupportedError(
            where.path or "model",
            where.operator,
            problem,
            source=where.source or None,
            remedy=f"another setting for [{where.path!r}]: {remedy}",
        )
    return group


def channel_scales(rows: np.ndarray, kind: Datatype, group: int = 0) -> FloatArray:
    """f32[C, K] -> f32[C]: the scale of each row, as the datatype's record says."""
    if group:
        return numerics.group_scale(_groups(rows, group), kind.qmin, kind.qmax, kind.multiples)
    if kind.squares:
        return numerics.least_squares(rows, kind.qmin, kind.qmax)
    return numerics.symmetric(np.abs(rows).max(1, initial=0), kind.qmax)


def weight_scales(weight: np.ndarray, setting: Setting = DEFAULT, axis: int = 0) -> FloatArray:
    """The step of every element, broadcastable to the weight, under a setting; before any bias enlarges a scale."""
    kind, group = setting.weight, setting.group
    rows = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)
    rows = rows.reshape(1, -1) if setting.weights == WeightScales.TENSOR else rows
    return weight_grid(weight, channel_scales(rows, kind, group), kind, group, axis).steps


def _groups(rows: np.ndarray, group: int) -> np.ndarray:
    """[C, K] -> [C, groups, size]; the last group is filled up with zeros."""
    missing = -rows.shape[1] % group
    return np.pad(rows, ((0, 0), (0, missing))).reshape(len(rows), -1, group)
