"""Code generation: print a plan as C++ source and packed constants. It uses no torch and makes no decisions."""

from intaglio.codegen.program import EMITTERS, emit

__all__ = ["EMITTERS", "emit"]
