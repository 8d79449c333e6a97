"""Functions of one value between two sites: a table of 256 levels, built once in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from intaglio.ops.opdef import Attrs, Call, OpDef, first_reason, float_activations

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
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x * inner, 0))) * scale


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _softplus_of(x: np.ndarray, attrs: Attrs) -> np.ndarray:
    """The identity above the threshold, as torch has it."""
    beta, threshold = float(attrs.get("beta", 1)), float(attrs.get("threshold", 20))
    return np.where(x * beta > threshold, x, _softplus(x * beta) / beta)


def _celu(x: np.ndarray, attrs: Attrs) -> np.ndarray:
    alpha = float(attrs.get("alpha", 1))
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x / alpha, 0)))


SELU = {"alpha": 1.6732632423543772848170429916717, "scale": 1.0507009873554804934193349852946}
"""Klambauer et al. 2017."""

FUNCTIONS: dict[str, tuple[tuple[str, ...], Function]] = {
    "sigmoid": (("aten.sigmoid.default",), lambda x, a: _sigmoid(x)),
    "hardsigmoid": (("aten.hardsigmoid.default",), lambda x, a: _hardsigmoid(x)),
    "hardswish": (("aten.hardswish.default",), lambda x, a: x * _hardsigmoid(x)),
    "silu": (("aten.silu.default",), lambda x, a: x * _sigmoid(x)),
    "mish": (("aten.mish.default",), lambda x, a: x * np.tanh(_softplus(x))),
    "tanh": (("aten.tanh.default",), lambda x, a: np.tanh(x)),
    "gelu": (("aten.gelu.default",), _gelu),
    "elu": (("aten.elu.default",), _elu),
    "selu": (("aten.selu.default",), lambda x, a: _elu(x, SELU)),
    "leaky_relu": (
        ("aten.leaky_relu.default",),
        lambda x, a: np.where(x > 0, x, x * float(a.get("negative_slope", 0.01))),
    ),
    "abs": (("aten.abs.default",), lambda x, a: np.abs(x)),
    "neg": (("aten.neg.default",), lambda x, a: -x),
    "square": (("aten.square.default",), lambda x, a: x * x),
    "celu": (("aten.celu.default",), _celu),
    "softplus": (("aten.softplus.default",), _softplus_of),
    "log_sigmoid": (("aten.log_sigmoid.default",), lambda x, a: -_softplus(-x)),
    "threshold": (
        ("aten.threshold.default",),
        lambda x, a: np.where(x > float(a["threshold"]), x, float(a["value"])),
    ),
    "exp": (("aten.exp.default",), lambda x, a: np.exp(x)),
    "round": (("aten.round.default",), lambda x, a: np.rint(x)),
    "add_number": (("aten.add.Scalar",), lambda x, a: x + float(a["other"]) * float(a.get("alpha", 1))),
    "sub_number": (("aten.sub.Scalar",), lambda x, a: x - float(a["other"]) * float(a.get("alpha", 1))),
    "rsub_number": (("aten.rsub.Scalar",), lambda x, a: float(a["other"]) - x * float(a.get("alpha", 1))),
    "mul_number": (("aten.mul.Scalar",), lambda x, a: x * float(a["other"])),
    "div_number": (("aten.div.Scalar",), lambda x, a: x / float(a["other"])),
    "pow_number": (("aten.pow.Tensor_Scalar",), lambda x, a: np.power(x, float(a["exponent"]))),
}
"""Operator -> ATen overloads, and its meaning on float64 with the arguments of the call."""


def bind(call: Call) -> Attrs:
    return {name: value for name, value in call.arguments.items() if value is not None}


def plain_numbers(call: Call) -> str | None:
    """Arguments are finite numbers or words; powers are whole and positive, so no level gives NaN."""
    for name, value in bind(call).items():
        if not isinstance(value, (int, float, str)) or (isinstance(value, float) and not math.isfinite(value)):
            return f"{name} = {value}"
    if call.arguments.get("beta") == 0 or (call.target == "aten.celu.default" and call.arguments.get("alpha") == 0):
        return "a division by zero"
    exponent: Any = call.arguments.get("exponent", 1)
    if exponent < 1 or int(exponent) != exponent:
        return f"a power of {exponent}"
    return "division by zero" if call.target == "aten.div.Scalar" and call.arguments["other"] == 0 else None


def _record(name: str, targets: tuple[str, ...], function: Function) -> OpDef:
    return OpDef(
        name=name,
        targets=targets,
        bind=bind,
        check=first_reason(float_activations, plain_numbers),
        function=function,
        kernel="table",
    )


UNARY_OPS = tuple(_record(name, targets, function) for name, (targets, function) in FUNCTIONS.items())
