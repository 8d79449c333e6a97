"""Print pooling, resizing and sampling of images of floats."""

from __future__ import annotations

from collections.abc import Sequence

from intaglio.codegen.context import Context
from intaglio.codegen.emitters.emit_resize import grids
from intaglio.codegen.writer import Code
from intaglio.ir import Dim
from intaglio.plan.plan_records import Partition

AXES = 3
"""Axes of an image in C; ``FLOAT_AXES`` of native/images/float_images.h."""


def emit_pool_f32(code: Code, partition: Partition, context: Context) -> None:
    """Print the maxima or averages of windows."""
    op, types = partition.anchor, context.graph.types
    sizes, results = types[op.inputs[0]].shape[2:], types[op.output].shape[2:]
    _begin(code, "FloatPool", partition, context)
    code(f"p.divisor = {op.attrs.get('divisor') or 0}, p.maximum = {int('dilation' in op.attrs)};")
    for place in range(AXES):
        axis = place - (AXES - len(sizes))
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
    _begin(code, "FloatResize", partition, context)
    found = grids(op, context)
    code(f"p.mode = RESIZE_{op.attrs['mode'].upper()}, p.count = {len(found)};")
    alone = "{0, 0, 1, 1, 0, 0, 0}"
    for place, grid in enumerate([alone] * (AXES - len(found)) + found):
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
    padded = [0] * (AXES - len(axes)) + [*axes]
    outer = ", ".join(map(context.dim, (image, channel)))
    return f"(struct FloatImage){{(float*){start}, {outer}, {{{', '.join(map(context.dim, padded))}}}}}"
