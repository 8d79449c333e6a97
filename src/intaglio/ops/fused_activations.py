"""Activation functions fused into a convolution or linear layer: float32 on the accumulator, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from intaglio import numerics
from intaglio.ir import Graph, Op, TensorType
from intaglio.ir.verify import TypeRule
from intaglio.ops.opdef import Layout, OpDef, Tail
from intaglio.ops.pointwise import F32, I32, U8, along

PRECISE: Mapping[str, Callable[..., numerics.FloatArray]] = {
    "leaky_relu": lambda x, a: numerics.leaky_relu(x, a["slope"]),
    "hardsigmoid": lambda x, a: numerics.hardsigmoid(x),
    "hardswish": lambda x, a: numerics.hardswish(x),
    "sigmoid": lambda x, a: numerics.sigmoid(x),
    "silu": lambda x, a: numerics.silu(x),
    "tanh": lambda x, a: numerics.tanh_f32(x),
    "gelu": lambda x, a: numerics.gelu_approx(x),
    "gelu_tanh": lambda x, a: numerics.gelu_tanh(x),
}
"""Functions of an `activate` by attribute ``function``; each maps float32 ``x`` and the attributes ``a`` to float32."""


def activate_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Compute `numerics.activate` with the factor ``float32(s_x * s_w)``; a third operand is the gain per channel."""
    acc, factor, *gains = args
    q, axis = out.qparams, types[0].qparams.axis
    unit, gain = along(factor, acc.ndim, axis), along(gains[0], acc.ndim, axis) if gains else 1
    function = partial(PRECISE[op.attrs["function"]], a=op.attrs)
    return numerics.activate(acc, unit, function, q.step, q.zero, q.qmin, q.qmax, gain).astype(np.uint8)


def valid_function(op: Op, graph: Graph) -> None:
    """Check that the function exists and that slope and factors are finite, so that no accumulator gives NaN."""
    name, slope = op.attrs.get("function"), op.attrs.get("slope", 0.0)
    plain = isinstance(slope, (int, float)) and abs(slope) <= float(numerics.LARGEST)
    if name not in PRECISE or not plain or ("slope" in op.attrs) != (name == "leaky_relu"):
        raise ValueError(
            f"activate expects a known function and a finite slope for leaky_relu only, but got {dict(op.attrs)}"
        )
    if op.inputs[1] not in graph.constants or not np.isfinite(graph.constants[op.inputs[1]]).all():
        raise ValueError(f"%{op.inputs[1]}: the factors of activate must be finite constants")


ACTIVATE = OpDef(
    name="activate",
    operands=("acc", "factor"),
    reference=activate_reference,
    types=TypeRule(((I32,), (F32,)), (U8,), optional=(F32,)),
    validate=valid_function,
    layout=Layout.SAME,
    batch_separable=True,
    tail=Tail.ACTIVATE,
    kernel="matmul",
)
FUSED_ACTIVATION_OPS = (ACTIVATE,)
