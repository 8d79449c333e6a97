"""softmax, in float32 between a dequantize and whatever follows: its inputs are sums, its results probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from intaglio import numerics
from intaglio.ir import Op, TensorType
from intaglio.ops.opdef import Attrs, Call, OpDef, first_reason, float_activations, rank


def bind_softmax(call: Call) -> Attrs:
    return {"axis": int(call.arguments["dim"]) % len(call.shape())}


def one_fixed_axis(call: Call) -> str | None:
    """Over channels or the last axis; how many there are is a number."""
    axis, shape = bind_softmax(call)["axis"], call.shape()
    if axis not in (1, len(shape) - 1):
        return f"softmax over axis {axis}; the kernel takes channels or the last axis"
    return None if isinstance(shape[axis], int) else f"free dimension {shape[axis]} is the one reduced"


def softmax_meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    axis = op.attrs["axis"]
    return np.moveaxis(numerics.softmax(np.moveaxis(args[0], axis, -1)), -1, axis)


SOFTMAX = OpDef(
    name="softmax",
    targets=("aten.softmax.int",),
    real=True,
    bind=bind_softmax,
    check=first_reason(float_activations, rank(1, 2, 3, 4, 5), one_fixed_axis),
    meaning=softmax_meaning,
    kernel="float",
)
OPS = (SOFTMAX,)
