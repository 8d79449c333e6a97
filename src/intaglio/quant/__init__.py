"""Canonical graph -> sites -> statistics -> parameters -> the Q/DQ reference model."""

from intaglio.quant.annotate import Annotations, Region, annotate_graph, macs
from intaglio.quant.calibrate import calibrate
from intaglio.quant.convert import Reference, convert
from intaglio.quant.data import Binder, binder_for, peek
from intaglio.quant.distributed import Group, share
from intaglio.quant.image import Image
from intaglio.quant.lint import lint
from intaglio.quant.methods import METHODS
from intaglio.quant.prepare import Observer, Prepared, annotate, prepare
from intaglio.quant.ranges import Finding, Ranges
from intaglio.quant.recipe import Quantizer, Recipe, Setting
from intaglio.quant.sites import Derived, Fixed, Observed, Shared, Site, Skip, groups
from intaglio.quant.statistics import Statistics

__all__ = [
    "METHODS",
    "Annotations",
    "Binder",
    "Derived",
    "Finding",
    "Fixed",
    "Group",
    "Image",
    "Observed",
    "Observer",
    "Prepared",
    "Quantizer",
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
]
