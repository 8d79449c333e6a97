"""Building blocks of user-defined patterns and operators.

In a pattern, `op` matches an operator, `seq` a chain of operators, `wildcard` any value and `const` a constant;
`builtin` returns intaglio's own patterns. `OpDef` is the record of an operator, `Roles` says which of its operands are
activations, and `Call` describes a call to the functions of the record. `quantize` and `dequantize` are the reference
arithmetic for the reference implementation of an operator.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from intaglio import numerics
from intaglio.argument_checks import check_arguments
from intaglio.errors import InputError
from intaglio.fusion.pattern import Pattern, const, op, seq, wildcard
from intaglio.ops import Call, OpDef, Roles
from intaglio.quant.recipes.user_patterns import BUILT_IN, QuantizerPattern, builtin

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _with_shape_errors(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make a NumPy function raise an `InputError` for shapes that do not fit each other, and numbers beyond
    int32."""

    @check_arguments
    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except (ValueError, OverflowError) as error:
            remedy = "pass numbers as parameters, or arrays that broadcast against the values"
            raise InputError(function.__name__, None, str(error), remedy=remedy) from error

    return run


quantize = _with_shape_errors(numerics.quantize)
dequantize = _with_shape_errors(numerics.dequantize)

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
