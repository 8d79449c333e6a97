"""Ready-made calibration callbacks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from intaglio.argument_checks import check_arguments, check_fields
from intaglio.errors import CalibrationError, InputError
from intaglio.quant.calibrate.callbacks.calibration_info import CalibrationInfo
from intaglio.quant.calibrate.callbacks.callback_calibration import CalibrationCallback
from intaglio.quant.calibrate.callbacks.given_parameters import Given


@check_fields
@dataclass(frozen=True)
class GlobalCalibrationCallback(CalibrationCallback):
    """Gives every activation the same scale and zero point, and every weight the scale ``weight`` if there is one."""

    scale: float
    zero_point: int = 0
    weight: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("scale", self.scale), ("weight", self.weight)):
            if value is not None and not 0 < value < math.inf:
                problem = f"{name} = {value}; a scale must be a finite number above 0"
                raise InputError(
                    "GlobalCalibrationCallback", None, problem, remedy=f"pass {name} as the step of values"
                )

    @check_arguments
    def calibrate(self, info: CalibrationInfo) -> Mapping[str, Given]:
        """Return the scale and zero point of this callback for every activation, and ``weight`` for the weight."""
        names = [name for name in (*info.sites.inputs, info.sites.output) if name is not None]
        found: dict[str, Given] = dict.fromkeys(names, (self.scale, self.zero_point))
        if self.weight is not None and info.sites.weight is not None:
            found[info.sites.weight] = (self.weight, 0)
        return found


@check_fields
@dataclass(frozen=True)
class AverageMaxCalibrationCallback(CalibrationCallback):
    """Gives activations the mean of each batch's extrema, and weights the scales of their datatype.

    These are `CalibrationInfo.weight_scales` for each channel, or for the whole weight without ``per_channel``.
    """

    per_channel: bool = True

    @check_arguments
    def calibrate(self, info: CalibrationInfo) -> Mapping[str, Given]:
        """Return the means of the extrema for activations and the scales of the weight."""
        _check_batches(self, info)
        names, extrema = (*info.sites.inputs, info.sites.output), []
        for batch in range(info.batches):
            values = (*info.unquantized_inputs(batch), *info.unquantized_outputs(batch)[:1])  # an LSTM has states too
            extrema.append([(float(value.min()), float(value.max())) for value in values])
        means = np.mean(extrema, axis=0)
        ends = zip(names, means.tolist(), strict=True)
        found: dict[str, Given] = {name: (min(low, 0.0), high) for name, (low, high) in ends if name is not None}
        return {**found, **_weight_scales(info, self.per_channel)}


@check_fields
@dataclass(frozen=True)
class KLDivergenceCalibrationCallback(CalibrationCallback):
    """Gives activations the range that the method "kl" chooses, whatever method their setting has.

    Weights get the scales of their datatype, `CalibrationInfo.weight_scales`, for each channel, or for the whole weight
    without ``per_channel``.
    """

    per_channel: bool = True

    @check_arguments
    def calibrate(self, info: CalibrationInfo) -> Mapping[str, Given]:
        """Return the parameters of least divergence for activations and the scales of the weight."""
        _check_batches(self, info)
        return {**info.qparams_by("kl"), **_weight_scales(info, self.per_channel)}


def _check_batches(callback: CalibrationCallback, info: CalibrationInfo) -> None:
    """Raise `CalibrationError` for a calibration without data."""
    if not info.batches:
        problem = "the callback reads batches, but there is no data"
        raise CalibrationError(type(callback).__name__, None, problem, remedy="pass an iterable of batches")


def _weight_scales(info: CalibrationInfo, per_channel: bool) -> dict[str, Given]:
    """Return the scales of the region's weight that its datatype asks for; nothing for a region without a weight."""
    scales = info.weight_scales(per_channel)
    return {} if scales is None or info.sites.weight is None else {info.sites.weight: (scales, 0)}
