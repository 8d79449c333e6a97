"""Primitives of loop bodies: elementwise float32 operators, and reductions along the axis of rows.

Values of a body broadcast as in NumPy. bfloat16 values are float32 arrays with values that bfloat16 can represent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from intaglio import numerics
from intaglio.ir import Attrs, DType, Op, Shape, TensorType
from intaglio.ir.types import BF16, BOOL, F32, I64, U8
from intaglio.numerics import float_math

FLOAT_TYPES, BOOL_TYPES, INTEGER_TYPES = (F32, BF16), (BOOL,), (I64,)
Bound = Callable[[Sequence[float], Attrs], "float | None"]
ReferenceFunction = Callable[[Op, Sequence[np.ndarray], Sequence[TensorType], TensorType], np.ndarray]


def no_bound(sizes: Sequence[float], attrs: Attrs) -> float | None:
    """Return ``None``: the result's magnitude is not bounded."""
    return None


def largest(sizes: Sequence[float], attrs: Attrs) -> float | None:
    """Return the largest magnitude of the operands, which the function does not exceed."""
    return max(sizes)


def one(sizes: Sequence[float], attrs: Attrs) -> float | None:
    """Return 1, which the function never exceeds."""
    return 1.0


@dataclass(frozen=True)
class Lanes:
    """C of a reduction: initial value of lanes, function that joins them, and expression of the final result.

    In the expression, ``{0}`` is the array of partial results, and ``{1}`` is "lanes" if these are the lanes of
    vectors, or "vectors" if each lane of a vector belongs to another row.
    """

    start: str
    join: str
    final: str


@dataclass(frozen=True)
class Primitive:
    """One operator of the body of a loop.

    Primitives are the instructions of loops: models do not call them, passes neither annotate nor fuse them, and they
    have no kernel, layout or quantization parameters. Unlike `OpDef`, they hold the C of one vector of elements.
    `OpDef.loop` decomposes the operator of a model into primitives.

    Attributes:
        name: Name of the primitive.
        operands: Element types of each operand, one row per allowed combination.
        result_dtype: Element type of the result; ``None`` where the result's type decides.
        reference: Reference implementation in NumPy.
        attrs: Names of its attributes.
        reduces: Reduction along attribute ``axis``, whose size becomes 1.
        gathers: Reads rows of a table (first operand) by ids (second operand); further operands are parameters of rows.
        drops_axis: Computes nothing; the value outside of the loop has one axis less than the one inside.
        adds_axis: Computes nothing; the value outside of the loop has one axis more than the one inside.
        approximation: Primitive whose result is close enough if it is quantized next.
        subtracts: The difference of its operands.
        cheap: Takes about one instruction.
        integers: From i64 operands, the result is i64.
        c: C over vectors of the operands and its attributes; empty where it depends on types.
        c_of_integers: The same for vectors of i64, where it differs.
        takes_number: A constant second operand is emitted as a number.
        c_of_vectors: C that handles several vectors at a time where a single one would be bound by latency.
        c_of_nonpositive: The same for values that are at most 0.
        lanes: C of a reduction.
        bound: Called with (magnitudes of the operands, attributes); returns a bound of the result's magnitude or
            ``None``.
    """

    name: str
    operands: tuple[tuple[tuple[DType, ...], ...], ...]
    result_dtype: DType | None
    reference: ReferenceFunction
    attrs: tuple[str, ...] = ()
    reduces: bool = False
    gathers: bool = False
    drops_axis: bool = False
    adds_axis: bool = False
    approximation: str = ""
    subtracts: bool = False
    cheap: bool = False
    integers: bool = False
    c: str = ""
    c_of_integers: str = ""
    takes_number: bool = False
    c_of_vectors: str = ""
    c_of_nonpositive: str = ""
    lanes: Lanes | None = None
    bound: Bound = no_bound

    def result_of(self, operand: DType) -> DType | None:
        """Return the element type of the result for that of the last operand; ``None`` where any is possible."""
        return I64 if self.integers and operand is I64 else self.result_dtype

    @property
    def quantizes(self) -> bool:
        """Return whether it quantizes floats."""
        return self.result_dtype is U8

    @property
    def dequantizes(self) -> bool:
        """Return whether it dequantizes elementwise."""
        return self.operands[0][0] == (U8,) and not self.gathers

    @property
    def elementwise(self) -> bool:
        """Return whether each element of the result depends on one element of every operand."""
        return not (self.reduces or self.gathers or self.drops_axis or self.adds_axis)


def _plain(function: Callable[..., np.ndarray]) -> ReferenceFunction:
    """Return the reference implementation of a primitive without attributes."""

    def reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(function(*args))

    return reference


def _rows(count: int, facts: Mapping[str, Any]) -> tuple[tuple[tuple[DType, ...], ...], ...]:
    return tuple((kinds,) * count for kinds in (FLOAT_TYPES, INTEGER_TYPES)[: 1 + facts.get("integers", False)])


def _unary(name: str, c: str, function: Callable[..., np.ndarray], **facts: Any) -> Primitive:
    return Primitive(name, _rows(1, facts), F32, _plain(function), c=c, **facts)


def _binary(name: str, c: str, function: Callable[..., np.ndarray], **facts: Any) -> Primitive:
    return Primitive(name, _rows(2, facts), F32, _plain(function), c=c, **facts)


def _of_integers(name: str, c: str, function: Callable[..., np.ndarray], **facts: Any) -> Primitive:
    """Return the record of an operator that takes two i64 operands only."""
    return Primitive(name, ((INTEGER_TYPES,) * 2,), I64, _plain(function), c=c, **facts)


def _compared(name: str, c: str, function: Callable[..., np.ndarray]) -> Primitive:
    """Return the record of a comparison."""
    return Primitive(
        name, ((FLOAT_TYPES, FLOAT_TYPES), (INTEGER_TYPES, INTEGER_TYPES)), BOOL, _plain(function), c=f"{{0}} {c} {{1}}"
    )


def _truth(name: str, c: str, function: Callable[..., np.ndarray], operands: int = 2) -> Primitive:
    """Return the record of a boolean operator."""
    infix = operands == 2
    return Primitive(name, ((BOOL_TYPES,) * operands,), BOOL, _plain(function), c=c, takes_number=infix)


def _reduction(
    name: str, lanes: Lanes, function: Callable[[numerics.FloatArray], numerics.FloatArray], bound: Bound = no_bound
) -> Primitive:
    """Return the record of a reduction along attribute ``axis``."""

    def reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
        axis = op.attrs["axis"]
        return np.moveaxis(function(np.moveaxis(args[0], axis, -1)), -1, axis)

    return Primitive(name, ((FLOAT_TYPES,),), F32, reference, ("axis",), reduces=True, lanes=lanes, bound=bound)


def _leaky_relu(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    return float_math.keep_nan(lambda x: numerics.leaky_relu(x, op.attrs["slope"]))(args[0])


def _clamp(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Clamp values; NaN stays NaN, and the upper bound wins if the bounds cross."""
    low, high = np.float32(op.attrs["low"]), np.float32(op.attrs["high"])
    raised = np.where(args[0] < low, low, args[0])
    return np.where(raised > high, high, raised)


def _cast(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Cast values. Floats lose their fraction as integers; those that int64 cannot hold become the smallest int64."""
    if out.dtype is BOOL:
        return args[0] != 0
    if out.dtype is I64:
        fits = (args[0] >= -(2.0**63)) & (args[0] < 2.0**63) if args[0].dtype == np.float32 else True
        return np.where(fits, np.where(fits, args[0], 0).astype(np.int64), np.iinfo(np.int64).min)
    real = args[0].astype(np.float32)
    return float_math.to_bfloat16(real) if out.dtype is BF16 else real


def _quantize(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    q = out.qparams
    return numerics.quantize(args[0], q.step, q.zero, q.qmin, q.qmax).astype(np.uint8)


def _dequantize(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    q = types[0].qparams
    return numerics.dequantize(args[0], q.step, q.zero)


def _squeeze(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    return np.squeeze(args[0], op.attrs["axis"])


def _unsqueeze(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    return np.expand_dims(args[0], op.attrs["axis"])


def sum_of_sizes(sizes: Sequence[float], attrs: Attrs) -> float | None:
    """Return the bound of a sum or a difference."""
    return sum(sizes)


def product_of_sizes(sizes: Sequence[float], attrs: Attrs) -> float | None:
    """Return the bound of a product."""
    return prod(sizes)


def bound_of_clamp(sizes: Sequence[float], attrs: Attrs) -> float | None:
    """Return the bound of a clamp; it includes the operand's bound, because NaN is not clamped."""
    return max(abs(attrs["low"]), abs(attrs["high"]), *sizes)


def bound_of_leaky_relu(sizes: Sequence[float], attrs: Attrs) -> float | None:
    """Return the bound of a leaky ReLU whose slope is at most 1; ``None`` for other slopes."""
    return max(sizes) if abs(attrs["slope"]) <= 1 else None


ANY_TYPE = ((FLOAT_TYPES,), (BOOL_TYPES,), (INTEGER_TYPES,))
ROWS = (
    _binary("add", "{0} + {1}", np.add, integers=True, takes_number=True, cheap=True, bound=sum_of_sizes),
    _binary(
        *("sub", "{0} - {1}", np.subtract),
        integers=True,
        takes_number=True,
        cheap=True,
        subtracts=True,
        bound=sum_of_sizes,
    ),
    _binary("mul", "{0} * {1}", np.multiply, integers=True, takes_number=True, cheap=True, bound=product_of_sizes),
    _binary("div", "{0} / {1}", np.divide, takes_number=True),
    _binary(
        *("maximum", "larger({0}, {1})", float_math.maximum),
        integers=True,
        c_of_integers="larger_integer({0}, {1})",
        cheap=True,
        bound=largest,
    ),
    _binary(
        *("minimum", "smaller({0}, {1})", float_math.minimum),
        integers=True,
        c_of_integers="smaller_integer({0}, {1})",
        cheap=True,
        bound=largest,
    ),
    _unary("neg", "-{0}", np.negative, integers=True, cheap=True, bound=largest),
    _unary("abs", "absolute({0})", np.abs, integers=True, c_of_integers="magnitude({0})", cheap=True, bound=largest),
    _of_integers("shift_left", "{0} << {1}", np.left_shift, takes_number=True),
    _of_integers("shift_right", "{0} >> {1}", np.right_shift, takes_number=True),
    _of_integers("floor_divide", "divided_down({0}, {1})", np.floor_divide),
    _unary("floor", "rounded_down({0})", np.floor),
    _unary("ceil", "-rounded_down(-{0})", np.ceil),
    _unary("sign", "sign_of({0})", float_math.sign, integers=True, c_of_integers="sign_of_integer({0})", bound=one),
    _unary("sqrt", "root({0})", np.sqrt),
    _unary("reciprocal", "1.0f / {0}", lambda x: np.float32(1) / x),
    _unary("round", "nearest({0})", np.rint),
    _unary("exp", "exponential({0})", float_math.exp, c_of_nonpositive="exp_negatives"),
    _unary("log", "logarithm({0})", float_math.log),
    _unary("sin", "circular<0>({0})", float_math.sin),
    _unary("cos", "circular<1>({0})", float_math.cos),
    _unary("relu", "relu({0})", lambda x: np.where(x < 0, np.float32(0), x), cheap=True, bound=largest),
    _unary("hardswish", "keep_nan({0}, hardswish({0}))", float_math.keep_nan(numerics.hardswish), bound=largest),
    _unary("hardsigmoid", "keep_nan({0}, hardsigmoid({0}))", float_math.keep_nan(numerics.hardsigmoid), bound=one),
    _unary("sigmoid", "keep_nan({0}, sigmoid({0}))", float_math.keep_nan(numerics.sigmoid), bound=one),
    _unary("tanh", "keep_nan({0}, tanh_f32({0}))", float_math.keep_nan(numerics.tanh_f32), bound=one),
    _unary("silu", "keep_nan({0}, silu({0}))", float_math.keep_nan(numerics.silu), bound=largest),
    _unary(
        "gelu",
        "keep_nan({0}, gelu({0}))",
        float_math.keep_nan(numerics.gelu),
        approximation="near_gelu",
        bound=largest,
    ),
    _unary(
        "near_gelu",
        "gelu_approx({0})",
        float_math.keep_nan(numerics.gelu_approx),
        c_of_vectors="gelu_approx_vectors",
        bound=largest,
    ),
    _unary("gelu_tanh", "keep_nan({0}, gelu_tanh({0}))", float_math.keep_nan(numerics.gelu_tanh), bound=largest),
    Primitive(
        "leaky_relu",
        ((FLOAT_TYPES,),),
        F32,
        _leaky_relu,
        ("slope",),
        c="keep_nan({0}, leaky_relu({0}, {slope}))",
        bound=bound_of_leaky_relu,
    ),
    Primitive(
        "clamp", ((FLOAT_TYPES,),), F32, _clamp, ("low", "high"), c="clamp({0}, {low}, {high})", bound=bound_of_clamp
    ),
    _compared("eq", "==", np.equal),
    _compared("ne", "!=", np.not_equal),
    _compared("lt", "<", np.less),
    _compared("le", "<=", np.less_equal),
    _compared("gt", ">", np.greater),
    _compared("ge", ">=", np.greater_equal),
    _truth("and", "{0} & {1}", np.logical_and),
    _truth("or", "{0} | {1}", np.logical_or),
    _truth("xor", "{0} ^ {1}", np.logical_xor),
    _truth("not", "~{0}", np.logical_not, 1),
    Primitive(
        "where",
        ((BOOL_TYPES, FLOAT_TYPES, FLOAT_TYPES), (BOOL_TYPES, INTEGER_TYPES, INTEGER_TYPES)),
        F32,
        _plain(np.where),
        integers=True,
        c="{0} ? {1} : {2}",
        c_of_integers="__builtin_convertvector({0}, Longs) ? {1} : {2}",
    ),
    Primitive("cast", ANY_TYPE, None, _cast, cheap=True),
    Primitive("quantize", (((F32,),),), U8, _quantize),
    Primitive("dequantize", (((U8,),),), F32, _dequantize, cheap=True),
    _reduction("sum", Lanes("0.0f", "accumulate_sum", "reduce_{1}_sum({0})"), float_math.reduce_sum),
    _reduction(
        "mean", Lanes("0.0f", "accumulate_sum", "reduce_{1}_sum({0}) / (float)size"), float_math.reduce_mean, largest
    ),
    _reduction(
        "max", Lanes("-__builtin_inff()", "accumulate_max", "reduce_{1}_max({0})"), float_math.reduce_max, largest
    ),
    _reduction(
        "min", Lanes("__builtin_inff()", "accumulate_min", "reduce_{1}_min({0})"), float_math.reduce_min, largest
    ),
    Primitive("squeeze", ANY_TYPE, None, _squeeze, ("axis",), drops_axis=True, bound=largest),
    Primitive("unsqueeze", ANY_TYPE, None, _unsqueeze, ("axis",), adds_axis=True, bound=largest),
    Primitive("gather", (((F32,), INTEGER_TYPES),), F32, _plain(float_math.gather_rows), gathers=True),
    Primitive(
        "gather_levels",
        (((U8,), INTEGER_TYPES, (F32,), (F32,)),),
        F32,
        _plain(float_math.gather_quantized_rows),
        gathers=True,
    ),
)
PRIMITIVES: Mapping[str, Primitive] = {row.name: row for row in ROWS}


def broadcast(*shapes: Shape) -> Shape:
    """Return the broadcast shape; raise `ValueError` if the shapes are incompatible."""
    found = []
    for axis in range(-max(map(len, shapes), default=0), 0):
        sizes = {shape[axis] for shape in shapes if len(shape) >= -axis} - {1}
        if len(sizes) > 1:
            raise ValueError(f"the sizes {', '.join(map(str, sizes))} along one axis cannot be broadcast")
        found.append(sizes.pop() if sizes else 1)
    return tuple(found)


def primitive(op: Op) -> Primitive:
    """Return the record of an operator in the body of a loop."""
    return PRIMITIVES[op.kind]


def infer(kind: str, attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of a primitive's result; raise `ValueError` for invalid operands."""
    axis = attrs.get("axis", 0)
    rank = len(shapes[0]) + (kind == "unsqueeze")
    if not isinstance(axis, int) or not 0 <= axis < max(rank, 1):
        raise ValueError(f"{kind} along axis {axis} of an operand with {len(shapes[0])} axes")
    first = list(shapes[0])
    if PRIMITIVES[kind].gathers:
        table, ids, *by_row = shapes
        if len(table) != 2 or not ids or ids[-1] != 1 or any(shape != table[:1] for shape in by_row):
            raise ValueError(
                f"{kind} expects a table [rows, width], ids [..., 1] and parameters [rows], "
                f"but got {list(table)}, {list(ids)} and {by_row}"
            )
        return (*ids[:-1], table[1])
    if kind == "unsqueeze":
        return (*first[:axis], 1, *first[axis:])
    if kind == "squeeze":
        if first[axis] != 1:
            raise ValueError(f"squeeze expects size 1 along axis {axis}, but got {first[axis]}")
        return (*first[:axis], *first[axis + 1 :])
    if PRIMITIVES[kind].reduces:
        return (*first[:axis], 1, *first[axis + 1 :])
    return broadcast(*shapes)
