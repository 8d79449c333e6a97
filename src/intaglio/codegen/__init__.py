"""Partitions -> C++ text and packed constants. No torch, and no decision that a `Schedule` does not hold."""

from intaglio.codegen.program import EMITTERS, ISAS, emit
from intaglio.codegen.schedule import CacheSizes, Problem, analytic, problem, schedules
from intaglio.codegen.tile import Isa, TileSpec

__all__ = ["EMITTERS", "ISAS", "CacheSizes", "Isa", "Problem", "TileSpec", "analytic", "emit", "problem", "schedules"]
