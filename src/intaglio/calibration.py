"""Calibrate with callbacks and data sets of one's own.

A `CalibrationCallback` chooses the parameters of the sites of one pattern; `Calibrator` calls it with a
`CalibrationInfo`, region by region, and returns the ranges of all sites. `GlobalCalibrationCallback` and
`AverageMaxCalibrationCallback` are two of them. `DatasetManager` gives any data the form of batches, and `share` gives
every rank of a distributed calibration its part of a `DataLoader`. `intaglio.stages.calibrate` is all that is needed
where no pattern has a callback.
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
