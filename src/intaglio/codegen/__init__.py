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
from intaglio.codegen.turns import Turns, analytic_turns, separable

__all__ = [
    "EMITTERS",
    "GENERATOR",
    "ISAS",
    "CacheSizes",
    "Geometry",
    "Isa",
    "Problem",
    "TileSpec",
    "Turns",
    "analytic",
    "analytic_turns",
    "emit",
    "geometries",
    "misfit",
    "problem",
    "refinements",
    "schedules",
    "separable",
    "shapes",
]
