"""Building blocks of user-defined patterns and operators.

In a pattern, `op` matches an operator, `seq` a chain of operators, `wildcard` any value and `const` a constant;
`builtin` returns intaglio's own patterns. `OpDef` is the record of an operator, `Roles` says which of its operands are
activations, and `Call` describes a call to the functions of the record. `quantize` and `dequantize` are the reference
arithmetic for the reference implementation of an operator.
"""

from intaglio.fusion.pattern import Pattern, const, op, seq, wildcard
from intaglio.numerics import dequantize, quantize
from intaglio.ops import Call, OpDef, Roles
from intaglio.quant.recipes.user_patterns import BUILT_IN, QuantizerPattern, builtin

__all__ = [
    "BUILT_IN",
    "Call",
    "OpDef",
    "Pattern",
    "QuantizerPattern",
    "Roles",
    "builtin",
    "const",
    "dequantize",
    "op",
    "quantize",
    "seq",
    "wildcard",
]
