"""linear_f32: a linear layer of float activations whose weights are stored in fewer bits than a float."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from intaglio.ir import Op, Shape, TensorType
from intaglio.numerics import float_math
from intaglio.ops.opdef import Attrs, OpDef


def linear_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    return (*shapes[0][:-1], shapes[1][0])


def linear_meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """f32[..., K], weight f16[N, K] or s8[N, K] with a scale for each of N, and perhaps f32[N] -> f32[..., N]."""
    x, weight, *bias = args
    scales = None if types[1].q is None else np.array(types[1].q.scales, np.float32)
    return float_math.linear(x, weight, scales, *bias)


LINEAR_F32 = OpDef(name="linear_f32", infer=linear_shape, meaning=linear_meaning, kernel="linear_f32")
OPS = (LINEAR_F32,)
