"""Plan -> C++ text and packed constants. No torch, and no decision that the plan does not hold."""

from intaglio.codegen.program import EMITTERS, emit

__all__ = ["EMITTERS", "emit"]
