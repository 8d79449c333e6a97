"""Plan -> C++ text and packed constants. No torch, and no decision that the plan does not hold."""

from intaglio.codegen.program import EMITTERS, ISAS, emit
from intaglio.codegen.tile import Isa, TileSpec

__all__ = ["EMITTERS", "ISAS", "Isa", "TileSpec", "emit"]
