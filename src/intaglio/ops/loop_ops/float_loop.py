"""Description of a model's operator as a loop of primitives between float tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from intaglio.ir import TensorType
from intaglio.ir.types import BOOL, I64
from intaglio.ops.loop_ops.loop_builder import Body, FloatCall
from intaglio.ops.loop_ops.primitives import FLOAT_TYPES

MAX_LOOP_AXES = 5
"""Maximum rank of a tensor; kernels know the strides of the last five axes."""

Values = Mapping[str, Any]
"""Arguments of a call by name, tensors as names of values of the body."""
Write = Callable[[Body, FloatCall, Values], str]
Check = Callable[[FloatCall], "str | None"]


@dataclass(frozen=True)
class FloatLoop:
    """Decomposition of an operator into primitives, which a loop computes in float32.

    Attributes:
        write: Adds the primitives to a body and returns the name of the result.
        check: Returns why a call stays in PyTorch, or ``None``.
        targets: Overloads of the record that the loop supports; empty means all of them.
        sizes: Arguments that may be dynamic sizes, because the loop takes them from its operands.
    """

    write: Write
    check: Check = lambda call: None
    targets: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()

    def refusal(self, call: FloatCall) -> str | None:
        """Return why this call stays in PyTorch, by the rules for all operators and then by the operator's check."""
        if self.targets and call.target not in self.targets:
            return f"there is no loop for the overload {call.target}"
        for name, value in call.arguments.items():
            kinds = value if isinstance(value, (list, tuple)) else (value,)
            if name not in self.sizes and not all(
                kind is None or isinstance(kind, (TensorType, int, float, bool, str)) for kind in kinds
            ):
                return f"the argument {name} is {value}, but must be a number"
        for kind in (*call.tensors().values(), call.result):
            if kind.dtype not in (*FLOAT_TYPES, BOOL, I64):
                return f"a tensor has data type {kind.dtype}; the program computes in f32"
            if len(kind.shape) > MAX_LOOP_AXES:
                return f"a tensor has {len(kind.shape)} axes; the program supports at most {MAX_LOOP_AXES}"
        return self.check(call)

    def write_call(self, call: FloatCall, body: Body, values: Values) -> str:
        """Add the primitives of a call to a body; return the name of the result, which has the element type of the
        model.
        """
        result = self.write(body, call, values)
        if body.types[result].dtype is not call.result.dtype:
            result = body("cast", result, dtype=call.result.dtype)
        return result
