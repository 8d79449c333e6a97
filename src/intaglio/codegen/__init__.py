"""Partitions -> C++ text and packed constants. No torch, and no decision that a `Schedule` does not hold."""

from intaglio.codegen.program import EMITTERS, ISAS, emit
from intaglio.codegen.schedule import (
    GENERATOR,
    CacheSizes,
    Geometry,
    Problem,
    analytic,
    geometries,
    misfit,
    problem,
    refinements,
    schedules,
    shapes,
)
from intaglio.codegen.tile import Isa, TileSpec

__all__ = [
    "EMITTERS",
    "GENERATOR",
    "ISAS",
    "CacheSizes",
    "Geometry",
    "Isa",
    "Problem",
    "TileSpec",
    "analytic",
    "emit",
    "geometries",
    "misfit",
    "problem",
    "refinements",
    "schedules",
    "shapes",
]
