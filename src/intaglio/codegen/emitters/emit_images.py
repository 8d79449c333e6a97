"""Print steps on images: upsampling of quantized values; pooling, resizing and sampling of floats.

Upsampling has index and weight tables, or the sizes that determine them at run time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from intaglio.codegen.context import Context, fill_result_halo
from intaglio.codegen.writer import Code
from intaglio.ir import Dim, Op
from intaglio.plan.plan_records import Partition

STAY = np.zeros(1, np.int32)
"""Index table of an axis with a single element."""
IMAGE_AXES = 3
"""Axes of an image in C; ``FLOAT_AXES`` of native/images/float_images.h."""


def emit_nearest(code: Code, partition: Partition, context: Context) -> None:
    """Print a nearest upsampling. 1-D inputs are images with one row, and inputs other than volumes have depth 1."""
    op, graph = partition.anchor, context.graph
    if "results" in op.attrs:
        found = _grids(op, context)
    else:
        found = [f"{{{context.constant(graph.constants[name], 'int32_t', 'index')}}}" for name in op.inputs[1:]]
    context.include("images/resize.h")
    stay = f"{{{context.constant(STAY, 'int32_t', 'stay')}}}"
    for name, grid in zip(("depth", "row", "column"), [stay] * (3 - len(found)) + found, strict=True):
        code(f"const struct Grid {name} = {grid};")
    code(f"const struct Image in = {context.image(op.inputs[0])};")
    code(f"const struct Image out = {context.image(op.output)};")
    shapes = graph.types[op.inputs[0]].shape, graph.types[op.output].shape
    depths = ", ".join(context.dim(shape[2]) if len(shape) == 5 else "1" for shape in shapes)
    code(f"upsample_nearest(&in, &out, {depths}, &depth, &row, &column, thread, threads);")
    fill_result_halo(code, context, op.output, context.limits(op))


def emit_linear(code: Code, partition: Partition, context: Context) -> None:
    """Print a linear or bilinear upsampling. A 1-D input is an image with one row."""
    op, graph = partition.anchor, context.graph
    *found, factor = (graph.constants[name] for name in op.inputs[1:])
    if "results" in op.attrs:
        axes = _grids(op, context)
    else:
        axes = [_pairs(index, weight, context) for index, weight in zip(found[::2], found[1::2], strict=True)]
    if len(axes) == 1:
        axes.insert(0, _pairs(np.zeros((1, 2), np.int32), np.array([[1, 0]], np.float32), context))
    context.include("images/resize.h")
    code("struct Blend b = {};")
    code(f"b.in = {context.image(op.inputs[0])};")
    code(f"b.out = {context.image(op.output)};")
    for name, grid in zip(("row", "column"), axes, strict=True):
        code(f"b.{name} = (struct Grid){grid};")
    code(f"b.factor = {context.constant(factor, 'float', 'factor')};")
    code(f"b.zero_in = {context.number(graph.types[op.inputs[0]].qparams.zero, 'int32_t', 'zero_in')};")
    code(f"b.limits = {context.limits(op)};")
    code("upsample_linear(&b, thread, threads);")
    fill_result_halo(code, context, op.output, context.limits(op))


def _pairs(index: np.ndarray, weight: np.ndarray, context: Context) -> str:
    """Return the `struct Grid` of tables with pairs of indices and weights."""
    return f"{{{context.constant(index, 'int32_t', 'index')}, {context.constant(weight, 'float', 'weight')}}}"


def _grids(op: Op, context: Context) -> list[str]:
    """Return a `struct Grid` for every axis, whose entries are computed at run time from dynamic sizes.

    The step, 1 / scale factor, is rounded to float32 as in `ops.resize`.
    """
    images, align = int(len(op.attrs["sizes"]) == 2), int(op.attrs["align"])
    found = []
    for size, result, scale in zip(op.attrs["sizes"], op.attrs["results"], op.attrs["scales"], strict=True):
        sizes = f"{context.dim(size)}, {context.dim(result)}"
        step = "0" if scale is None else context.number(1 / scale, "float", "step")
        found.append(f"{{0, 0, {sizes}, {step}, {images}, {align}}}")
    return found


def emit_pool_f32(code: Code, partition: Partition, context: Context) -> None:
    """Print the maxima or averages of windows."""
    op, types = partition.anchor, context.graph.types
    sizes, results = types[op.inputs[0]].shape[2:], types[op.output].shape[2:]
    _begin(code, "FloatPool", partition, context)
    code(f"p.divisor = {op.attrs.get('divisor') or 0}, p.maximum = {int('dilation' in op.attrs)};")
    for place in range(IMAGE_AXES):
        axis = place - (IMAGE_AXES - len(sizes))
        row: Sequence[Dim] = (1, 1, 1, 1, 0, 1, 0, 0)
        if axis >= 0:
            given = [op.attrs.get(key, (1,) * len(sizes))[axis] for key in ("kernel", "stride", "dilation")]
            padding = op.attrs.get("padding", (0,) * len(sizes))[axis]
            flags = int(op.attrs.get("include_pad", False)), int("size" in op.attrs)
            row = (sizes[axis], results[axis], *given[:2], padding, given[2], *flags)
        code(f"p.axes[{place}] = (struct FloatPoolAxis){{{', '.join(map(context.dim, row))}}};")
    code("pool_f32(&p, thread, threads);")


def emit_resize_f32(code: Code, partition: Partition, context: Context) -> None:
    """Print a resized image."""
    op = partition.anchor
    context.include("images/float_resize.h")
    _begin(code, "FloatResize", partition, context)
    found = _grids(op, context)
    code(f"p.mode = RESIZE_{op.attrs['mode'].upper()}, p.count = {len(found)};")
    alone = "{0, 0, 1, 1, 0, 0, 0}"
    for place, grid in enumerate([alone] * (IMAGE_AXES - len(found)) + found):
        code(f"p.axes[{place}] = (struct Grid){grid};")
    code("resize_f32(&p, thread, threads);")


def emit_grid_sample(code: Code, partition: Partition, context: Context) -> None:
    """Print the bilinear interpolation at the places of a grid."""
    op, types = partition.anchor, context.graph.types
    _begin(code, "GridSample", partition, context)
    start, strides = context.strided(op.inputs[1])
    code(f"p.grid = (const float*){start};")
    pairs = {
        "grid_stride": strides,
        "size": types[op.inputs[0]].shape[2:],
        "result": types[op.output].shape[2:],
    }
    for field, values in pairs.items():
        for place, value in enumerate(values):
            code(f"p.{field}[{place}] = {context.dim(value)};")
    code(f"p.border = {int(op.attrs['border'])}, p.align = {int(op.attrs['align'])};")
    code("grid_sample(&p, thread, threads);")


def _begin(code: Code, name: str, partition: Partition, context: Context) -> None:
    """Print the declaration of the struct `name` as ``p``, with images and their sizes."""
    op = partition.anchor
    context.include("images/float_images.h")
    images, channels = context.graph.types[op.output].shape[:2]
    code(f"struct {name} p = {{}};")
    code(f"p.in = {_image(op.inputs[0], context)};")
    code(f"p.out = {_image(op.output, context)};")
    code(f"p.images = {context.dim(images)}, p.channels = {context.dim(channels)};")


def _image(value: str, context: Context) -> str:
    """Return the `struct FloatImage` of a value."""
    start, (image, channel, *axes) = context.strided(value)
    padded = [0] * (IMAGE_AXES - len(axes)) + [*axes]
    outer = ", ".join(map(context.dim, (image, channel)))
    return f"(struct FloatImage){{(float*){start}, {outer}, {{{', '.join(map(context.dim, padded))}}}}}"
