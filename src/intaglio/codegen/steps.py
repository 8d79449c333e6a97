"""Steps of one operator: pools, pointwise levels, moves, borders."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from intaglio import numerics
from intaglio.codegen.context import Context, finish
from intaglio.codegen.writer import Code
from intaglio.ir import Dim, Op, Partition


def emit_pool(code: Code, partition: Partition, context: Context) -> None:
    op = partition.anchor
    code("struct Pool p = {};")
    code(f"p.in = {context.image(op.inputs[0])};")
    code(f"p.out = {context.image(op.output)};")
    limits = context.limits(op)
    if op.kind != "adaptive_avg_pool2d":
        (ky, kx), (sy, sx), (py, px) = (op.attrs[key] for key in ("kernel", "stride", "padding"))
        code(f"p.kernel_y = {ky}, p.kernel_x = {kx}, p.stride_y = {sy}, p.stride_x = {sx};")
        code(f"p.top = {py}, p.left = {px};")
    if op.kind == "max_pool2d":
        dy, dx = op.attrs["dilation"]
        code(f"p.dilation_y = {dy}, p.dilation_x = {dx};")
        code("max_pool(&p, thread, threads);")
    else:
        flags = [int(op.attrs.get("include_pad", 0)), int(bool(op.attrs.get("divisor"))), int("size" in op.attrs)]
        code("p.include_pad = {}, p.fixed_divisor = {}, p.adaptive = {};".format(*flags))
        zero = context.graph.types[op.inputs[0]].levels.zero
        code(f"p.zero_in = *{context.constant(np.array([zero], np.int32), 'int32_t')};")
        code(f"p.factors = {context.constant(context.graph.constants[op.inputs[1]], 'float')};")
        code(f"p.limits = {limits};")
        code("avg_pool(&p, thread, threads);")
    finish(code, context, op.output, limits)


def emit_pair(code: Code, partition: Partition, context: Context) -> None:
    """add and mul of two values of levels."""
    op = partition.anchor
    zero = context.graph.types[op.inputs[0]].levels.zero
    factors = [context.constant(context.graph.constants[name], "float") for name in op.inputs[2:]]
    code("struct Pair p = {};")
    for name, value in zip(("a", "b", "out"), (*op.inputs[:2], op.output), strict=True):
        code(f"p.{name} = {context.image(value)};")
    code(f"p.zero_a = *{context.constant(np.array([zero], np.int32), 'int32_t')};")
    for name, factor in zip(("factor_a", "factor_b"), factors, strict=False):
        code(f"p.{name} = {factor};")
    code(f"p.limits = {context.limits(op)};")
    code(f"pair_levels(&p, {op.kind}_line, thread, threads);")
    finish(code, context, op.output, context.limits(op))


def emit_cat(code: Code, partition: Partition, context: Context) -> None:
    op = partition.anchor
    code(f"const struct Image out = {context.image(op.output)};")
    channel: Dim = 0
    for index, name in enumerate(op.inputs):
        code(f"const struct Image in{index} = {context.image(name)};")
        code(f"join_levels(&in{index}, &out, {context.dim(channel)}, thread, threads);")
        channel = channel + context.graph.types[name].shape[op.attrs["axis"]]
    finish(code, context, op.output, context.limits(op))


def one_input(call: Callable[[Op, Context], str]) -> Callable[[Code, Partition, Context], None]:
    """Prints a step of one image and its result: ``call`` gives the statement over ``in`` and ``out``."""

    def emit(code: Code, partition: Partition, context: Context) -> None:
        op = partition.anchor
        for name, value in (("in", op.inputs[0]), ("out", op.output)):
            code(f"const struct Image {name} = {context.image(value)};")
        code(call(op, context))
        finish(code, context, op.output, context.limits(op))

    return emit


def _affine_call(op: Op, context: Context) -> str:
    zero = context.graph.types[op.inputs[0]].levels.zero
    factor, offset = (context.constant(context.graph.constants[name], "float") for name in op.inputs[1:])
    first = f"*{context.constant(np.array([zero], np.int32), 'int32_t')}, {factor}, {offset}"
    return f"affine_levels(&in, &out, {first}, {context.limits(op)}, thread, threads);"


def _clamp_call(op: Op, context: Context) -> str:
    return f"clamp_levels(&in, &out, {context.limits(op)}, thread, threads);"


def _shuffle_call(op: Op, context: Context) -> str:
    return f"shuffle_levels(&in, &out, {op.attrs['groups']}, thread, threads);"


def _table_call(op: Op, context: Context) -> str:
    table = context.constant(context.graph.constants[op.inputs[1]], "uint8_t")
    return f"look_up(&in, &out, {table}, thread, threads);"


emit_affine, emit_clamp = one_input(_affine_call), one_input(_clamp_call)
emit_shuffle, emit_table = one_input(_shuffle_call), one_input(_table_call)


def emit_move(code: Code, partition: Partition, context: Context) -> None:
    """slice: steps through the input; pad: starts before it."""
    op = partition.anchor
    start, step = [0, 0, 0, 0], [1, 1, 1, 1]
    if op.kind == "slice":
        start[op.attrs["axis"]], step[op.attrs["axis"]] = op.attrs["start"], op.attrs["step"]
    else:
        start = [-before for before in op.attrs["before"]]
    limits = context.limits(op)
    code("struct Move m = {};")
    code(f"m.in = {context.image(op.inputs[0])};")
    code(f"m.out = {context.image(op.output)};")
    for index, axis in enumerate("ncyx"):
        code(f"m.{axis}0 = {start[index]}, m.s{axis} = {step[index]};")
    code(f"m.level = (uint8_t)({limits})->zero_point;")
    code("move_levels(&m, thread, threads);")
    finish(code, context, op.output, limits)


def emit_reshape(code: Code, partition: Partition, context: Context) -> None:
    """Four axes that lie in their own order are shown as rows of one pixel: there, logical order is memory order."""
    op = partition.anchor
    for name, value in (("in", op.inputs[0]), ("out", op.output)):
        code(f"struct Image {name} = {context.image(value)};")
        if context.plan.buffers[value].rows:
            code(f"{name} = image({name}.base, {name}.images * {name}.height * {name}.width, 1, 1, {name}.pixel, 0);")
    code("reshape_levels(&in, &out, thread, threads);")
    finish(code, context, op.output, context.limits(op))


def emit_quantize(code: Code, partition: Partition, context: Context) -> None:
    op = partition.anchor
    q = _affine(context, op.output)
    code(f"const struct Image out = {context.image(op.output)};")
    code(f"const struct Affine* q = {q};")
    source = context.external(op.inputs[0])
    strides = context.strides(op.inputs[0])
    if context.plan.buffers[op.output].rows:
        code(f"const int64_t* s = {strides};")
        code("const int64_t strides[] = {s[0], s[3], s[1], s[2]};")
        strides = "strides"
    code(f"quantize_image((const float*){source}, {strides}, &out, q, thread, threads);")
    if context.halo(op.output):
        code("fill_halo(&out, (uint8_t)q->zero_point, thread, threads);")


def emit_dequantize(code: Code, partition: Partition, context: Context) -> None:
    op = partition.anchor
    code(f"const struct Image in = {context.image(op.inputs[0])};")
    to = context.external(op.output)
    code(f"dequantize_image(&in, (float*){to}, {_affine(context, op.inputs[0])}, thread, threads);")


def _affine(context: Context, value: str) -> str:
    """``struct Affine`` of a value's levels."""
    q = context.graph.types[value].levels
    floats = np.array([numerics.reciprocal(q.step), q.step], np.float32)
    integers = np.array([q.zero, q.qmin, q.qmax], np.int32)
    return context.constant(np.frombuffer(floats.tobytes() + integers.tobytes(), np.uint8), "struct Affine")
