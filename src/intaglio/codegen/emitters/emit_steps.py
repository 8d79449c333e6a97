"""Print steps of a single operator: pooling, elementwise operators on quantized values, quantize and dequantize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from intaglio import numerics
from intaglio.codegen.context import Context, fill_result_halo
from intaglio.codegen.writer import Code
from intaglio.ir import Op
from intaglio.ops import op_def
from intaglio.plan.plan_records import Partition

AXIS_NAMES = "zyx"
WIDEST = 64
"""Largest number of quantized values in a vector of native/base/vectors.h."""


def emit_pool(code: Code, partition: Partition, context: Context) -> None:
    """Print a pooling step. 1-D inputs are images with one row, and inputs other than volumes have depth 1."""
    op = partition.anchor
    shapes = [context.graph.types[name].shape for name in (op.inputs[0], op.output)]
    axes, limits = AXIS_NAMES[5 - len(shapes[0]) :], context.limits(op)
    context.include("images/pooling.h")
    code("struct Pool p = {};")
    code(f"p.in = {context.image(op.inputs[0])};")
    code(f"p.out = {context.image(op.output)};")
    if "z" in axes:
        code(f"p.depth_in = {context.dim(shapes[0][2])}, p.depth_out = {context.dim(shapes[1][2])};")
    else:
        code("p.depth_in = p.depth_out = 1;")
    for axis, letter in enumerate("zyx"):
        kernel, stride, padding, dilation = (
            op.attrs[key][axis - len("zyx")] if letter in axes and key in op.attrs else default
            for key, default in (("kernel", 1), ("stride", 1), ("padding", 0), ("dilation", 1))
        )
        code(f"p.{letter} = (struct PoolAxis){{{kernel}, {stride}, {padding}, {dilation}}};")
    if op_def(op).shares_qparams:
        code("max_pool(&p, thread, threads);")
    else:
        flags = [int(op.attrs.get("include_pad", 0)), int(bool(op.attrs.get("divisor"))), int("size" in op.attrs)]
        code("p.include_pad = {}, p.fixed_divisor = {}, p.adaptive = {};".format(*flags))
        zero = context.graph.types[op.inputs[0]].qparams.zero
        code(f"p.zero_in = {context.number(zero, 'int32_t', 'zero_in')};")
        factors = context.graph.constants[op.inputs[1]]
        if "size" in op.attrs and not all(isinstance(size, int) for size in shapes[0][2:]):
            ends = (context.graph.types[name].qparams.step for name in (op.inputs[0], op.output))
            code(f"p.ratio = {context.number(numerics.pool_ratio(*ends), 'double', 'ratio')};")
        else:
            code(f"p.factors = {context.constant(factors, 'float', 'factors')};")
        code(f"p.limits = {limits};")
        sums = f"{op.output}.sums"
        if sums in context.index:
            code(f"p.sums = (int32_t*)(r->arena + r->offsets[{context.index[sums]}]);")
            code(f"p.shares = {context.plan.buffers[sums].shape[0]};")
        code("avg_pool(&p, r->barrier, thread, threads);")
    fill_result_halo(code, context, op.output, limits)


def fill_pair(code: Code, op: Op, context: Context) -> None:
    """Print a `struct Pair` for an add or mul of two quantized values, without its result image."""
    zero = context.graph.types[op.inputs[0]].qparams.zero
    factors, each = [context.graph.constants[name] for name in op.inputs[2:]], "axis" in op.attrs
    context.include("elementwise/pair.h")
    code("struct Pair p = {};")
    for name, value in zip("ab", op.inputs[:2], strict=True):
        code(f"p.{name} = {context.image(value)};")
    code(f"p.zero_a = {context.number(zero, 'int32_t', 'zero_a')}, p.each = {int(each)};")
    for name, factor in zip(("factor_a", "factor_b"), factors, strict=False):
        longer = each and name == "factor_b"
        code(f"p.{name} = {_by_channel(context, factor, name) if longer else context.constant(factor, 'float', name)};")
    code(f"p.limits = {context.limits(op)};")


def emit_pair(code: Code, partition: Partition, context: Context) -> None:
    """Print an add or mul of two quantized values."""
    op = partition.anchor
    fill_pair(code, op, context)
    code(f"p.out = {context.image(op.output)};")
    code(f"add_or_mul_u8(&p, {int(op_def(op).residual is not None)}, thread, threads);")
    fill_result_halo(code, context, op.output, context.limits(op))


def one_input(header: str, call: Callable[[Op, Context], str]) -> Callable[[Code, Partition, Context], None]:
    """Return an emitter for operators with one input image.

    Args:
        header: Header with the C function.
        call: Returns the C statement that computes the image `out` from `in`.
    """

    def emit(code: Code, partition: Partition, context: Context) -> None:
        op = partition.anchor
        context.include(header)
        for name, value in (("in", op.inputs[0]), ("out", op.output)):
            code(f"const struct Image {name} = {context.image(value)};")
        code(call(op, context))
        fill_result_halo(code, context, op.output, context.limits(op))

    return emit


def _by_channel(context: Context, values: np.ndarray, label: str) -> str:
    """Store per-channel constants, extended cyclically because a vector can end in the next pixel."""
    return context.constant(np.resize(values, values.size + WIDEST - 1), "float", label)


def _affine_call(op: Op, context: Context) -> str:
    zero = context.graph.types[op.inputs[0]].qparams.zero
    factor, offset = (
        _by_channel(context, context.graph.constants[name], label)
        for name, label in zip(op.inputs[1:], ("factor", "offset"), strict=True)
    )
    first = f"{context.number(zero, 'int32_t', 'zero_in')}, {factor}, {offset}"
    return f"affine_u8(&in, &out, {first}, {context.limits(op)}, thread, threads);"


def _clamp_call(op: Op, context: Context) -> str:
    return f"clamp_u8(&in, &out, {context.limits(op)}, thread, threads);"


def _table_call(op: Op, context: Context) -> str:
    table = context.constant(context.graph.constants[op.inputs[1]], "uint8_t", "table")
    return f"look_up(&in, &out, {table}, thread, threads);"


def _prelu_call(op: Op, context: Context) -> str:
    zero = context.graph.types[op.inputs[0]].qparams.zero
    rise, fall = (context.graph.constants[name] for name in op.inputs[1:])
    each = _by_channel(context, np.resize(fall, _channels(context, op.inputs[0])), "fall")
    first = f"{context.number(zero, 'int32_t', 'zero_in')}, {context.constant(rise, 'float', 'rise')}"
    return f"prelu_u8(&in, &out, {first}, {each}, {context.limits(op)}, thread, threads);"


def _channels(context: Context, value: str) -> int:
    """Return the number of channels of a value, which is static because kernels have constants per channel."""
    (channels,) = (dim for dim in [context.plan.buffers[value].channels()] if isinstance(dim, int))
    return channels


emit_affine = one_input("elementwise/pointwise.h", _affine_call)
emit_clamp = one_input("elementwise/pointwise.h", _clamp_call)
emit_table = one_input("elementwise/lookup.h", _table_call)
emit_prelu = one_input("elementwise/pointwise.h", _prelu_call)


def _layer_norm_call(op: Op, context: Context) -> str:
    zero = context.graph.types[op.inputs[0]].qparams.zero
    *parts, eps = (context.graph.constants[name] for name in op.inputs[1:])
    factor, offset = (
        _by_channel(context, part, label) for part, label in zip(parts, ("factor", "offset"), strict=True)
    )
    zero_in, epsilon = context.number(zero, "int32_t", "zero_in"), f"*{context.constant(eps, 'float', 'epsilon')}"
    first = f"{zero_in}, {factor}, {offset}, {epsilon}"
    return f"layer_norm_u8(&in, &out, {first}, {context.limits(op)}, thread, threads);"


emit_layer_norm = one_input("elementwise/pointwise.h", _layer_norm_call)


def emit_quantize(code: Code, partition: Partition, context: Context) -> None:
    """Print a quantize of a float tensor with any strides. A volume is processed as depth slices, image by image."""
    op = partition.anchor
    buffer = context.plan.buffers[op.output]
    context.include("elementwise/border.h")
    code(f"const struct Image out = {context.image(op.output)};")
    code(f"const struct Affine* q = {_affine(context, op.output)};")
    code(f"const int64_t* s = {source_strides(code, op.inputs[0], context)};")
    counts = f"r->clipped, {context.clip_count(op.inputs[0], op.output)}"
    code(f"const int64_t strides[] = {{{', '.join(strides_read(len(buffer.shape), buffer.row_major))}}};")
    source = f"(const float*){context.strided(op.inputs[0])[0]}"
    if buffer.channels_last and len(buffer.shape) == 5:
        depth = context.dim(buffer.shape[2])
        with code.block(f"for (int64_t b = 0; b < {context.dim(buffer.shape[0])}; ++b)"):
            code(f"struct Image one = out; one.images = {depth}, one.base += b * {depth} * out.image;")
            code(f"quantize_image({source} + b * s[0], strides, &one, q, 0, {counts}, thread, threads);")
    else:
        code(f"quantize_image({source}, strides, &out, q, 0, {counts}, thread, threads);")
    if context.halo(op.output):
        code("fill_halo(&out, (uint8_t)q->zero_point, thread, threads);")


def source_strides(code: Code, value: str, context: Context) -> str:
    """Return a C expression for the strides of a float tensor.

    A tensor of the caller has its actual strides. For one that the program wrote, declare its dense strides.
    """
    if context.is_program_input(value):
        return context.strides(value)
    steps = ", ".join(map(context.dim, context.strided(value)[1][-5:]))
    code(f"const int64_t dense[] = {{{steps}}};")
    return "dense"


def strides_read(rank: int, rows: bool) -> list[str]:
    """Return C expressions for the strides along images, channels, rows and columns.

    Args:
        rank: Number of axes of the tensor.
        rows: Whether the tensor is treated as row-major instead of as an image.

    Returns:
        Elements of the array `s`, which holds the strides of the last five axes, or "0" for missing axes.
    """
    if rows or rank not in (3, 4, 5):
        axes = [rank - 4 if rank > 3 else 0, rank - 1, rank - 3 if rank > 3 else 1, rank - 2 if rank > 3 else -1]
        axes = [0, axes[1], -1, -1] if rank == 2 else [-1, rank - 1, -1, -1] if rank < 2 else axes
    else:
        axes = {3: [0, 1, -1, 2], 4: [0, 1, 2, 3], 5: [2, 1, 3, 4]}[rank]
    return ["0" if axis < 0 else f"s[{axis - max(0, rank - 5)}]" for axis in axes]


def emit_pixels(code: Code, partition: Partition, context: Context) -> None:
    """Print a quantize of an input image, which the caller passes as floats or directly as uint8 pixels."""
    op = partition.anchor
    source, strides = context.external(op.inputs[0]), context.strides(op.inputs[0])
    gain, shift = (context.graph.constants[name] for name in op.inputs[1:])
    zeros = np.broadcast_to(np.array(context.graph.types[op.output].qparams.zeros), gain.shape)
    parts = [affine_bytes(*each, 0, 255) for each in zip(gain, shift, np.ones_like(gain), zeros, strict=True)]
    code(f"const struct Image out = {context.image(op.output)};")
    context.include("elementwise/border.h")
    code(f"const struct Affine* q = {context.constant(np.concatenate(parts), 'struct Affine', 'scales')};")
    with code.block(f"if (r->bytes[{context.plan.external.index(op.inputs[0])}])"):
        code(f"copy_image({source}, {strides}, &out, thread, threads);")
    with code.block("else"):
        low, high = (np.divide(end - zeros - shift, gain) for end in (0, 255))
        counts = f"r->clipped, {context.clip_count(op.inputs[0], op.output, (float(low.min()), float(high.max())))}"
        code(f"quantize_image((const float*){source}, {strides}, &out, q, 1, {counts}, thread, threads);")
    if context.halo(op.output):
        pixel = context.constant(zeros.astype(np.uint8), "uint8_t", "zero_points")
        code(f"fill_halo_pixels(&out, {pixel}, thread, threads);")


def emit_dequantize(code: Code, partition: Partition, context: Context) -> None:
    """Print a dequantize of an image to a dense float tensor."""
    op = partition.anchor
    code(f"const struct Image in = {context.image(op.inputs[0])};")
    to, _ = context.strided(op.output)
    context.include("elementwise/border.h")
    code(f"dequantize_image(&in, (float*){to}, {_affine(context, op.inputs[0])}, thread, threads);")


def _affine(context: Context, value: str) -> str:
    """Store the `struct Affine` with the quantization parameters of a value, and return a pointer to it."""
    q = context.graph.types[value].qparams
    return context.constant(
        affine_bytes(numerics.reciprocal(q.step), 0, q.step, q.zero, q.qmin, q.qmax), "struct Affine", "scale"
    )


def affine_bytes(inverse: Any, offset: Any, scale: float, zero_point: int, low: int, high: int) -> np.ndarray:
    """Return the bytes of a `struct Affine` (native/elementwise/border.h)."""
    floats, integers = np.array([inverse, offset, scale], np.float32), np.array([zero_point, low, high], np.int32)
    return np.frombuffer(floats.tobytes() + integers.tobytes(), np.uint8)
