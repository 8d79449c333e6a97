"""Code generation: print a plan as C++ source and packed constants. It uses no torch and makes no decisions."""

from intaglio.codegen.packed_constants import constants_memory
from intaglio.codegen.program import EMITTERS, emit

__all__ = ["EMITTERS", "constants_memory", "emit"]
