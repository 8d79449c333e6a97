"""Products of two activations: attention as a composite operator, and batched matrix products.

The second operand is symmetric, with zero point 128 and quantized values in 1..255, so that kernels read it like
weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from intaglio import numerics
from intaglio.ir import Attrs, Dim, Graph, Op, Shape, TensorType, numel
from intaglio.ir.types import BOOL, F32, I32, U8
from intaglio.ir.verify import TypeRule
from intaglio.ops.opdef import Call, Layout, OpDef, Roles, first_reason, require_float_operands
from intaglio.ops.products.scratch_memory import CACHE_LINE, QUERY_BLOCK, ceil_div

MAX_HEAD_WIDTH = 256
"""Maximum number of values per query or key; dot products stay below 2^24 and are exact in float32."""
MAX_KEYS = (2**31 - 1) // (255 * 127)
"""Maximum number of products of quantized probabilities and values that fit into an int32 accumulator."""


def bind_attention(call: Call) -> Attrs:
    """Return the scale, by default ``1 / sqrt(depth)``, and whether the mask is causal."""
    given, depth = call.arguments, call.shape()[-1]
    scale = given.get("scale")
    if scale is None:
        scale = float(depth) ** -0.5 if isinstance(depth, int) else 1.0
    return {"scale": float(scale), "causal": bool(given.get("is_causal", False))}


def require_plain_attention(call: Call) -> str | None:
    """Return why attention is refused: it takes four axes, no dropout, and only activations as operands."""
    if dropout := call.arguments.get("dropout_p", 0.0):
        return f"dropout_p is {dropout}; the kernel supports 0"
    ranks = [len(call.shape(operand)) for operand in range(3)]
    if ranks != [4, 4, 4]:
        return f"the operands have {', '.join(map(str, ranks))} axes; the kernel supports 4"
    if any(call.constant[:3]):
        return "an operand is a constant; the kernel supports activations only"
    if call.shapes[3] is not None and call.arguments.get("is_causal"):
        return "both a mask and is_causal are given"
    return None


def require_fixed_heads(call: Call) -> str | None:
    """Return why attention is refused: heads and their widths must be fixed, and sums over keys must fit into int32."""
    (_, heads, _, depth), (_, groups, keys, _), (_, _, _, width) = (call.shape(operand) for operand in range(3))
    for dim in (heads, groups, depth, width):
        if not isinstance(dim, int):
            return f"the size {dim} is dynamic; only batch, queries and keys may be"
    numbers = [dim for dim in (heads, groups, depth, width) if isinstance(dim, int)]
    if not all(0 < size <= MAX_HEAD_WIDTH for size in numbers[2:]):
        return f"heads have {depth} and {width} values; the kernel supports 1 to {MAX_HEAD_WIDTH}"
    if not numbers[1] or numbers[0] % numbers[1]:
        return f"{heads} heads of queries are not a multiple of {groups} heads of keys"
    if isinstance(keys, int) and keys > MAX_KEYS:
        return f"there are {keys} keys; at most {MAX_KEYS} fit an int32 accumulator"
    return None


def require_mask_axes(call: Call) -> str | None:
    """Return why attention is refused: a mask must have two to four axes."""
    mask = call.shapes[3]
    return None if mask is None or 2 <= len(mask) <= 4 else f"the mask has {len(mask)} axes; the kernel supports 2 to 4"


def require_floating_operands(call: Call) -> str | None:
    """Return why attention is refused: operands must be floating point; only the mask may be boolean."""
    return "an operand is not floating point" if False in call.floating[:3] else None


def attention_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the result."""
    return (*shapes[0][:-1], shapes[2][-1])


def attention_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Compute `numerics.attention`, and quantize it unless the result is float."""
    qparams = [kind.qparams for kind in types[:3]]
    q, k, v = (x.astype(np.int32) - one.zero for x, one in zip(args[:3], qparams, strict=True))
    mask = args[3] if len(args) > 3 else None
    result = numerics.attention(q, k, v, mask, op.attrs["causal"], *result_factors(op, types, out))
    if out.q is None:
        return result
    y = out.qparams
    return numerics.round_clamp_i32(result, y.zero, y.qmin, y.qmax).astype(np.uint8)


def result_factors(op: Op, types: Sequence[TensorType], out: TensorType) -> tuple[np.float32, np.float32]:
    """Return `numerics.attention_factors` of an operator with operands and a result of these types."""
    scales = [kind.qparams.step for kind in types[:3]]
    return numerics.attention_factors(scales, 1.0 if out.q is None else out.qparams.step, op.attrs["scale"])


def require_no_constants(call: Call) -> str | None:
    """Return why a product is refused: none of its operands may be constant."""
    return "an operand is a constant; the kernel supports activations only" if True in call.constant else None


def require_product_axes(call: Call) -> str | None:
    """Return why a product is refused: it takes two to four axes, and its sums must fit into int32."""
    shapes = [call.shape(operand) for operand in (0, 1)]
    if not all(2 <= len(shape) <= 4 for shape in shapes):
        return f"the operands have {len(shapes[0])} and {len(shapes[1])} axes; the kernel supports 2 to 4"
    inner = shapes[0][-1]
    if isinstance(inner, int) and not 0 < inner <= MAX_KEYS:
        return f"an output sums {inner} products; 1 to {MAX_KEYS} fit an int32 accumulator"
    return None


def sums_fit(op: Op, graph: Graph) -> Iterable[tuple[Dim, str]]:
    """Yield the requirement that the sums of a product whose depth is free fit into int32."""
    inner = graph.types[op.inputs[0]].shape[-1]
    yield MAX_KEYS - inner, f"an output would sum {inner} products; up to {MAX_KEYS} fit an int32 accumulator"


def bmm_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the result's shape; batch axes broadcast as in numpy.matmul."""
    (*outer_a, rows, _), (*outer_b, _, columns) = shapes
    axes = max(len(outer_a), len(outer_b))
    a, b = ((1,) * (axes - len(outer)) + tuple(outer) for outer in (outer_a, outer_b))
    return (*(y if x == 1 else x for x, y in zip(a, b, strict=True)), rows, columns)


def bmm_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Multiply the values less their zero points; return exact int32 accumulators."""
    a, b = (x.astype(np.float64) - kind.qparams.zero for x, kind in zip(args, types, strict=True))
    return (a @ b).astype(np.int64).astype(np.int32)


def attention_macs(attrs: Attrs, shapes: Sequence[Shape], result: Shape) -> Dim:
    """Count the multiply-accumulates of both products for all queries and keys, including those that a causal mask
    excludes.
    """
    *outer, rows, width = result
    return numel(tuple(outer)) * rows * (shapes[1][-2] * (shapes[0][-1] + width))


def bmm_macs(attrs: Attrs, shapes: Sequence[Shape], result: Shape) -> Dim:
    """Count the multiply-accumulates of a product of two activations."""
    return numel(result) * shapes[0][-1]


def attention_scratch(op: Op, types: Mapping[str, TensorType]) -> Dim:
    """Return the number of 64-byte lines that one thread needs, in the order of `attention` in
    native/sequences/attention.h.
    """
    _, k, v = (types[name].shape for name in op.inputs[:3])
    depth, width, keys = 4 * ceil_div(k[-1], 4), 16 * ceil_div(v[-1], 16), ceil_div(v[-2], CACHE_LINE)
    # Per 64 keys: packed K and V, sums of K and the mask in 32 bits, scores as float and as quantized values. Rows of
    # float scores have a line more, so that they do not begin in the same set of a cache.
    return keys * (depth + width + 2 * 4 + QUERY_BLOCK * (4 + 1)) + QUERY_BLOCK * (width // 16 + 1)


def bmm_scratch(op: Op, types: Mapping[str, TensorType]) -> Dim:
    """Return the number of 64-byte lines that one thread needs, in the order of `product` in
    native/sequences/attention.h.
    """
    *_, inner, columns = types[op.inputs[1]].shape
    return ceil_div(columns, CACHE_LINE) * (4 * ceil_div(inner, 4) + 4)


ATTENTION = OpDef(
    name="attention",
    targets=("aten.scaled_dot_product_attention.default",),
    operands=("query", "key", "value", "attn_mask"),
    roles=Roles(x=(0, 1, 2)),
    anchor=True,
    bind=bind_attention,
    check=first_reason(require_floating_operands, require_plain_attention, require_fixed_heads, require_mask_axes),
    infer=attention_shape,
    reference=attention_reference,
    tolerance=2,
    types=TypeRule(((U8,), (U8,), (U8,)), (U8, F32), optional=(BOOL, F32), symmetric=(1, 2)),
    macs=attention_macs,
    computed_in_float32=True,
    layout=Layout.ROW_MAJOR,
    any_strides=True,
    scratch=attention_scratch,
    kernel="attention",
)
BMM = OpDef(
    name="bmm",
    targets=("aten.matmul.default",),
    operands=("self", "other"),
    roles=Roles(x=(0, 1)),
    anchor=True,
    check=first_reason(require_float_operands, require_no_constants, require_product_axes),
    infer=bmm_shape,
    reference=bmm_reference,
    types=TypeRule(((U8,), (U8,)), (I32,), symmetric=(1,)),
    needs=sums_fit,
    macs=bmm_macs,
    computed_in_float32=True,
    accumulates=True,
    layout=Layout.ROW_MAJOR,
    any_strides=True,
    scratch=bmm_scratch,
    emit="bmm",
    kernel="attention",
)
ATTENTION_OPS = (ATTENTION, BMM)


def is_attention_over(op: Op, name: str) -> bool:
    """Return whether an operator is attention that reads a value as its keys or values only."""
    return op.kind == ATTENTION.name and name not in (op.inputs[0], *op.inputs[3:])
