"""Layer norm of quantized tensors: sums over a row are integers, so mean and variance are exact before any rounding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from intaglio import numerics
from intaglio.ir import Attrs, Graph, Op, Shape, TensorType, evaluate
from intaglio.ir.types import F32, U8
from intaglio.ir.verify import TypeRule
from intaglio.ops.loop_ops import loop_bodies as bodies
from intaglio.ops.loop_ops.float_loop import FloatLoop
from intaglio.ops.opdef import (
    Call,
    KernelConstants,
    Layout,
    ModelConstants,
    OpDef,
    Roles,
    first_reason,
    rank,
    require_float_operands,
)

MAX_ROW_LENGTH = 2**15
"""Maximum number of values in a row; sums of squared differences of quantized values stay below 2^31."""


def bind_layer_norm(call: Call) -> Attrs:
    """Return epsilon."""
    return {"eps": float(call.arguments.get("eps", 1e-5))}


def require_last_axis_only(call: Call) -> str | None:
    """Return why layer norm is refused: it must be over the last axis, whose size is fixed and limited."""
    normalized = call.arguments["normalized_shape"]
    if len(normalized) != 1:
        return f"the norm is over {len(normalized)} axes; the kernel supports the last one"
    sizes = (normalized[0], call.shape()[-1])  # the second may be an expression that torch.export knows the value of
    free = [size for size in sizes if not isinstance(size, int)]
    if free:
        return f"the size of the last axis, {free[0]}, is dynamic"
    return (
        f"the last axis has {normalized[0]} values; the kernel supports up to {MAX_ROW_LENGTH}"
        if normalized[0] > MAX_ROW_LENGTH
        else None
    )


def require_constant_scale(call: Call) -> str | None:
    """Return why layer norm is refused: weight and bias must be constant."""
    return "the weight or the bias is computed while the model runs" if False in call.constant[1:] else None


def norm_constants(
    attrs: Attrs, shape: Shape, given: ModelConstants, scale_x: float, scale_y: float
) -> KernelConstants:
    """Return weight and bias in quantization steps of the result, and epsilon in squared steps of the operand."""
    row = evaluate(shape[-1], {})
    values = [np.full(row, default) if one is None else one for one, default in zip(given, (1.0, 0.0), strict=True)]
    factor, offset = (numerics.multiplier(value, scale_y) for value in values)
    with np.errstate(over="ignore"):
        eps = np.array([attrs["eps"] / scale_x / scale_x]).astype(np.float32)
    return {"factor": factor, "offset": offset, "eps": eps}, {}


def layer_norm_reference(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> np.ndarray:
    """Compute `numerics.layer_norm`."""
    x, factor, offset, eps = args
    q = out.qparams
    centred = x.astype(np.int32) - types[0].qparams.zero
    return numerics.layer_norm(centred, factor, offset, eps.reshape(()), q.zero, q.qmin, q.qmax).astype(np.uint8)


def valid_norm(op: Op, graph: Graph) -> None:
    """Check that there is a factor and an offset for every value of a row, and one epsilon."""
    row = tuple(evaluate(dim, {}) for dim in graph.types[op.inputs[0]].shape[-1:])
    found = [graph.types[name].shape for name in op.inputs[1:]]
    if found != [row, row, (1,)] or row[0] > MAX_ROW_LENGTH:
        raise ValueError(
            f"layer_norm expects a factor and an offset per value of the last axis and one epsilon, "
            f"but got x {graph.types[op.inputs[0]]} and constants of shapes {found}"
        )


LAYER_NORM = OpDef(
    name="layer_norm",
    targets=("aten.layer_norm.default",),
    operands=("input", "weight", "bias"),
    roles=Roles(x=(0,)),
    bind=bind_layer_norm,
    check=first_reason(require_float_operands, rank(2, 3, 4, 5), require_last_axis_only, require_constant_scale),
    reference=layer_norm_reference,
    constants=norm_constants,
    loop=FloatLoop(bodies.layer_norm, bodies.require_last_axis, sizes=("normalized_shape",)),
    types=TypeRule(((U8,), (F32,), (F32,), (F32,)), (U8,)),
    validate=valid_norm,
    layout=Layout.ROW_MAJOR,
    kernel="norm",
)
NORM_OPS = (LAYER_NORM,)
