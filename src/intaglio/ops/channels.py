"""Operators with constants of their own for every channel: affine, scaled_add and prelu."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from intaglio import numerics
from intaglio.ir import Op, Shape, TensorType
from intaglio.ops.opdef import Attrs, Call, OpDef, Roles, first_reason, fixed_channels, float_activations, rank
from intaglio.ops.pointwise import along

ANY_CHANNELS = rank(2, 3, 4, 5)


def channel_axis(constant: Shape, shape: Shape) -> int | None:
    """The axis along which a constant of this shape differs, broadcast over a tensor of that shape: its second or its
    last one. ``None`` for any other constant."""
    padded = (*[1] * (len(shape) - len(constant)), *constant)
    axes = [axis for axis, size in enumerate(padded) if size != 1]
    if len(padded) != len(shape) or len(axes) > 1:
        return None
    axis = axes[0] if axes else 1
    return axis if axis in (1, len(shape) - 1) and padded[axis] == shape[axis] else None


def bind_affine(call: Call) -> Attrs:
    return {"axis": channel_axis(call.shape(1), call.shape())}


def constant_channels(call: Call) -> str | None:
    """Factor and offset are constants, one per channel."""
    if not all(call.constant[1:]):
        return "a factor or an offset that is not a constant"
    if call.arguments.get("value", 1) != 1:
        return f"value {call.arguments['value']}"
    axes = {channel_axis(call.shape(operand), call.shape()) for operand in (1, 2)}
    return "factors that are not one per channel" if len(axes) > 1 or None in axes else None


def bind_scaled_add(call: Call) -> Attrs:
    return {"axis": channel_axis(call.shape(2), call.shape())}


def constant_ratio(call: Call) -> str | None:
    """Operands of one shape, and a constant per channel for the second."""
    if not call.constant[2]:
        return "a factor that is not a constant"
    if call.arguments.get("value", 1) != 1:
        return f"value {call.arguments['value']}"
    if call.shapes[1] != call.shapes[0]:
        return "operands of different shapes"
    return "factors that are not one per channel" if channel_axis(call.shape(2), call.shape()) is None else None


def affine_meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """`numerics.affine_requantize`, a factor and an offset per channel."""
    x, *values = args
    factor, offset = (along(value, x.ndim, op.attrs["axis"]) for value in values)
    centred, q = x.astype(np.int32) - types[0].levels.zero, out.levels
    levels = numerics.affine_requantize(centred, factor, offset, q.zero, op.attrs["low"], op.attrs["high"])
    return levels.astype(np.uint8)


def constant_slopes(call: Call) -> str | None:
    """One for all, or one per channel; torch checks the number."""
    return None if call.constant[1] else "slopes that are computed while the model runs"


def prelu_meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """`numerics.requantize` with the factor of the value's sign; ``rise`` is one number, ``fall`` one per channel."""
    x, rise, fall = args
    centred, q = x.astype(np.int32) - types[0].levels.zero, out.levels
    factor = np.where(centred >= 0, rise.reshape(()), along(fall, x.ndim, 1))
    return numerics.requantize(centred, factor, q.zero, q.qmin, q.qmax).astype(np.uint8)


SCALED_ADD = OpDef(
    name="scaled_add",
    targets=("aten.addcmul.default",),
    operands=("self", "tensor1", "tensor2"),
    roles=Roles(x=(0, 1)),
    commutative=True,
    bind=bind_scaled_add,
    check=first_reason(float_activations, ANY_CHANNELS, constant_ratio),
    kernel="pointwise",
)
"""A sum whose second operand has a factor per channel; in the integer graph it is an `add`."""
AFFINE = OpDef(
    name="affine",
    targets=("aten.addcmul.default",),
    operands=("tensor1", "tensor2", "self"),
    bind=bind_affine,
    check=first_reason(float_activations, ANY_CHANNELS, constant_channels),
    meaning=affine_meaning,
    kernel="pointwise",
    instead={"self": SCALED_ADD},
)
PRELU = OpDef(
    name="prelu",
    targets=("aten.prelu.default",),
    operands=("self", "weight"),
    check=first_reason(float_activations, ANY_CHANNELS, fixed_channels, constant_slopes),
    meaning=prelu_meaning,
    kernel="pointwise",
)
OPS = (AFFINE, SCALED_ADD, PRELU)
