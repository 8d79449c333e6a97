"""Weight-only quantization: linear layers of float activations with float16 or int8 weights, one or one per group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from intaglio.ir import Attrs, DType, Graph, Op, Shape, TensorType, evaluate
from intaglio.ir.types import F16, F32, I64, S8
from intaglio.ir.verify import TypeRule
from intaglio.numerics import float_math
from intaglio.ops.opdef import Layout, OpDef
from intaglio.ops.products.conv import linear_macs, linear_shape
from intaglio.ops.products.grouped_linear import rows_of_groups


def linear_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Return f32[..., N] of x f32[..., K] and a weight f16[N, K], or s8[N, K] with scales f32[N], and an optional bias
    f32[N].
    """
    x, weight, *bias = args
    scales = None if types[1].q is None else np.array(types[1].q.scales, np.float32)
    return float_math.linear(x, weight, scales, *bias)


def grouped_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Return f32[rows, N] of x f32[rows, K], with the part of a weight [groups * N, K] that each row's group has."""
    x, weight, ends, *bias = args
    outputs = len(weight) // len(ends)
    scales = None if types[1].q is None else np.array(types[1].q.scales, np.float32)
    found = np.zeros((len(x), outputs), np.float32)
    for group, rows in enumerate(rows_of_groups(ends, len(x))):
        own = slice(group * outputs, (group + 1) * outputs)
        parts = [values[own] for values in bias]
        found[rows] = float_math.linear(x[rows], weight[own], None if scales is None else scales[own], *parts)
    return found


def grouped_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the result of a grouped layer."""
    (rows, _), (outputs, _), (groups,) = shapes[:3]
    return rows, evaluate(outputs, {}) // evaluate(groups, {})


def valid_grouped(op: Op, graph: Graph) -> None:
    """Check weight, scales and biases as `valid_stored` does, and that groups divide the outputs."""
    outputs, ends = graph.types[op.inputs[1]].shape[0], graph.types[op.inputs[2]].shape
    (count,) = ends if len(ends) == 1 else (0,)
    divided = isinstance(count, int) and isinstance(outputs, int) and 0 < count <= outputs and outputs % count == 0
    if not divided or len(graph.types[op.inputs[0]].shape) != 2:
        raise ValueError(f"%{op.output}: {outputs} outputs cannot be divided among groups of the shape {ends}")
    valid_stored(replace(op, inputs=(*op.inputs[:2], *op.inputs[3:])), graph)


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


def linear_groups_reference(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> np.ndarray:
    """Return f32[..., N] of x f32[..., K], a weight s8[N, K] with the steps of its groups, and an optional bias f32[N].

    See `float_math.dequantize_groups` for the steps.
    """
    x, quantized, steps, *bias = args
    return float_math.linear(x, float_math.dequantize_groups(quantized, steps, op.attrs["group"]), None, *bias)


def valid_groups(op: Op, graph: Graph) -> None:
    """Check weight, steps and bias: constants of the shapes that the weight and the size of its groups determine."""
    kinds, group = [graph.types[name] for name in op.inputs], op.attrs.get("group")
    if not (3 <= len(kinds) <= 4 and op.attrs.keys() == {"group"} and type(group) is int and group > 0):
        raise ValueError(f"linear_groups_f32 expects 3 or 4 operands and a group, but got {kinds} and {dict(op.attrs)}")
    x, weight, steps, *bias = kinds
    fits = len(weight.shape) == 2 and len(x.shape) > 0 and x.shape[-1] == weight.shape[1] and weight.q is None
    if fits:
        outputs, inputs = weight.shape
        fits = steps.shape[1:] == (outputs, (inputs + group - 1) // group) and steps.shape[0] in (1, 2)
    if not (fits and all(kind.shape == weight.shape[:1] for kind in bias)):
        raise ValueError(
            f"linear_groups_f32 expects x [..., K], weight s8[N, K], steps [1 or 2, N, K / group] and an optional bias "
            f"[N], but got {', '.join(map(str, kinds))} and groups of {group}"
        )
    if not set(op.inputs[1:]) <= set(graph.constants):
        raise ValueError(f"%{op.output}: the weight, the steps and the bias of linear_groups_f32 must be constants")


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
GROUPED_LINEAR_F32 = OpDef(
    name="grouped_linear_f32",
    infer=grouped_shape,
    reference=grouped_reference,
    types=TypeRule(((F32,), (S8, F16), (I64,)), (F32,), optional=(F32,)),
    validate=valid_grouped,
    macs=linear_macs,
    layout=Layout.ROW_MAJOR,
    kernel="linear_f32",
)
LINEAR_GROUPS_F32 = OpDef(
    name="linear_groups_f32",
    infer=linear_shape,
    reference=linear_groups_reference,
    types=TypeRule(((F32,), (S8,), (F32,)), (F32,), optional=(F32,)),
    validate=valid_groups,
    macs=linear_macs,
    layout=Layout.ROW_MAJOR,
    kernel="linear_f32",
)
WEIGHT_ONLY_OPS = (LINEAR_F32, GROUPED_LINEAR_F32, LINEAR_GROUPS_F32)
