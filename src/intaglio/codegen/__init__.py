"""Code generation: print a plan as C++ source and packed constants. It uses no torch and makes no decisions."""

from intaglio.codegen.packed_constants import constants_memory
from intaglio.codegen.program import EMITTERS, PrintedProgram, emit

__all__ = ["EMITTERS", "PrintedProgram", "constants_memory", "emit"]
