"""Canonical graph -> sites -> statistics -> parameters -> the Q/DQ reference model."""

from intaglio.quant.annotate import annotate_graph
from intaglio.quant.calibrate import calibrate
from intaglio.quant.callbacks import (
    AverageMaxCalibrationCallback,
    CalibrationCallback,
    CalibrationInfo,
    Calibrator,
    GlobalCalibrationCallback,
)
from intaglio.quant.convert import Reference, convert
from intaglio.quant.data import Binder, binder_for, peek
from intaglio.quant.datasets import DatasetManager
from intaglio.quant.datatypes import DATATYPES, Datatype
from intaglio.quant.distributed import Group, share
from intaglio.quant.image import Image
from intaglio.quant.lint import lint
from intaglio.quant.methods import METHODS
from intaglio.quant.parameters import Parameter, Parameters
from intaglio.quant.patterns import QuantizerPattern
from intaglio.quant.prepare import Observer, Prepared, annotate, prepare
from intaglio.quant.qat import PreparedQat
from intaglio.quant.ranges import Finding, Ranges
from intaglio.quant.recipe import Quantizer, Recipe, Setting
from intaglio.quant.regions import Annotations, Region
from intaglio.quant.sites import Derived, Fixed, Observed, Shared, Site, Skip, groups
from intaglio.quant.skips import macs
from intaglio.quant.statistics import Statistics
from intaglio.quant.weights import Grid, weight_grid, weight_scales

__all__ = [
    "DATATYPES",
    "METHODS",
    "Annotations",
    "AverageMaxCalibrationCallback",
    "Binder",
    "CalibrationCallback",
    "CalibrationInfo",
    "Calibrator",
    "DatasetManager",
    "Datatype",
    "Derived",
    "Finding",
    "Fixed",
    "GlobalCalibrationCallback",
    "Grid",
    "Group",
    "Image",
    "Observed",
    "Observer",
    "Parameter",
    "Parameters",
    "Prepared",
    "PreparedQat",
    "Quantizer",
    "QuantizerPattern",
    "Ranges",
    "Recipe",
    "Reference",
    "Region",
    "Setting",
    "Shared",
    "Site",
    "Skip",
    "Statistics",
    "annotate",
    "annotate_graph",
    "binder_for",
    "calibrate",
    "convert",
    "groups",
    "lint",
    "macs",
    "peek",
    "prepare",
    "share",
    "weight_grid",
    "weight_scales",
]
