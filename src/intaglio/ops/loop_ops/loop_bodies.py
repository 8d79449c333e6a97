"""Decompositions of operators into loop bodies, and the conditions under which a call has to stay in PyTorch.

Functions here add primitives to a `Body` and return the name of the result. Their ``v`` holds the arguments by name,
with tensors as values of the body. Records refer to these functions in their `FloatLoop`.
"""

from __future__ import annotations

import numpy as np

from intaglio.ir.types import BOOL, F32, I64, U8
from intaglio.ops.loop_ops.float_loop import Check, FloatLoop, Values
from intaglio.ops.loop_ops.loop_builder import Body, FloatCall
from intaglio.ops.loop_ops.primitives import FLOAT_TYPES

# ---- elementwise ----------------------------------------------------------------------------------------------------


def unary(kind: str, check: Check = lambda call: None) -> FloatLoop:
    """Return the loop of one primitive on ``self``."""
    return FloatLoop(lambda body, call, v: body(kind, v["self"]), check)


def binary(kind: str, check: Check = lambda call: None) -> FloatLoop:
    """Return the loop of one primitive on ``self`` and ``other``."""
    return FloatLoop(lambda body, call, v: body(kind, v["self"], v["other"]), check)


def add_or_sub(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``self + alpha * other``, or ``self - alpha * other`` for aten.sub."""
    kind, alpha = "sub" if call.target.startswith("aten.sub.") else "add", v.get("alpha", 1)
    return body(kind, v["self"], v["other"] if alpha == 1 else body("mul", v["other"], alpha))


def addcmul(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``self + value * tensor1 * tensor2``; the sum is omitted if ``self`` is a constant of zeros."""
    product = body("mul", v["tensor1"], v["tensor2"])
    if (value := v.get("value", 1)) != 1:
        product = body("mul", product, float(value))
    zeros = call.constants.get("self")
    return product if zeros is not None and not zeros.any() else body("add", v["self"], product)


def reversed_sub(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``other - alpha * self``."""
    alpha = v.get("alpha", 1)
    return body("sub", v["other"], v["self"] if alpha == 1 else body("mul", v["self"], alpha))


def divide(body: Body, call: FloatCall, v: Values) -> str:
    """Write a quotient; one of integers is rounded down, or toward zero."""
    rounding, x, other = _rounding(call), v["self"], v["other"]
    if rounding == "trunc":
        steps = abs(other)  # -7 / 3 is rounded up: (-7 + 2) / 3 is rounded down to the same
        found = body("floor_divide", body("where", body("lt", x, 0), body("add", x, steps - 1), x), steps)
        return found if other > 0 else body("mul", found, -1)
    return body("floor_divide" if rounding else "div", x, other)


def _rounding(call: FloatCall) -> str | None:
    """Return the rounding mode of a division."""
    mode: str | None = call.arguments.get("rounding_mode")
    return "floor" if call.target.startswith("aten.floor_divide.") else mode


def require_exact_division(call: FloatCall) -> str | None:
    """Return why a division is refused: its result must not be rounded, but for integers divided by a number."""
    if _rounding(call) is None:
        return None
    other = call.arguments["other"]
    whole = call.result.dtype is I64 and type(other) is int and 0 < abs(other) < 2**63
    return None if whole else "only integers divided by a number other than 0 are rounded"


def clamp(body: Body, call: FloatCall, v: Values) -> str:
    """Write relu, relu6, clamp or hardtanh; an omitted bound is infinite."""
    if call.target == "aten.relu.default":
        return body("relu", v["self"])
    if call.target == "aten.relu6.default":
        return body("clamp", v["self"], low=0.0, high=6.0)
    low, high = v.get("min", v.get("min_val")), v.get("max", v.get("max_val"))
    if call.result.dtype is I64:
        found = v["self"] if low is None else body("maximum", v["self"], low)
        return found if high is None else body("minimum", found, high)
    least, most = -np.inf if low is None else float(low), np.inf if high is None else float(high)
    return body("clamp", v["self"], low=least, high=most)


def gelu(body: Body, call: FloatCall, v: Values) -> str:
    """Write GELU, exact or with tanh."""
    return body("gelu_tanh" if v.get("approximate") == "tanh" else "gelu", v["self"])


def leaky_relu(body: Body, call: FloatCall, v: Values) -> str:
    """Write leaky ReLU."""
    return body("leaky_relu", v["self"], slope=float(v.get("negative_slope", 0.01)))


def rsqrt(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``1 / sqrt(self)``."""
    return body("reciprocal", body("sqrt", v["self"]))


def square(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``self * self``."""
    return body("mul", v["self"], v["self"])


def require_integer_rounding(call: FloatCall) -> str | None:
    """Return why rounding is refused: it must be to integers."""
    return "rounding to decimals is not supported" if call.arguments.get("decimals") else None


# ---- booleans -------------------------------------------------------------------------------------------------------


def require_exact_comparison(call: FloatCall) -> str | None:
    """Return why a comparison is refused: integers compared with a number are cast to float and must be exact there."""
    kinds = list(call.tensors().values())
    if any(kind.dtype is BOOL for kind in kinds):
        return "comparing booleans is not supported"
    other = call.arguments["other"]
    is_fraction = len(kinds) == 1 and not isinstance(other, int)
    if is_fraction and kinds[0].dtype is I64 and abs(float(other)) >= 2**24:
        return f"integers are compared with {other}, but float32 is exact only below 2^24"
    return None


def logical(kind: str, check: Check = lambda call: None) -> FloatLoop:
    """Return the loop of one primitive on the truth values of ``self`` and, if present, ``other``."""

    def write(body: Body, call: FloatCall, v: Values) -> str:
        return body(kind, *[body.as_bool(v[name]) for name in ("self", "other") if name in v])

    return FloatLoop(write, check)


def require_boolean_operands(call: FloatCall) -> str | None:
    """Return why a bitwise operator is refused: its operands must be boolean."""
    return (
        None
        if all(kind.dtype is BOOL for kind in call.tensors().values())
        else "bitwise operators of integers are not supported"
    )


def where(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``where(condition, self, other)``."""
    return body("where", v["condition"], *[_value(body, call, v[name]) for name in ("self", "other")])


def masked_fill(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``self`` with ``value`` where the mask is true."""
    return body("where", v["mask"], _value(body, call, v["value"]), _value(body, call, v["self"]))


def _value(body: Body, call: FloatCall, value: str | float) -> str | float:
    """Return a selected operand: an integer if the result is i64, else a float."""
    if call.result.dtype is I64:
        return value if not isinstance(value, str) or body.types[value].dtype is I64 else body("cast", value, dtype=I64)
    return body.as_float(value) if isinstance(value, str) else float(value)


def cast(body: Body, call: FloatCall, v: Values) -> str:
    """Write a cast to the element type of the result."""
    return body("cast", v["self"], dtype=call.result.dtype)


def require_type_change(call: FloatCall) -> str | None:
    """Return why a cast is refused: it must change the element type."""
    return "the cast does not change the data type" if call.kind("self").dtype is call.result.dtype else None


# ---- along an axis --------------------------------------------------------------------------------------------------


def require_axes(call: FloatCall) -> str | None:
    """Return why a reduction is refused: it takes axes of a float tensor of rank 1 or more, all different."""
    kind = call.kind("self")
    axes = _axes(call) if kind.shape else []
    if not axes or len({*axes}) < len(axes):
        return f"the reduction is over {len(axes)} axes of a tensor with {len(kind.shape)}"
    return _element_types(call)


def _element_types(call: FloatCall) -> str | None:
    """Return why a reduction is refused: it takes floats, and its dtype argument is that of its operand."""
    kind, given = call.kind("self"), call.arguments.get("dtype")
    if given is not None and not (given == "torch.float32" and kind.dtype is F32):
        return "a dtype argument of a reduction that changes the element type is not supported"
    return None if kind.dtype in FLOAT_TYPES else f"reductions of {kind.dtype} are not supported"


def _axes(call: FloatCall) -> list[int]:
    """Return the axes of a reduction as non-negative numbers, the last one first; without a list, those of all axes."""
    given, rank = call.arguments.get("dim"), len(call.kind("self").shape)
    if given is None or given == []:
        return list(reversed(range(rank)))
    axes = given if isinstance(given, (list, tuple)) else [given]
    return sorted((int(axis) % rank for axis in axes), reverse=True)


def require_single_axis(call: FloatCall) -> str | None:
    """Return why a reduction is refused: it takes one axis of a float tensor of rank 1 or more."""
    dim, kind = call.arguments.get("dim"), call.kind("self")
    axes = len(dim) if isinstance(dim, (list, tuple)) else int(dim is not None)
    if axes != 1 or not kind.shape:
        return f"the reduction is over {axes or 'all'} axes; the program supports one"
    return _element_types(call)


def reduction(kind: str) -> FloatLoop:
    """Return the loop of a reduction along the axes ``dim``, one after the other from the last one."""
    return FloatLoop(lambda body, call, v: _reduced(body, call, v, kind, v["self"]), require_axes)


def _reduced(body: Body, call: FloatCall, v: Values, kind: str, found: str, then: str = "") -> str:
    """Write the reduction of a value along the axes of a call, and a function of the result if there is one.

    Each axis is dropped behind its reduction, which ends a loop; nothing else can follow in it.
    """
    axes = _axes(call)
    for axis in axes:
        found = body(kind, found, axis=axis)
        if then and axis == axes[-1]:
            found = body(then, found)
        found = found if v.get("keepdim") else body("squeeze", found, axis=axis)
    return found


def vector_norm(body: Body, call: FloatCall, v: Values) -> str:
    """Write the root of a sum of squares, a sum of magnitudes, or the largest magnitude."""
    order = float(v.get("ord", 2))
    if order == 2:
        return _reduced(body, call, v, "sum", body("mul", v["self"], v["self"]), then="sqrt")
    return _reduced(body, call, v, "sum" if order == 1 else "max", body("abs", v["self"]))


def require_known_norm(call: FloatCall) -> str | None:
    """Return why a norm is refused: its order must be 1, 2 or infinite."""
    order = float(call.arguments.get("ord", 2))
    return require_axes(call) if order in (1, 2, np.inf) else f"the order is {order}; supported are 1, 2 and infinity"


def average_image(body: Body, call: FloatCall, v: Values) -> str:
    """Write the mean over all axes behind the channels, one axis after the other from the last."""
    found = v["self"]
    for axis in reversed(range(2, len(call.kind("self").shape))):
        found = body("mean", found, axis=axis)
    return found


def require_whole_image(call: FloatCall) -> str | None:
    """Return why pooling is refused: its result must be one element for each channel."""
    given, kind = call.arguments["output_size"], call.kind("self")
    sizes = list(given) if isinstance(given, (list, tuple)) else [given]
    if any(size != 1 for size in sizes):
        return f"the result of pooling has {sizes} elements for each channel"
    return None if len(kind.shape) == len(sizes) + 2 else "the image has no batch axis"


def variance(body: Body, call: FloatCall, v: Values) -> str:
    """Write the variance with correction 0 or 1 as a mean of squares of the centred values."""
    axis, size = call.axis(), call.kind("self").shape[call.axis()]
    centred = body("sub", v["self"], body("mean", v["self"], axis=axis))
    squares = body("sum", body("mul", centred, centred), axis=axis)
    assert isinstance(size, int)  # `require_fixed_axis` refuses any other
    found = body("div", squares, float(size - _correction(call)))
    found = body("sqrt", found) if call.target.startswith("aten.std") else found
    return found if v.get("keepdim") else body("squeeze", found, axis=axis)


def _correction(call: FloatCall) -> int:
    """Return the correction of a variance, 1 by default (Bessel)."""
    given = call.arguments
    found = given.get("correction", given.get("unbiased", 1))
    return 1 if found is None else int(found)


def require_fixed_axis(call: FloatCall) -> str | None:
    """Return why a variance is refused: its axis must have a fixed size that exceeds the correction."""
    size = call.kind("self").shape[call.axis()] if require_single_axis(call) is None else 0
    if require_single_axis(call) is not None or not isinstance(size, int):
        return require_single_axis(call) or f"variance along a free dimension {size}"
    return None if size > _correction(call) else f"the variance is over {size} values, which are too few"


def softmax(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``exp(x - max(x)) * (1 / its sum)``, with one division per row because divisions are as slow as exp."""
    powers, axis = _exp_minus_max(body, call, v), call.axis()
    return body("mul", powers, body("reciprocal", body("sum", powers, axis=axis)))


def log_softmax(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``x - max(x) - log(sum(exp(x - max(x))))``."""
    axis = call.axis()
    distance = body("sub", v["self"], body("max", v["self"], axis=axis))
    return body("sub", distance, body("log", body("sum", body("exp", distance), axis=axis)))


def _exp_minus_max(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``exp(x - max(x))``."""
    return body("exp", body("sub", v["self"], body("max", v["self"], axis=call.axis())))


def layer_norm(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``(x - mean) * (1 / sqrt(mean((x - mean)^2) + eps)) * weight + bias``, from left to right."""
    axis = len(call.kind("input").shape) - 1
    centred = body("sub", v["input"], body("mean", v["input"], axis=axis))
    return _normal(body, v, centred, axis, float(v.get("eps", 1e-5)))


def rms_norm(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``x * (1 / sqrt(mean(x^2) + eps)) * weight``."""
    axis, eps = len(call.kind("input").shape) - 1, v.get("eps")
    return _normal(body, v, v["input"], axis, float(np.finfo(np.float32).eps if eps is None else eps))


def _normal(body: Body, v: Values, centred: str, axis: int, eps: float) -> str:
    """Write the division by the root mean square, then weight and bias if they exist."""
    spread = body("add", body("mean", body("mul", centred, centred), axis=axis), eps)
    result = body("mul", centred, body("reciprocal", body("sqrt", spread)))
    result = body("mul", result, v["weight"]) if v.get("weight") is not None else result
    return body("add", result, v["bias"]) if v.get("bias") is not None else result


def require_last_axis(call: FloatCall) -> str | None:
    """Return why a norm is refused: it must be over the last axis only."""
    axes = call.arguments["normalized_shape"]
    return None if len(axes) == 1 else f"the norm is over {len(axes)} axes; the program supports the last one"


def batch_norm(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``x * factor + offset`` per channel; both constants are computed in float64."""
    found = {name: np.asarray(array, np.float64) for name, array in call.constants.items()}
    factor = found.get("weight", np.float64(1)) / np.sqrt(found["running_var"] + float(v["eps"]))
    offset = found.get("bias", np.float64(0)) - found["running_mean"] * factor
    shape = (-1, *[1] * (len(call.kind("input").shape) - 2))
    names = [body.array(n, a.astype(np.float32).reshape(shape)) for n, a in (("factor", factor), ("offset", offset))]
    return body("add", body("mul", v["input"], names[0]), names[1])


def require_constant_statistics(call: FloatCall) -> str | None:
    """Return why batch norm is refused: its statistics and parameters must be constant."""
    if call.arguments.get("training"):
        return "batch norm is in training mode"
    computed = {*call.tensors()} - {*call.constants, "input"}
    return f"{', '.join(computed)} are computed while the model runs" if computed else None


def embedding(body: Body, call: FloatCall, v: Values) -> str:
    """Write a lookup of rows, in a float or a quantized table."""
    ids = body("unsqueeze", v["indices"], axis=len(call.kind("indices").shape))
    if body.types[v["weight"]].dtype is U8:
        return body("gather_levels", v["weight"], ids, v["scales"], v["zero_points"])
    return body("gather", v["weight"], ids)


def require_constant_table(call: FloatCall) -> str | None:
    """Return why an embedding is refused: its table must be constant f32, its indices i64."""
    kind = call.kind("weight")
    if "weight" not in call.constants or kind.dtype is not F32:
        return "the table is not a constant of f32"
    return None if call.kind("indices").dtype is I64 else "the indices are not i64"
