"""Steps that upsample: tables of what to read, and with what weights."""

from __future__ import annotations

import numpy as np

from intaglio.codegen.context import Context, finish
from intaglio.codegen.writer import Code
from intaglio.ir import Op
from intaglio.plan.plan_records import Partition

STAY = np.zeros(1, np.int32)
"""The only row of a line, the only depth of an image."""


def emit_nearest(code: Code, partition: Partition, context: Context) -> None:
    """Where depths, rows and columns lie; a line has one row, and all but volumes one depth."""
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
    finish(code, context, op.output, context.limits(op))


def emit_linear(code: Code, partition: Partition, context: Context) -> None:
    """Pairs of rows and columns and their weights; a line is a mean of one row."""
    op, graph = partition.anchor, context.graph
    *found, factor = (graph.constants[name] for name in op.inputs[1:])
    if "results" in op.attrs:
        grids = _grids(op, context)
    else:
        grids = [_pairs(index, weight, context) for index, weight in zip(found[::2], found[1::2], strict=True)]
    if len(grids) == 1:
        grids.insert(0, _pairs(np.zeros((1, 2), np.int32), np.array([[1, 0]], np.float32), context))
    context.include("images/resize.h")
    code("struct Blend b = {};")
    code(f"b.in = {context.image(op.inputs[0])};")
    code(f"b.out = {context.image(op.output)};")
    for name, grid in zip(("row", "column"), grids, strict=True):
        code(f"b.{name} = (struct Grid){grid};")
    code(f"b.factor = {context.constant(factor, 'float', 'factor')};")
    code(f"b.zero_in = {context.number(graph.types[op.inputs[0]].levels.zero, 'int32_t', 'zero_in')};")
    code(f"b.limits = {context.limits(op)};")
    code("upsample_linear(&b, thread, threads);")
    finish(code, context, op.output, context.limits(op))


def _pairs(index: np.ndarray, weight: np.ndarray, context: Context) -> str:
    """``struct Grid`` of tables of pairs."""
    return f"{{{context.constant(index, 'int32_t', 'index')}, {context.constant(weight, 'float', 'weight')}}}"


def _grids(op: Op, context: Context) -> list[str]:
    """``struct Grid`` without tables, for every axis; the factor's step is rounded as `ops.resize` rounds it."""
    images, align = int(len(op.attrs["sizes"]) == 2), int(op.attrs["align"])
    found = []
    for size, result, scale in zip(op.attrs["sizes"], op.attrs["results"], op.attrs["scales"], strict=True):
        sizes = f"{context.dim(size)}, {context.dim(result)}"
        step = "0" if scale is None else context.number(1 / scale, "float", "step")
        found.append(f"{{0, 0, {sizes}, {step}, {images}, {align}}}")
    return found
