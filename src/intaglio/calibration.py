"""Calibrate with user-defined callbacks and data sets.

A `CalibrationCallback` chooses the parameters of the sites of one pattern. `Calibrator` calls it region by region with
a `CalibrationInfo` and returns the ranges of all sites. `GlobalCalibrationCallback` and `AverageMaxCalibrationCallback`
are ready-made callbacks. `DatasetManager` turns data of any form into batches, and `share` gives each rank of a
distributed calibration its part of a `DataLoader`. If no pattern has a callback, `intaglio.stages.calibrate` is enough.
"""

from intaglio.quant.calibrate.callbacks import (
    AverageMaxCalibrationCallback,
    CalibrationCallback,
    CalibrationInfo,
    Calibrator,
    GlobalCalibrationCallback,
)
from intaglio.quant.calibrate.dataset_manager import DatasetManager
from intaglio.quant.calibrate.distributed import share

__all__ = [
    "AverageMaxCalibrationCallback",
    "CalibrationCallback",
    "CalibrationInfo",
    "Calibrator",
    "DatasetManager",
    "GlobalCalibrationCallback",
    "share",
]
