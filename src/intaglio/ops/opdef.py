"""One operator, one record: all that is true of it stands here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from intaglio.ir import Op, Shape, TensorType

Attrs = Mapping[str, Any]
Result = np.ndarray | tuple[np.ndarray, ...]
"""One array, or as many as an operator has results."""


@dataclass(frozen=True)
class Roles:
    """Which operands are activations, weight and bias, by position among ``OpDef.operands``; ``outputs`` is the axis
    of the weight that holds output channels (of one group)."""

    x: tuple[int, ...] = (0,)
    weight: int | None = None
    bias: int | None = None
    outputs: int = 0


@dataclass(frozen=True)
class Call:
    """One call of an operator in a captured graph, without the graph.

    ``arguments`` holds every argument by its schema name, tensors left out; ``shapes``, ``floating`` and ``constant``
    speak of ``OpDef.operands`` in order (``None`` for one left out); ``result`` is the shape of the result.
    """

    target: str
    arguments: Attrs
    shapes: tuple[Shape | None, ...]
    floating: tuple[bool | None, ...]
    constant: tuple[bool | None, ...]
    result: Shape

    def shape(self, operand: int = 0) -> Shape:
        """Shape of an operand that must be there."""
        found = self.shapes[operand]
        if found is None:
            raise ValueError(f"{self.target}: operand {operand} is left out")
        return found

    def sizes(self, operand: int) -> tuple[int, ...]:
        """Shape of a constant operand, all of it numbers."""
        return tuple(int(size) for size in self.shape(operand) if isinstance(size, int))


@dataclass(frozen=True)
class OpDef:
    """``name`` is the kind in the integer graph.

    targets: ATen overloads it answers to. operands: their tensor arguments, by schema name. roles: see `Roles`.
    shares: the result has its input's parameters (it selects or clamps values); else it owns its range.
    anchor: quantized for its own sake; other operators only beside a quantized neighbour.
    bind: arguments -> attributes of the integer operator. check: why a call stays in float, or ``None``.
    infer: shape rule over symbolic dims. meaning: the integer result in NumPy, in logical order.
    function: for a function of one value, its meaning on float64; lowering makes a table of it. variadic: the only
    operand is a list of tensors, all of them activations.
    levels: how far the integer result may be from the Q/DQ reference. kernel: family, ``None`` for a host operator.
    macs: multiply-accumulates of one call (shapes of operands, shape of result) -> count, for operators that have any.
    instead: operand -> the record that answers to the same overloads where this operand is no constant.
    """

    name: str
    targets: tuple[str, ...] = ()
    operands: tuple[str, ...] = ("self",)
    roles: Roles = Roles()
    shares: bool = False
    anchor: bool = False
    commutative: bool = False
    bind: Callable[[Call], Attrs] = lambda call: {}
    check: Callable[[Call], str | None] = lambda call: None
    infer: Callable[[Attrs, Sequence[Shape]], Shape] = lambda attrs, shapes: shapes[0]
    meaning: Callable[[Op, Sequence[np.ndarray], Sequence[TensorType], TensorType], Result] | None = None
    function: Callable[[np.ndarray, Attrs], np.ndarray] | None = None
    variadic: bool = False
    levels: int = 1
    kernel: str | None = None
    instead: Mapping[str, OpDef] = field(default_factory=dict, hash=False)


def first_reason(*checks: Callable[[Call], str | None]) -> Callable[[Call], str | None]:
    """The first reason any check gives."""

    def check(call: Call) -> str | None:
        return next((reason for one in checks if (reason := one(call))), None)

    return check


def rank(*allowed: int) -> Callable[[Call], str | None]:
    """The first operand has one of these ranks."""

    def check(call: Call) -> str | None:
        shape = call.shapes[0]
        if shape is None or len(shape) in allowed:
            return None
        return f"input of rank {len(shape)}; the kernel takes {' or '.join(map(str, allowed))}"

    return check


def fixed_channels(call: Call) -> str | None:
    """The channels of an image or a line, its second axis, are a number."""
    channels = call.shape()[1]
    return None if isinstance(channels, int) else f"a free number of channels, {channels}"


def float_activations(call: Call) -> str | None:
    """Integer and boolean tensors are left alone."""
    return "an operand that is not floating point" if False in call.floating else None


def numbers(value: Any, axes: int) -> tuple[int, ...]:
    """One number per axis: ``3`` or ``[3]`` -> (3, 3); ``[3, 2]`` -> (3, 2)."""
    values = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    return values * axes if len(values) == 1 else values
