"""Operators with constants per channel: affine, scaled_add and prelu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from intaglio import numerics
from intaglio.ir import Attrs, Graph, Op, Shape, TensorType
from intaglio.ir.verify import TypeRule
from intaglio.ops.loop_ops import loop_bodies as bodies
from intaglio.ops.loop_ops.float_loop import FloatLoop
from intaglio.ops.opdef import (
    Call,
    KernelConstants,
    Layout,
    ModelConstants,
    OpDef,
    Roles,
    first_reason,
    rank,
    require_fixed_channels,
    require_float_operands,
)
from intaglio.ops.pointwise import F32, U8, along, channels_or_same

ANY_CHANNELS = rank(2, 3, 4, 5)


def channel_axis(constant: Shape, shape: Shape) -> int | None:
    """Return the axis along which a constant varies when it broadcasts over a tensor: the second or the last one.

    ``None`` for any other constant.
    """
    padded = (*[1] * (len(shape) - len(constant)), *constant)
    axes = [axis for axis, size in enumerate(padded) if size != 1]
    if len(padded) != len(shape) or len(axes) > 1:
        return None
    axis = axes[0] if axes else 1
    return axis if axis in (1, len(shape) - 1) and padded[axis] == shape[axis] else None


def bind_affine(call: Call) -> Attrs:
    """Return the axis of the factor and the offset."""
    return {"axis": channel_axis(call.shape(1), call.shape())}


def require_constant_channels(call: Call) -> str | None:
    """Return why factor and offset are refused: they must be constants, one per channel."""
    if not all(call.constant[1:]):
        return "the factor or the offset is not a constant"
    if call.arguments.get("value", 1) != 1:
        return f"the argument value is {call.arguments['value']}, but must be 1"
    axes = {channel_axis(call.shape(operand), call.shape()) for operand in (1, 2)}
    return "the factors are not one per channel" if len(axes) > 1 or None in axes else None


def bind_scaled_add(call: Call) -> Attrs:
    """Return the axis of the second operand's factor."""
    return {"axis": channel_axis(call.shape(2), call.shape())}


def require_constant_ratio(call: Call) -> str | None:
    """Return why operands are refused: they must have one shape, and the second a constant factor per channel."""
    if not call.constant[2]:
        return "the factor is not a constant"
    if call.arguments.get("value", 1) != 1:
        return f"the argument value is {call.arguments['value']}, but must be 1"
    if call.shapes[1] != call.shapes[0]:
        return "the operands have different shapes"
    return "the factors are not one per channel" if channel_axis(call.shape(2), call.shape()) is None else None


def affine_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Compute `numerics.affine_requantize` with a factor and an offset per channel."""
    x, *values = args
    factor, offset = (along(value, x.ndim, op.attrs["axis"]) for value in values)
    centred, q = x.astype(np.int32) - types[0].qparams.zero, out.qparams
    quantized = numerics.affine_requantize(centred, factor, offset, q.zero, op.attrs["low"], op.attrs["high"])
    return quantized.astype(np.uint8)


def require_constant_slopes(call: Call) -> str | None:
    """Return why slopes are refused: they must be constant; torch checks their number."""
    return None if call.constant[1] else "the slopes are computed while the model runs"


def slope_factors(attrs: Attrs, shape: Shape, given: ModelConstants, scale_x: float, scale_y: float) -> KernelConstants:
    """Return the factor of positive values and those of negative values: a single one, or one per channel."""
    rise = np.asarray(numerics.multiplier(scale_x, scale_y), np.float32).reshape(-1)
    slopes = np.ravel(given[0] if given[0] is not None else 1.0)
    return {"rise": rise, "fall": numerics.multiplier(slopes * scale_x, scale_y)}, attrs


def prelu_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Compute `numerics.requantize` with a factor that depends on the sign; ``rise`` is a number, ``fall`` one per
    channel.
    """
    x, rise, fall = args
    centred, q = x.astype(np.int32) - types[0].qparams.zero, out.qparams
    factor = np.where(centred >= 0, rise.reshape(()), along(fall, x.ndim, 1))
    return numerics.requantize(centred, factor, q.zero, q.qmin, q.qmax).astype(np.uint8)


def layout_of_slopes(op: Op, types: Mapping[str, TensorType]) -> Layout:
    """Return channels last for slopes per channel, which are read along a pixel; a single slope fits any layout."""
    plain = isinstance(types[op.output].shape[-1], int) and types[op.inputs[2]].shape == (1,)
    return Layout.SAME if plain else Layout.CHANNELS_LAST


def valid_affine(op: Op, graph: Graph) -> None:
    """Check that there are as many factors and offsets as channels."""
    shape, axis = graph.types[op.inputs[0]].shape, op.attrs.get("axis", 1)
    first, second = (graph.types[name].shape for name in op.inputs[1:])
    if axis not in (1, len(shape) - 1) or second != (shape[axis],) or first != second:
        raise ValueError(
            f"{op.kind} expects one factor and one offset per channel, but got x {graph.types[op.inputs[0]]}, "
            f"factors {first} and offsets {second}"
        )


def valid_slopes(op: Op, graph: Graph) -> None:
    """Check that there is one slope, or one for each channel."""
    shape = graph.types[op.inputs[0]].shape
    first, second = (graph.types[name].shape for name in op.inputs[1:])
    if first != (1,) or second not in ((1,), (shape[1],)):
        raise ValueError(
            f"{op.kind} expects one slope or one per channel, but got x {graph.types[op.inputs[0]]}, "
            f"rises {first} and slopes {second}"
        )


SCALED_ADD = OpDef(
    name="scaled_add",
    targets=("aten.addcmul.default",),
    operands=("self", "tensor1", "tensor2"),
    roles=Roles(x=(0, 1)),
    commutative=True,
    bind=bind_scaled_add,
    check=first_reason(require_float_operands, ANY_CHANNELS, require_constant_ratio),
    residual=1,
    kernel="pointwise",
)
"""A sum whose second operand has a factor per channel; in the integer graph it is an `add`."""
AFFINE = OpDef(
    name="affine",
    targets=("aten.addcmul.default",),
    operands=("tensor1", "tensor2", "self"),
    bind=bind_affine,
    check=first_reason(require_float_operands, ANY_CHANNELS, require_constant_channels),
    reference=affine_reference,
    loop=FloatLoop(bodies.addcmul),
    types=TypeRule(((U8,), (F32,), (F32,)), (U8,)),
    validate=valid_affine,
    layout=channels_or_same,
    batch_separable=True,
    emit="affine",
    kernel="pointwise",
    if_not_constant={"self": SCALED_ADD},
)
PRELU = OpDef(
    name="prelu",
    targets=("aten.prelu.default",),
    operands=("self", "weight"),
    check=first_reason(require_float_operands, ANY_CHANNELS, require_fixed_channels, require_constant_slopes),
    reference=prelu_reference,
    constants=slope_factors,
    types=TypeRule(((U8,), (F32,), (F32,)), (U8,)),
    validate=valid_slopes,
    layout=layout_of_slopes,
    batch_separable=True,
    emit="prelu",
    kernel="pointwise",
)
CHANNEL_OPS = (AFFINE, SCALED_ADD, PRELU)
