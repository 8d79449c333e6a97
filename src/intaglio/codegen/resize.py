"""Steps that upsample: tables of what to read, and with what weights."""

from __future__ import annotations

import numpy as np

from intaglio.codegen.context import Context, finish
from intaglio.codegen.writer import Code
from intaglio.ir import Partition

STAY = np.zeros(1, np.int32)
"""The only row of a line, the only depth of an image."""


def emit_nearest(code: Code, partition: Partition, context: Context) -> None:
    """Indices of depths, rows and columns; a line has one row, and all but volumes one depth."""
    op, graph = partition.anchor, context.graph
    found = [graph.constants[name] for name in op.inputs[1:]]
    names = ("depth", "row", "column")
    for name, index in zip(names, [STAY] * (3 - len(found)) + found, strict=True):
        code(f"const int32_t* {name} = {context.constant(index, 'int32_t')};")
    code(f"const struct Image in = {context.image(op.inputs[0])};")
    code(f"const struct Image out = {context.image(op.output)};")
    shapes = graph.types[op.inputs[0]].shape, graph.types[op.output].shape
    depths = ", ".join(context.dim(shape[2]) if len(shape) == 5 else "1" for shape in shapes)
    code(f"upsample_nearest(&in, &out, {depths}, depth, row, column, thread, threads);")
    finish(code, context, op.output, context.limits(op))


def emit_linear(code: Code, partition: Partition, context: Context) -> None:
    """Pairs of rows and columns and their weights; a line is a mean of one row."""
    op, graph = partition.anchor, context.graph
    *found, factor = (graph.constants[name] for name in op.inputs[1:])
    if len(found) == 2:
        found = [np.zeros((1, 2), np.int32), np.array([[1, 0]], np.float32), *found]
    code("struct Blend b = {};")
    code(f"b.in = {context.image(op.inputs[0])};")
    code(f"b.out = {context.image(op.output)};")
    for name, table, kind in zip(("row", "row_weight", "column", "column_weight"), found, ("int32_t", "float") * 2,
                                 strict=True):  # fmt: skip
        code(f"b.{name} = {context.constant(table, kind)};")
    code(f"b.factor = {context.constant(factor, 'float')};")
    zero = np.array([graph.types[op.inputs[0]].levels.zero], np.int32)
    code(f"b.zero_in = *{context.constant(zero, 'int32_t')};")
    code(f"b.limits = {context.limits(op)};")
    code("upsample_linear(&b, thread, threads);")
    finish(code, context, op.output, context.limits(op))
