"""Print upsampling steps: index and weight tables, or the sizes that determine them at run time."""

from __future__ import annotations

import numpy as np

from intaglio.codegen.context import Context, fill_result_halo
from intaglio.codegen.writer import Code
from intaglio.ir import Op
from intaglio.plan.plan_records import Partition

STAY = np.zeros(1, np.int32)
"""Index table of an axis with a single element."""


def emit_nearest(code: Code, partition: Partition, context: Context) -> None:
    """Print a nearest upsampling. 1-D inputs are images with one row, and inputs other than volumes have depth 1."""
    op, graph = partition.anchor, context.graph
    if "results" in op.attrs:
        found = grids(op, context)
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
        axes = grids(op, context)
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


def grids(op: Op, context: Context) -> list[str]:
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
