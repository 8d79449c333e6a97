"""Calibrate with user-defined callbacks and data sets.

A `CalibrationCallback` chooses the parameters of the sites of one pattern. `Calibrator` calls it region by region with
a `CalibrationInfo` and returns the ranges of all sites. `GlobalCalibrationCallback`, `AverageMaxCalibrationCallback`
and `KLDivergenceCalibrationCallback` are ready-made callbacks. `DatasetManager` turns data of any form into batches,
and `share` gives each rank of a distributed calibration its part of a `DataLoader`. If no pattern has a callback,
`intaglio.stages.calibrate` is enough.
"""

from intaglio.quant.calibrate.callbacks.builtin_callbacks import (
    AverageMaxCalibrationCallback,
    GlobalCalibrationCallback,
    KLDivergenceCalibrationCallback,
)
from intaglio.quant.calibrate.callbacks.calibration_info import CalibrationInfo
from intaglio.quant.calibrate.callbacks.callback_calibration import CalibrationCallback, Calibrator
from intaglio.quant.calibrate.dataset_manager import DatasetManager
from intaglio.quant.calibrate.distributed import share

__all__ = [
    "AverageMaxCalibrationCallback",
    "CalibrationCallback",
    "CalibrationInfo",
    "Calibrator",
    "DatasetManager",
    "GlobalCalibrationCallback",
    "KLDivergenceCalibrationCallback",
    "share",
]
