"""Loop bodies of functions that are made of exponentials and logarithms, of powers and of shrinkage."""

from __future__ import annotations

import numpy as np

from intaglio.ops.loop_ops.float_loop import Values
from intaglio.ops.loop_ops.loop_builder import Body, FloatCall

HIGHEST_POWER = 8
"""Largest whole exponent of a power, which is computed by products."""
SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
"""Constants of Klambauer et al. 2017."""


def elu(body: Body, call: FloatCall, v: Values) -> str:
    """Write ELU, with the scales of its arguments."""
    alpha, scale, inner = (float(v.get(name, 1)) for name in ("alpha", "scale", "input_scale"))
    return _elu(body, v["self"], alpha * scale, scale, inner)


def selu(body: Body, call: FloatCall, v: Values) -> str:
    """Write SELU."""
    return _elu(body, v["self"], SELU_ALPHA * SELU_SCALE, SELU_SCALE, 1.0)


def celu(body: Body, call: FloatCall, v: Values) -> str:
    """Write CELU."""
    alpha = float(v.get("alpha", 1))
    return _elu(body, v["self"], alpha, 1.0, 1 / alpha)


def _elu(body: Body, x: str, low: float, high: float, inner: float) -> str:
    """Write ``high * x`` above 0, and ``low * (exp(inner * x) - 1)`` below."""
    power = body("exp", x if inner == 1 else body("mul", x, inner))
    below = body("mul", body("sub", power, 1.0), low)
    return body("where", body("gt", x, 0.0), x if high == 1 else body("mul", x, high), below)


def expm1(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``exp(x) - 1``; near zero as ``2 t / (1 - t)`` with ``t = tanh(x / 2)``, which keeps small results."""
    x = v["self"]
    half = body("tanh", body("mul", x, 0.5))
    near = body("div", body("mul", half, 2.0), body("sub", 1.0, half))
    return body("where", body("lt", body("abs", x), 1.0), near, body("sub", body("exp", x), 1.0))


def softplus(body: Body, call: FloatCall, v: Values) -> str:
    """Write softplus, which is linear above a threshold."""
    x, beta, threshold = v["self"], float(v.get("beta", 1)), float(v.get("threshold", 20))
    scaled = x if beta == 1 else body("mul", x, beta)
    soft = _softplus(body, scaled)
    soft = soft if beta == 1 else body("div", soft, beta)
    return body("where", body("gt", scaled, threshold), x, soft)


def _softplus(body: Body, x: str) -> str:
    """Write ``max(x, 0) + log(1 + exp(-|x|))``."""
    small = body("log", body("add", body("exp", body("neg", body("abs", x))), 1.0))
    return body("add", body("relu", x), small)


def mish(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``x * tanh(softplus(x))``."""
    return body("mul", v["self"], body("tanh", _softplus(body, v["self"])))


def log_sigmoid(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``-softplus(-x)``."""
    return body("neg", _softplus(body, body("neg", v["self"])))


def threshold(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``x`` above a threshold, and a number elsewhere."""
    above = body("gt", v["self"], float(v["threshold"]))
    return body("where", above, v["self"], float(v["value"]))


def power(body: Body, call: FloatCall, v: Values) -> str:
    """Write a power.

    Small whole exponents are products, and 1/2 is a root. Others are ``exp(exponent * log(x))``, which is not a number
    below zero, as in torch.
    """
    exponent, x = float(v["exponent"]), v["self"]
    if exponent < 0 and (exponent == -0.5 or exponent.is_integer()):
        return body("reciprocal", _power(body, x, -exponent))
    return _power(body, x, exponent)


def _power(body: Body, x: str, exponent: float) -> str:
    if exponent == 0.5:
        return body("sqrt", x)
    if not exponent.is_integer():
        return body("exp", body("mul", body("log", x), exponent))
    found = "" if int(exponent) % 2 == 0 else x
    while (exponent := exponent // 2) > 0:
        x = body("mul", x, x)
        if int(exponent) % 2:
            found = body("mul", found, x) if found else x
    return found


def require_small_power(call: FloatCall) -> str | None:
    """Return why a power is refused: whole exponents must be small."""
    exponent = call.arguments["exponent"]
    if not isinstance(exponent, (int, float)) or not np.isfinite(exponent):
        return f"the exponent is {exponent}; supported are numbers"
    if float(exponent).is_integer() and not 1 <= abs(exponent) <= HIGHEST_POWER:
        return f"the exponent is {exponent}; supported are fractions, and 1 to {HIGHEST_POWER} with both signs"
    return None


def log1p(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``log(1 + x)``; up to 1 with the factor ``x / ((1 + x) - 1)``, which keeps small results (Kahan)."""
    x = v["self"]
    above = body("add", x, 1.0)
    logarithm = body("log", above)
    near = body("mul", logarithm, body("div", x, body("sub", above, 1.0)))
    near = body("where", body("eq", above, 1.0), x, near)
    return body("where", body("gt", x, 1.0), logarithm, near)


def softshrink(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``x`` moved towards 0 by a number, and 0 between the two."""
    x, reach = v["self"], float(v.get("lambd", 0.5))
    return body("sub", x, body("clamp", x, low=-reach, high=reach))


def hardshrink(body: Body, call: FloatCall, v: Values) -> str:
    """Write ``x`` outside of an interval around 0, and 0 in it."""
    inside = body("le", body("abs", v["self"]), float(v.get("lambd", 0.5)))
    return body("where", inside, 0.0, v["self"])
