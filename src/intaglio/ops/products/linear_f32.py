"""Weight-only quantization: a linear layer of float activations with float16 or int8 weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from intaglio.ir import DType, Graph, Op, TensorType
from intaglio.ir.types import F16, F32, S8
from intaglio.ir.verify import TypeRule
from intaglio.numerics import float_math
from intaglio.ops.opdef import Layout, OpDef
from intaglio.ops.products.conv import linear_macs, linear_shape


def linear_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Return f32[..., N] of x f32[..., K] and a weight f16[N, K], or s8[N, K] with scales f32[N], and an optional bias
    f32[N].
    """
    x, weight, *bias = args
    scales = None if types[1].q is None else np.array(types[1].q.scales, np.float32)
    return float_math.linear(x, weight, scales, *bias)


def valid_stored(op: Op, graph: Graph) -> None:
    """Check weight, scales and biases.

    The weight must be a constant [N, K] for x [..., K], with one scale per output if it is quantized; biases are [N].
    """
    x, weight, *bias = (graph.types[name] for name in op.inputs)
    fits = len(weight.shape) == 2 and len(x.shape) > 0 and x.shape[-1] == weight.shape[1] and not op.attrs
    scales = weight.q.scales if weight.q is not None else ()
    axis = None if weight.q is None else weight.q.axis
    wanted = (weight.shape[0], 0) if weight.dtype is DType.S8 else (0, None)
    if not (fits and (len(scales), axis) == wanted and all(kind.shape == weight.shape[:1] for kind in bias)):
        raise ValueError(
            f"linear_f32 expects x [..., K], weight [N, K] with a scale per row if it is s8, and an optional bias [N], "
            f"but got x {x}, weight {weight} and bias {', '.join(map(str, bias)) or None}"
        )
    if not set(op.inputs[1:]) <= set(graph.constants):
        raise ValueError(f"%{op.output}: the weight and the bias of linear_f32 must be constants")


LINEAR_F32 = OpDef(
    name="linear_f32",
    infer=linear_shape,
    reference=linear_reference,
    types=TypeRule(((F32,), (S8, F16)), (F32,), optional=(F32,)),
    validate=valid_stored,
    macs=linear_macs,
    layout=Layout.ROW_MAJOR,
    kernel="linear_f32",
)
WEIGHT_ONLY_OPS = (LINEAR_F32,)
