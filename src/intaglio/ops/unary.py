"""Functions of one value: 256-entry lookup tables between quantized tensors, float32 loops between float tensors.

The entries of a lookup table are computed once in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from intaglio import numerics
from intaglio.ir import Attrs
from intaglio.ops.loop_ops import loop_bodies as bodies
from intaglio.ops.loop_ops import smooth_activations as smooth
from intaglio.ops.loop_ops.float_loop import FloatLoop
from intaglio.ops.opdef import Call, OpDef, first_reason, require_float_operands

Function = Callable[[np.ndarray, Attrs], np.ndarray]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def _hardsigmoid(x: np.ndarray) -> np.ndarray:
    return np.clip(x + 3, 0, 6) / 6


def _gelu(x: np.ndarray, attrs: Attrs) -> np.ndarray:
    if attrs.get("approximate") == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def _elu(x: np.ndarray, attrs: Attrs) -> np.ndarray:
    alpha, scale, inner = (float(attrs.get(name, 1)) for name in ("alpha", "scale", "input_scale"))
    with np.errstate(over="ignore"):  # grows below zero if the inner factor is negative
        return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0) * inner)) * scale


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _softplus_of(x: np.ndarray, attrs: Attrs) -> np.ndarray:
    """Return softplus, which is the identity above the threshold, as in torch."""
    beta, threshold = float(attrs.get("beta", 1)), float(attrs.get("threshold", 20))
    return np.where(x * beta > threshold, x, _softplus(x * beta) / beta)


def _celu(x: np.ndarray, attrs: Attrs) -> np.ndarray:
    alpha = float(attrs.get("alpha", 1))
    return _elu(x, {"alpha": alpha, "input_scale": 1 / alpha})


def _leaky_relu(x: np.ndarray, attrs: Attrs) -> np.ndarray:
    return np.where(x > 0, x, x * float(attrs.get("negative_slope", 0.01)))


def _softshrink(x: np.ndarray, attrs: Attrs) -> np.ndarray:
    reach = float(attrs.get("lambd", 0.5))
    return x - np.clip(x, -reach, reach)


def _hardshrink(x: np.ndarray, attrs: Attrs) -> np.ndarray:
    return np.where(np.abs(x) <= float(attrs.get("lambd", 0.5)), 0, x)


SELU = {"alpha": 1.6732632423543772848170429916717, "scale": 1.0507009873554804934193349852946}
"""Constants of Klambauer et al. 2017."""


def bind(call: Call) -> Attrs:
    """Return the arguments of a call without the operand."""
    return {name: value for name, value in call.arguments.items() if value is not None}


def require_finite_numbers(call: Call) -> str | None:
    """Return why arguments are refused: they must be finite numbers or words, and powers positive integers (no NaN)."""
    for name, value in bind(call).items():
        if not isinstance(value, (int, float, str)) or (isinstance(value, float) and not math.isfinite(value)):
            return f"{name} = {value} is not supported"
    if call.arguments.get("beta") == 0 or (call.target == "aten.celu.default" and call.arguments.get("alpha") == 0):
        return "it divides by zero"
    exponent: Any = call.arguments.get("exponent", 1)
    if exponent < 1 or int(exponent) != exponent:
        return f"the exponent {exponent} is not supported"
    return "it divides by zero" if call.target == "aten.div.Scalar" and call.arguments["other"] == 0 else None


def activate(function: str) -> Callable[[Attrs], Attrs]:
    """Return a function from the attributes of a record to those of its `activate`, for functions without arguments."""
    return lambda attrs: {"function": function}


def _activate_leaky_relu(attrs: Attrs) -> Attrs:
    slope = np.clip(attrs.get("negative_slope", 0.01), -numerics.LARGEST, numerics.LARGEST)
    return {"function": "leaky_relu", "slope": float(slope)}


def _activate_gelu(attrs: Attrs) -> Attrs:
    return {"function": "gelu_tanh" if attrs.get("approximate") == "tanh" else "gelu"}


def function(
    name: str,
    reference: Function,
    target: str = "",
    *,
    loop: FloatLoop | None = None,
    precise: Callable[[Attrs], Attrs] | None = None,
    multiplies_by_scalar: bool = False,
    steep: Callable[[Attrs], int | None] = lambda attrs: None,
) -> OpDef:
    """Return the record of a function of one value.

    Args:
        name: Name of the operator, and of the ATen operator unless there is a ``target``.
        reference: Computes the function in float64 from an array and the arguments of the call. Lookup tables use it.
        target: ATen overload.
        loop: The loop that computes it between float tensors; without one it runs in an island.
        precise: Converts the record's attributes to those of the `activate` that computes it on an accumulator.
        multiplies_by_scalar: It multiplies or divides by a number, which is folded into the scale of a preceding
            product of activations.
        steep: Returns the position of the operand if it is a divisor, or the operand of a root.
    """
    return OpDef(
        name=name,
        targets=(target or f"aten.{name}.default",),
        bind=bind,
        check=first_reason(require_float_operands, require_finite_numbers),
        function=reference,
        loop=loop,
        precise=precise,
        multiplies_by_scalar=multiplies_by_scalar,
        steep=steep,
        kernel="table",
    )


UNARY_OPS = (
    function("sigmoid", lambda x, a: _sigmoid(x), loop=bodies.unary("sigmoid"), precise=activate("sigmoid")),
    function(
        "hardsigmoid",
        lambda x, a: _hardsigmoid(x),
        loop=bodies.unary("hardsigmoid"),
        precise=activate("hardsigmoid"),
    ),
    function(
        "hardswish", lambda x, a: x * _hardsigmoid(x), loop=bodies.unary("hardswish"), precise=activate("hardswish")
    ),
    function("silu", lambda x, a: x * _sigmoid(x), loop=bodies.unary("silu"), precise=activate("silu")),
    function("mish", lambda x, a: x * np.tanh(_softplus(x)), loop=FloatLoop(smooth.mish)),
    function("tanh", lambda x, a: np.tanh(x), loop=bodies.unary("tanh"), precise=activate("tanh")),
    function("gelu", _gelu, loop=FloatLoop(bodies.gelu), precise=_activate_gelu),
    function("elu", _elu, loop=FloatLoop(smooth.elu)),
    function("selu", lambda x, a: _elu(x, SELU), loop=FloatLoop(smooth.selu)),
    function("leaky_relu", _leaky_relu, loop=FloatLoop(bodies.leaky_relu), precise=_activate_leaky_relu),
    function("abs", lambda x, a: np.abs(x), loop=bodies.unary("abs")),
    function("neg", lambda x, a: -x, loop=bodies.unary("neg")),
    function("square", lambda x, a: x * x, loop=FloatLoop(bodies.square)),
    function("celu", _celu, loop=FloatLoop(smooth.celu)),
    function("softplus", _softplus_of, loop=FloatLoop(smooth.softplus)),
    function("log_sigmoid", lambda x, a: -_softplus(-x), loop=FloatLoop(smooth.log_sigmoid)),
    function(
        "threshold",
        lambda x, a: np.where(x > float(a["threshold"]), x, float(a["value"])),
        loop=FloatLoop(smooth.threshold),
    ),
    function("softshrink", _softshrink, loop=FloatLoop(smooth.softshrink)),
    function("hardshrink", _hardshrink, loop=FloatLoop(smooth.hardshrink)),
    function("exp", lambda x, a: np.exp(x), loop=bodies.unary("exp")),
    function("expm1", lambda x, a: np.expm1(x), loop=FloatLoop(smooth.expm1)),
    function("sin", lambda x, a: np.sin(x), loop=bodies.unary("sin")),
    function("cos", lambda x, a: np.cos(x), loop=bodies.unary("cos")),
    function("round", lambda x, a: np.rint(x), loop=bodies.unary("round")),
    function(
        "add_number",
        lambda x, a: x + float(a["other"]) * float(a.get("alpha", 1)),
        "aten.add.Scalar",
        loop=FloatLoop(bodies.add_or_sub),
    ),
    function(
        "sub_number",
        lambda x, a: x - float(a["other"]) * float(a.get("alpha", 1)),
        "aten.sub.Scalar",
        loop=FloatLoop(bodies.add_or_sub),
    ),
    function(
        "rsub_number",
        lambda x, a: float(a["other"]) - x * float(a.get("alpha", 1)),
        "aten.rsub.Scalar",
        loop=FloatLoop(bodies.reversed_sub),
    ),
    function(
        "mul_number",
        lambda x, a: x * float(a["other"]),
        "aten.mul.Scalar",
        multiplies_by_scalar=True,
        loop=bodies.binary("mul"),
    ),
    function(
        "div_number",
        lambda x, a: x / float(a["other"]),
        "aten.div.Scalar",
        multiplies_by_scalar=True,
        loop=bodies.binary("div"),
    ),
    function(
        "pow_number",
        lambda x, a: np.power(x, float(a["exponent"])),
        "aten.pow.Tensor_Scalar",
        loop=FloatLoop(smooth.power, smooth.require_small_power),
        steep=lambda attrs: 0 if float(attrs["exponent"]) < 1 else None,
    ),
)
