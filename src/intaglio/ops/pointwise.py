"""Pointwise integer operators: add, mul, clamp, requantize, lookup table, quantize, dequantize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from intaglio import numerics
from intaglio.ir import Attrs, Axis, DType, Graph, Op, Shape, TensorType
from intaglio.ir.types import F32, I32, S8, U8
from intaglio.ir.verify import TypeRule
from intaglio.ops.loop_ops import loop_bodies as bodies
from intaglio.ops.loop_ops.float_loop import FloatLoop
from intaglio.ops.opdef import Call, Layout, OpDef, Result, Roles, Tail, first_reason, require_float_operands


def require_matching_shapes(call: Call) -> str | None:
    """Return why operands are refused: shapes must be equal, or one operand has one pixel per image and channel."""
    if call.shapes[1] is None:
        return "one operand is a number"
    a, b = call.shape(0), call.shape(1)
    pixel = len(a) == len(b) == 4 and a[:2] == b[:2] and (1, 1) in (a[2:], b[2:])
    if a != b and not pixel:
        return f"the operands have shapes {_text(a)} and {_text(b)}; the kernel broadcasts only one pixel over an image"
    return "an operand is a constant" if True in call.constant else None


def broadcast_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of two operands, either of which may have one pixel per image and channel."""
    a, b = shapes[:2]
    return b if len(a) == len(b) == 4 and a[2:] == (1, 1) else a


def _text(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def bind_add(call: Call) -> Attrs:
    """Return the factor of the second operand: ``alpha``, or ``-alpha`` for a difference."""
    alpha = float(call.arguments.get("alpha", 1))
    return {"alpha": -alpha if call.target == "aten.sub.Tensor" else alpha}


def add_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> Result:
    """Compute `numerics.add_requantize` of two quantized values, or of an accumulator and a quantized value.

    The zero point is subtracted from a uint8 first operand, not from an accumulator. Factors per channel belong to the
    axis ``axis`` if the operator has one, else to the accumulator's channel axis. A fifth operand holds the remainders
    of a second operand with 16 bits (`numerics.join_16bit`).
    """
    a, b, factor_a, factor_b, *remainders = args
    if types[0].dtype is DType.U8:
        a = a.astype(np.int32) - types[0].qparams.zero
    b = b.astype(np.int32) - types[1].qparams.zero
    if remainders:
        b = numerics.join_16bit(b, remainders[0].astype(np.int32) - types[4].qparams.zero)
    axis = op.attrs.get("axis", types[0].qparams.axis if types[0].dtype is DType.I32 else 1)
    factors = (along(factor_a, a.ndim, axis), along(factor_b, b.ndim, axis))
    zero, low, high = bounds_of(op, out)
    return stored(op, numerics.add_requantize(a, factors[0], b, factors[1], zero, low, high))


def bounds_of(op: Op, out: TensorType) -> tuple[int, int, int]:
    """Return the zero point and the bounds of a result, those of 16 bits if the operator also stores a remainder."""
    zero = numerics.widen_to_16bit(1, out.qparams.zero).zero_point if len(op.outputs) > 1 else out.qparams.zero
    return zero, op.attrs["low"], op.attrs["high"]


def stored(op: Op, rounded: np.ndarray) -> Result:
    """Return 8-bit values, and for an operator with 16-bit results also the remainders."""
    if len(op.outputs) == 1:
        return rounded.astype(np.uint8)
    quantized, remainder = numerics.split_16bit(rounded)
    return quantized.astype(np.uint8), remainder.astype(np.uint8)


def mul_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Compute `numerics.requantize` of the product of both values less their zero points, which is exact in int32."""
    a, b, factor = args
    product = (a.astype(np.int32) - types[0].qparams.zero) * (b.astype(np.int32) - types[1].qparams.zero)
    q = out.qparams
    return numerics.requantize(product, factor.reshape(()), q.zero, op.attrs["low"], op.attrs["high"]).astype(np.uint8)


def along(values: np.ndarray, rank: int, axis: Axis) -> np.ndarray:
    """Reshape values per channel so that they broadcast along ``axis`` of a tensor of this rank.

    A single value becomes a scalar.
    """
    if values.size == 1:
        return values.reshape(())
    if not isinstance(axis, int):
        raise ValueError(f"{values.size} values need one axis, but the axis is {axis}")
    shape = [1] * rank
    shape[axis] = values.size
    return values.reshape(shape)


CLAMPS: dict[str, tuple[float | None, float | None]] = {
    "aten.relu.default": (0.0, None),
    "aten.relu6.default": (0.0, 6.0),
}


def bind_clamp(call: Call) -> Attrs:
    """Return the float bounds of a clamp; ``None`` for a side without bound."""
    given = call.arguments
    if call.target in CLAMPS:
        low, high = CLAMPS[call.target]
    elif call.target == "aten.hardtanh.default":
        low, high = given.get("min_val", -1.0), given.get("max_val", 1.0)
    else:
        low, high = given.get("min"), given.get("max")
    return {"low": None if low is None else float(low), "high": None if high is None else float(high)}


def require_bounds_without_nan(call: Call) -> str | None:
    """Return why a clamp is refused: its bounds must not be NaN."""
    bounds = bind_clamp(call)
    return "a bound is NaN" if any(b is not None and b != b for b in bounds.values()) else None


def clamp_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Clamp the quantized values to the integer bounds."""
    return np.clip(args[0], np.uint8(op.attrs["low"]), np.uint8(op.attrs["high"]))


def requantize_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> Result:
    """Compute `numerics.requantize` with a factor per channel or a single one."""
    acc, factor = args
    factor = along(factor, acc.ndim, types[0].qparams.axis)
    return stored(op, numerics.requantize(acc, factor, *bounds_of(op, out)))


def table_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Look up every quantized value in the table."""
    return args[1][args[0]]


def quantize_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Compute `numerics.quantize` with parameters per tensor or per channel."""
    q = out.qparams
    scale, zero = along(np.array(q.scale), args[0].ndim, q.axis), along(np.array(q.zero_point), args[0].ndim, q.axis)
    return numerics.quantize(args[0], scale, zero, q.qmin, q.qmax).astype(np.uint8)


def pixels_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the image; raise `ValueError` unless there is one gain and shift per channel."""
    if len(shapes[0]) != 4 or shapes[1] != shapes[2] or shapes[1] != shapes[0][1:2]:
        raise ValueError(
            f"quantize_pixels expects an image [n, c, h, w] and c gains and shifts, "
            f"but got {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    return shapes[0]


def pixels_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Compute `numerics.quantize` of ``x * gain + shift`` in steps of 1; uint8 inputs are returned unchanged."""
    x, gain, shift = args
    if x.dtype == np.uint8:
        return x
    q, spread = out.qparams, (1, -1, 1, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        steps = x * gain.reshape(spread) + shift.reshape(spread)
    return numerics.quantize(steps, 1, along(np.array(q.zeros), 4, 1), q.qmin, q.qmax).astype(np.uint8)


def dequantize_reference(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> np.ndarray:
    """Dequantize quantized values, or an accumulator: ``float32(acc) * float32(s_x * s_w)``."""
    q, rank = types[0].qparams, args[0].ndim
    scale, zero = (along(np.array(values), rank, q.axis) for values in (q.scale, q.zero_point))
    return numerics.dequantize(args[0], scale, zero)


def channels_or_same(op: Op, types: Mapping[str, TensorType]) -> Layout:
    """Return the layout in which constants per channel are contiguous; without such constants, the operands share a
    layout.
    """
    if "axis" not in op.attrs:
        return Layout.SAME
    return Layout.CHANNELS_LAST if op.attrs["axis"] == 1 else Layout.ROW_MAJOR


def valid_sum(op: Op, graph: Graph) -> None:
    """Check the remainders and factors of a sum.

    Remainders may only accompany an accumulator and have the shape of their 8-bit values; with an ``axis`` there must
    be a factor for every channel.
    """
    shape, axis = graph.types[op.inputs[1]].shape, op.attrs.get("axis")
    joins = graph.types[op.inputs[0]].dtype is DType.I32
    remainders = [graph.types[name].shape for name in op.inputs[4:]]
    if any(one != shape for one in remainders) or (not joins and (remainders or op.outputs[1:])):
        raise ValueError(
            f"add of {graph.types[op.inputs[1]]} expects remainders of the same shape after an accumulator, "
            f"but got {remainders}"
        )
    if axis is None:
        return
    channels, factors = shape[axis : axis + 1], [graph.types[name].shape for name in op.inputs[2:4]]
    fits = factors[1] == channels if not joins else all(factor in (channels, (1,)) for factor in factors)
    if axis not in (1, len(shape) - 1) or not fits:
        raise ValueError(
            f"add expects a factor per channel along axis {axis} of {graph.types[op.inputs[1]]}, but got {factors}"
        )


def within_bounds(op: Op, graph: Graph) -> bool:
    """Return whether a clamp is the identity because its bounds are those of the quantized values."""
    q = graph.types[op.output].qparams
    return op.attrs["low"] <= q.qmin and op.attrs["high"] >= q.qmax


def valid_table(op: Op, graph: Graph) -> None:
    """Check that there is an entry for every quantized value."""
    kind = graph.types[op.inputs[1]]
    if kind.shape != (256,):
        raise ValueError(f"%{op.inputs[1]} is {kind}; a lookup table must have 256 entries")


ADD = OpDef(
    name="add",
    targets=("aten.add.Tensor", "aten.sub.Tensor"),
    operands=("self", "other"),
    roles=Roles(x=(0, 1)),
    commutative=True,
    bind=bind_add,
    check=first_reason(require_float_operands, require_matching_shapes),
    infer=broadcast_shape,
    reference=add_reference,
    loop=FloatLoop(bodies.add_or_sub),
    types=TypeRule(((U8, I32), (U8,), (F32,), (F32,)), (U8,), optional=(U8,), outputs=(1, 2)),
    validate=valid_sum,
    residual=1,
    layout=channels_or_same,
    batch_separable=True,
    emit="pair",
    tail=Tail.ADD,
    kernel="pointwise",
)
MUL = OpDef(
    name="mul",
    targets=("aten.mul.Tensor",),
    operands=("self", "other"),
    roles=Roles(x=(0, 1)),
    commutative=True,
    check=first_reason(require_float_operands, require_matching_shapes),
    infer=broadcast_shape,
    reference=mul_reference,
    loop=bodies.binary("mul"),
    types=TypeRule(((U8,), (U8,), (F32,)), (U8,)),
    layout=Layout.SAME,
    batch_separable=True,
    emit="pair",
    kernel="pointwise",
)
CLAMP = OpDef(
    name="clamp",
    targets=(
        "aten.relu.default",
        "aten.relu6.default",
        "aten.hardtanh.default",
        "aten.clamp.default",
        "aten.clamp_min.default",
        "aten.clamp_max.default",
    ),
    shares_qparams=True,
    bind=bind_clamp,
    check=first_reason(require_float_operands, require_bounds_without_nan),
    reference=clamp_reference,
    passes_factors=True,
    loop=FloatLoop(bodies.clamp),
    changes_nothing=within_bounds,
    types=TypeRule(((U8,),), (U8,)),
    layout=Layout.SAME,
    batch_separable=True,
    emit="clamp",
    kernel="pointwise",
)
REQUANTIZE = OpDef(
    name="requantize",
    operands=("acc", "multiplier"),
    reference=requantize_reference,
    types=TypeRule(((I32,), (F32,)), (U8,), outputs=(1, 2)),
    layout=Layout.SAME,
    batch_separable=True,
    tail=Tail.REQUANTIZE,
    kernel="matmul",
)
TABLE = OpDef(
    name="table",
    operands=("self", "levels"),
    reference=table_reference,
    types=TypeRule(((U8, S8), (U8, S8)), (U8, S8)),
    validate=valid_table,
    follows_product=True,
    layout=Layout.SAME,
    batch_separable=True,
    emit="table",
    kernel="pointwise",
)
QUANTIZE = OpDef(
    name="quantize",
    reference=quantize_reference,
    types=TypeRule(((F32,),), (U8, S8)),
    layout=Layout.SAME,
    reads_any_strides=True,
    batch_separable=True,
    emit="quantize",
    kernel="border",
)
PIXELS = OpDef(
    name="pixels",
    operands=("self", "gain", "shift"),
    infer=pixels_shape,
    reference=pixels_reference,
    types=TypeRule(((F32,), (F32,), (F32,)), (U8,)),
    layout=Layout.CHANNELS_LAST,
    batch_separable=True,
    emit="pixels",
    kernel="border",
)
DEQUANTIZE = OpDef(
    name="dequantize",
    reference=dequantize_reference,
    types=TypeRule(((U8, S8, I32),), (F32,)),
    layout=Layout.SAME,
    emit="dequantize",
    tail=Tail.DEQUANTIZE,
    kernel="border",
)
POINTWISE_OPS = (ADD, MUL, CLAMP, REQUANTIZE, TABLE, QUANTIZE, PIXELS, DEQUANTIZE)
