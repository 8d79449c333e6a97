"""What the body of a loop is made of: float32 operators of one element, and reductions along the axis of its rows.

Values of a body broadcast as NumPy's do. bfloat16 values are float32 arrays that hold only what bfloat16 has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from intaglio import numerics
from intaglio.ir import DType, Op, Shape, TensorType
from intaglio.ir.loops import GATHERS, broadcast
from intaglio.numerics import float_math
from intaglio.ops.opdef import Attrs

F32, BOOL, I64, BF16, U8 = DType.F32, DType.BOOL, DType.I64, DType.BF16, DType.U8
REAL, TRUTH, WHOLE = (F32, BF16), (BOOL,), (I64,)
Meaning = Callable[[Op, Sequence[np.ndarray], Sequence[TensorType], TensorType], np.ndarray]


@dataclass(frozen=True)
class Primitive:
    """``operands``: element types each may have, one row for every combination allowed. ``gives``: the result's;
    ``None`` where its type says. ``reduces``: along attribute ``axis``, whose size becomes 1.
    """

    name: str
    operands: tuple[tuple[tuple[DType, ...], ...], ...]
    gives: DType | None
    meaning: Meaning
    attrs: tuple[str, ...] = ()
    reduces: bool = False


def _plain(function: Callable[..., np.ndarray]) -> Meaning:
    def meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(function(*args))

    return meaning


def _real(name: str, function: Callable[..., np.ndarray], operands: int = 1) -> Primitive:
    return Primitive(name, ((REAL,) * operands,), F32, _plain(function))


def _compared(name: str, function: Callable[..., np.ndarray]) -> Primitive:
    return Primitive(name, ((REAL, REAL), (WHOLE, WHOLE)), BOOL, _plain(function))


def _truth(name: str, function: Callable[..., np.ndarray], operands: int = 2) -> Primitive:
    return Primitive(name, ((TRUTH,) * operands,), BOOL, _plain(function))


def _reduction(name: str, function: Callable[[numerics.F32], numerics.F32]) -> Primitive:
    def meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
        axis = op.attrs["axis"]
        return np.moveaxis(function(np.moveaxis(args[0], axis, -1)), -1, axis)

    return Primitive(name, ((REAL,),), F32, meaning, ("axis",), reduces=True)


def _leaky_relu(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    return float_math.of_numbers(lambda x: numerics.leaky_relu(x, op.attrs["slope"]))(args[0])


def _clamp(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """NaN stays; where the bounds cross, the upper one."""
    low, high = np.float32(op.attrs["low"]), np.float32(op.attrs["high"])
    raised = np.where(args[0] < low, low, args[0])
    return np.where(raised > high, high, raised)


def _cast(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    if out.dtype is BOOL:
        return args[0] != 0
    real = args[0].astype(np.float32)
    return float_math.to_bfloat16(real) if out.dtype is BF16 else real


def _quantize(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    q = out.levels
    return numerics.quantize(args[0], q.step, q.zero, q.qmin, q.qmax).astype(np.uint8)


def _dequantize(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    q = types[0].levels
    return numerics.dequantize(args[0], q.step, q.zero)


def _squeeze(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    return np.squeeze(args[0], op.attrs["axis"])


def _unsqueeze(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    return np.expand_dims(args[0], op.attrs["axis"])


ANY = ((REAL,), (TRUTH,), (WHOLE,))
PRIMITIVES: Mapping[str, Primitive] = {
    row.name: row
    for row in (
        _real("add", np.add, 2),
        _real("sub", np.subtract, 2),
        _real("mul", np.multiply, 2),
        _real("div", np.divide, 2),
        _real("maximum", float_math.maximum, 2),
        _real("minimum", float_math.minimum, 2),
        _real("neg", np.negative),
        _real("abs", np.abs),
        _real("sqrt", np.sqrt),
        _real("reciprocal", lambda x: np.float32(1) / x),
        _real("round", np.rint),
        _real("exp", float_math.exp),
        _real("log", float_math.log),
        _real("relu", lambda x: np.where(x < 0, np.float32(0), x)),
        _real("hardswish", float_math.of_numbers(numerics.hardswish)),
        _real("hardsigmoid", float_math.of_numbers(numerics.hardsigmoid)),
        _real("sigmoid", float_math.of_numbers(numerics.sigmoid)),
        _real("tanh", float_math.of_numbers(numerics.hyperbolic_tangent)),
        _real("silu", float_math.of_numbers(numerics.silu)),
        _real("gelu", float_math.of_numbers(numerics.gelu)),
        _real("near_gelu", float_math.of_numbers(numerics.near_gelu)),
        _real("gelu_tanh", float_math.of_numbers(numerics.gelu_tanh)),
        Primitive("leaky_relu", ((REAL,),), F32, _leaky_relu, ("slope",)),
        Primitive("clamp", ((REAL,),), F32, _clamp, ("low", "high")),
        _compared("eq", np.equal),
        _compared("ne", np.not_equal),
        _compared("lt", np.less),
        _compared("le", np.less_equal),
        _compared("gt", np.greater),
        _compared("ge", np.greater_equal),
        _truth("and", np.logical_and),
        _truth("or", np.logical_or),
        _truth("xor", np.logical_xor),
        _truth("not", np.logical_not, 1),
        Primitive("where", ((TRUTH, REAL, REAL),), F32, _plain(np.where)),
        Primitive("cast", ANY, None, _cast),
        Primitive("quantize", (((F32,),),), U8, _quantize),
        Primitive("dequantize", (((U8,),),), F32, _dequantize),
        _reduction("sum", float_math.total),
        _reduction("mean", float_math.mean),
        _reduction("max", float_math.greatest),
        _reduction("min", float_math.least),
        Primitive("squeeze", ANY, None, _squeeze, ("axis",)),
        Primitive("unsqueeze", ANY, None, _unsqueeze, ("axis",)),
        Primitive("gather", (((F32,), WHOLE),), F32, _plain(float_math.rows_of)),
        Primitive("gather_levels", (((U8,), WHOLE, (F32,), (F32,)),), F32, _plain(float_math.rows_of_levels)),
    )
}


def infer(kind: str, attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """The shape a primitive gives. ValueError where it takes no such operands."""
    axis = attrs.get("axis", 0)
    rank = len(shapes[0]) + (kind == "unsqueeze")
    if not isinstance(axis, int) or not 0 <= axis < max(rank, 1):
        raise ValueError(f"{kind} along axis {axis} of {len(shapes[0])}")
    first = list(shapes[0])
    if kind in GATHERS:
        table, ids, *by_row = shapes
        if len(table) != 2 or not ids or ids[-1] != 1 or any(shape != table[:1] for shape in by_row):
            raise ValueError(f"a table of {list(table)}, ids of {list(ids)}, parameters of {by_row}")
        return (*ids[:-1], table[1])
    if kind == "unsqueeze":
        return (*first[:axis], 1, *first[axis:])
    if kind == "squeeze":
        if first[axis] != 1:
            raise ValueError(f"size {first[axis]} is no 1")
        return (*first[:axis], *first[axis + 1 :])
    if PRIMITIVES[kind].reduces:
        return (*first[:axis], 1, *first[axis + 1 :])
    return broadcast(*shapes)
