"""What patterns and operators of one's own are made of.

`op` is an operator, `seq` a chain of them, `wildcard` any value, `const` one that never changes; `builtin` gives
intaglio's own patterns. `OpDef` is the record of an operator, `Roles` says which of its operands are activations,
`Call` is what its functions see of a call; `quantize` and `dequantize` are the arithmetic its meaning needs.
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
