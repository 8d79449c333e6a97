"""Operators without an integer form, which loops compute in float32 between float tensors."""

from __future__ import annotations

from intaglio.ops.loop_ops import loop_bodies as bodies
from intaglio.ops.loop_ops import smooth_activations as smooth
from intaglio.ops.loop_ops.float_loop import FloatLoop
from intaglio.ops.opdef import OpDef


def _forms(name: str, *overloads: str) -> tuple[str, ...]:
    return tuple(f"aten.{name}.{overload}" for overload in overloads)


def _function(name: str, loop: FloatLoop) -> OpDef:
    return OpDef(name, _forms(name, "default"), loop=loop)


def _steep_function(name: str, loop: FloatLoop) -> OpDef:
    return OpDef(name, _forms(name, "default"), loop=loop, steep=lambda attrs: 0)


def _of_two(name: str, targets: tuple[str, ...], loop: FloatLoop) -> OpDef:
    return OpDef(name, targets, ("self", "other"), loop=loop)


def _comparison(kind: str) -> OpDef:
    return _of_two(kind, _forms(kind, "Tensor", "Scalar"), bodies.binary(kind, bodies.require_exact_comparison))


def _logical(kind: str) -> OpDef:
    return _of_two(f"logical_{kind}", _forms(f"logical_{kind}", "default"), bodies.logical(kind))


def _bitwise(kind: str) -> OpDef:
    targets = (f"aten.bitwise_{kind}.Tensor", f"aten.__{kind}__.Tensor")
    return _of_two(f"bitwise_{kind}", targets, bodies.logical(kind, bodies.require_boolean_operands))


def _reduction(name: str, overloads: tuple[str, ...], kind: str) -> OpDef:
    return OpDef(name, _forms(name, *overloads), loop=bodies.reduction(kind))


ELEMENTWISE = (
    _steep_function("sqrt", bodies.unary("sqrt")),
    _steep_function("reciprocal", bodies.unary("reciprocal")),
    _steep_function("log", bodies.unary("log")),
    _steep_function("log1p", FloatLoop(smooth.log1p)),
    _steep_function("rsqrt", FloatLoop(bodies.rsqrt)),
    _function("floor", bodies.unary("floor")),
    _function("ceil", bodies.unary("ceil")),
    _function("sign", bodies.unary("sign")),
    OpDef("shift_left", _forms("__lshift__", "Scalar"), ("self", "other"), loop=bodies.binary("shift_left")),
    OpDef("shift_right", _forms("__rshift__", "Scalar"), ("self", "other"), loop=bodies.binary("shift_right")),
    OpDef("round_decimals", _forms("round", "decimals"), loop=bodies.unary("round", bodies.require_integer_rounding)),
    _of_two("rsub", _forms("rsub", "Tensor"), FloatLoop(bodies.reversed_sub)),
    OpDef(
        "div",
        (*_forms("div", "Tensor", "Tensor_mode", "Scalar_mode"), *_forms("floor_divide", "default", "Scalar")),
        ("self", "other"),
        loop=FloatLoop(bodies.divide, bodies.require_exact_division),
        steep=lambda attrs: 1,
    ),
    _of_two("maximum", (*_forms("maximum", "default"), *_forms("max", "other")), bodies.binary("maximum")),
    _of_two("minimum", (*_forms("minimum", "default"), *_forms("min", "other")), bodies.binary("minimum")),
)
TRUTH_VALUES = (
    *map(_comparison, ("eq", "ne", "lt", "le", "gt", "ge")),
    *map(_logical, ("and", "or", "xor")),
    _function("logical_not", bodies.logical("not")),
    *map(_bitwise, ("and", "or", "xor")),
    _function("bitwise_not", bodies.logical("not", bodies.require_boolean_operands)),
    OpDef(
        "where",
        _forms("where", "self", "ScalarOther", "ScalarSelf", "Scalar"),
        ("condition", "self", "other"),
        loop=FloatLoop(bodies.where),
    ),
    OpDef(
        "masked_fill",
        _forms("masked_fill", "Scalar", "Tensor"),
        ("self", "mask", "value"),
        loop=FloatLoop(bodies.masked_fill),
    ),
    OpDef("cast", _forms("_to_copy", "default"), loop=FloatLoop(bodies.cast, bodies.require_type_change)),
)
ALONG_AXIS = (
    _reduction("sum", ("dim_IntList", "default"), "sum"),
    _reduction("mean", ("dim", "default"), "mean"),
    _reduction("amax", ("default",), "max"),
    _reduction("amin", ("default",), "min"),
    _reduction("max", ("default",), "max"),
    _reduction("min", ("default",), "min"),
    OpDef(
        "vector_norm",
        _forms("linalg_vector_norm", "default"),
        loop=FloatLoop(bodies.vector_norm, bodies.require_known_norm),
    ),
    OpDef(
        "variance",
        (*_forms("var", "dim", "correction"), *_forms("std", "dim", "correction")),
        loop=FloatLoop(bodies.variance, bodies.require_fixed_axis),
    ),
    OpDef(
        "softmax",
        (*_forms("softmax", "int"), *_forms("_softmax", "default")),
        loop=FloatLoop(bodies.softmax, bodies.require_single_axis),
    ),
    OpDef(
        "log_softmax",
        (*_forms("log_softmax", "int"), *_forms("_log_softmax", "default")),
        loop=FloatLoop(bodies.log_softmax, bodies.require_single_axis),
    ),
    OpDef(
        "rms_norm",
        _forms("rms_norm", "default"),
        ("input", "weight"),
        loop=FloatLoop(bodies.rms_norm, bodies.require_last_axis, sizes=("normalized_shape",)),
    ),
    OpDef(
        "batch_norm",
        _forms("batch_norm", "default"),
        ("input", "weight", "bias", "running_mean", "running_var"),
        loop=FloatLoop(bodies.batch_norm, bodies.require_constant_statistics),
    ),
    OpDef(
        "embedding",
        _forms("embedding", "default"),
        ("weight", "indices"),
        loop=FloatLoop(bodies.embedding, bodies.require_constant_table),
    ),
)
FLOAT_ONLY_OPS = (*ELEMENTWISE, *TRUTH_VALUES, *ALONG_AXIS)
