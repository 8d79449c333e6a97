"""Print embedding bags and integer ranges."""

from __future__ import annotations

from intaglio.codegen.context import Context
from intaglio.codegen.writer import Code
from intaglio.ir import DType
from intaglio.plan.plan_records import Partition

BAG_MODES = {"sum": "BAG_SUM", "mean": "BAG_MEAN", "max": "BAG_MAX"}


def emit_embedding_bag(code: Code, partition: Partition, context: Context) -> None:
    """Print an embedding bag: fill a `struct Bags`; threads divide the bags."""
    op, types = partition.anchor, context.graph.types
    table, ids, offsets, *rest = op.inputs
    pointer = {name: context.strided(name)[0] for name in (*op.inputs, op.output)}
    rows, width = types[table].shape
    context.include("sequences/tables.h")
    code("struct Bags b = {};")
    code(f"b.table = (const uint8_t*){pointer[table]}, b.rows = {rows}, b.width = {width};")
    code(f"b.ids = (const int64_t*){pointer[ids]}, b.count = {context.dim(types[ids].shape[0])};")
    code(f"b.offsets = (const int64_t*){pointer[offsets]}, b.bags = {context.dim(types[op.output].shape[0])};")
    if types[table].dtype is DType.U8:
        scales, zeros = (f"(const float*){pointer[rest.pop(0)]}" for _ in range(2))
        code(f"b.scales = {scales}, b.zero_points = {zeros};")
    if op.attrs["weighted"]:
        code(f"b.weights = (const float*){pointer[rest.pop(0)]};")
    code(
        f"b.ends = {int(op.attrs['ends'])}, b.mode = {BAG_MODES[op.attrs['mode']]}, b.padding = {op.attrs['padding']};"
    )
    stride = context.strided(op.output)[1][0]
    code(f"b.out = (float*){pointer[op.output]}, b.stride = {context.dim(stride)};")
    code("embedding_bags(&b, r->outside, thread, threads);")


def emit_arange(code: Code, partition: Partition, context: Context) -> None:
    """Print an i64 range. Threads divide its elements."""
    op = partition.anchor
    start, step, size = (context.dim(op.attrs[name]) for name in ("start", "step", "size"))
    code(f"int64_t* const y = (int64_t*){context.strided(op.output)[0]};")
    with code.block(
        f"for (int64_t i = shard_begin({size}, thread, threads); i < shard_begin({size}, thread + 1, threads); ++i)"
    ):
        code(f"y[i] = {start} + i * {step};")
