"""Print steps that multiply two activations: attention, and batched GEMMs with their tails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from intaglio.codegen.context import Context
from intaglio.codegen.emitters.emit_loops import epilogue, fill_frames
from intaglio.codegen.emitters.loop_variables import zero_point
from intaglio.codegen.writer import Code
from intaglio.ir import Dim
from intaglio.ops import op_def
from intaglio.ops.products.attention import result_factors
from intaglio.ops.products.scratch_memory import CACHE_LINE, MAX_SCRATCH_THREADS
from intaglio.plan.buffers import caller_strides
from intaglio.plan.kernel_records import ActivationTiles
from intaglio.plan.plan_records import Partition

HEAD_AXES = 4
"""Number of axes of a mask in `struct Attention`; missing leading axes have size 1."""


def emit_attention(code: Code, partition: Partition, context: Context) -> None:
    """Print an attention step: fill a `struct Attention` and run it."""
    op, types = partition.anchor, context.graph.types
    tiles = context.kernel(partition, ActivationTiles)
    q, k, v = (types[name].shape for name in op.inputs[:3])
    (batch, heads, queries, depth), groups, keys, width = q, k[1], k[2], v[3]
    context.include("sequences/attention.h")
    code("struct Attention a = {};")
    for field, value in (("q", op.inputs[0]), ("out", op.output)):
        code(f"a.{field} = {_heads(value, context)};")
    for field, value in zip(("k", "v"), op.inputs[1:3], strict=True):
        code(f"a.{field} = {_keys_or_values(value, context)};")
    if op.inputs[3:]:
        _mask(code, op.inputs[3], context)
    code(f"a.batch = {context.dim(batch)}, a.heads = {heads}, a.shared = {_number(heads) // _number(groups)};")
    code(f"a.queries = {context.dim(queries)}, a.keys = {context.dim(keys)}, a.depth = {depth}, a.width = {width};")
    code(f"a.causal = {int(op.attrs['causal'])}, a.zero_q = {zero_point(types[op.inputs[0]].qparams)};")
    factors = result_factors(op, [types[name] for name in op.inputs[:3]], types[op.output])
    for field, factor in zip(("factor", "ratio"), factors, strict=True):
        code(f"a.{field} = {context.number(factor, 'float', field)};")
    if types[op.output].q is not None:
        code(f"a.limits = {context.limits(op)};")
    _kernels(code, "a", tiles, context)
    _scratch(code, "a", partition.output, context)
    code("a.shares = r->shares;")
    code("attention(&a, thread, threads);")


def emit_bmm(code: Code, partition: Partition, context: Context) -> None:
    """Print a batched GEMM: fill a `struct Product` and run it.

    Its tail is a requantize, optionally followed by a lookup table, or a dequantize; an epilogue can follow either.
    """
    (a, b), tail, types = partition.anchor.inputs, partition.tail[0], context.graph.types
    shape, inner = types[partition.anchor.output].shape, types[a].shape[-1]
    tiles = context.kernel(partition, ActivationTiles)
    missing: list[Dim] = [1] * (HEAD_AXES - len(shape))
    batch, heads, rows, columns = [*missing, *shape]
    base, (b_batch, b_head, depth_stride, column_stride) = _broadcast(b, context)
    context.include("products/product.h")
    code("struct Product p = {};")
    code(f"p.a = {_heads(a, context)};")
    if partition.epilogue is None:
        code(f"p.out = {_heads(partition.output, context)};")
    else:
        code(f"p.epilogue = {epilogue(partition, context, 16 * tiles.tile.blocks)};")
    code(f"p.b = {base}, p.b_batch = {b_batch}, p.b_head = {b_head};")
    code(f"p.depth_stride = {depth_stride}, p.column_stride = {column_stride};")
    code(f"p.batch = {context.dim(batch)}, p.heads = {context.dim(heads)}, p.rows = {context.dim(rows)};")
    code(f"p.depth = {context.dim(inner)}, p.columns = {context.dim(columns)}, p.zero_a = {types[a].qparams.zero};")
    if op_def(tail).dequantizes:
        factor = np.array(types[partition.anchor.output].qparams.scales, np.float64).astype(np.float32)
    else:
        factor = context.graph.constants[tail.inputs[1]]
        code(f"p.limits = {context.limits(tail)};")
    code(f"p.factor = *{context.constant(factor, 'float', 'factor')};")
    if partition.lut is not None:
        table = context.graph.constants[partition.lut.inputs[1]]
        code(f"p.table = {context.result_table(table)};")
    _kernels(code, "p", tiles, context)
    _scratch(code, "p", partition.output, context)
    code("p.shares = r->shares;")
    code("product(&p, thread, threads);")
    if partition.epilogue is not None:
        fill_frames(code, partition.epilogue, context)


def _number(dim: Dim) -> int:
    if not isinstance(dim, int):
        raise ValueError(f"attention needs a depth of fixed size, but got the dynamic dimension {dim}")
    return dim


def _broadcast(value: str, context: Context) -> tuple[str, list[str]]:
    """Return C expressions for the first element and for the byte strides along four axes.

    The stride of a broadcast axis is 0.
    """
    base, steps = context.strided(value)
    kind = context.graph.types[value]
    sizes = zip(kind.shape, steps, strict=True)
    found = [_step(size, context.dim(step * kind.dtype.bytes), context) for size, step in sizes]
    return base, ["0"] * (HEAD_AXES - len(found)) + found


def _step(size: Dim, step: str, context: Context) -> str:
    """Return the stride of an axis in C, which is 0 if a dynamic size turns out to be 1."""
    if isinstance(size, int):
        return "0" if size == 1 else step
    return f"({context.dim(size)} == 1 ? 0 : {step})"


def _heads(value: str, context: Context) -> str:
    """Return the `struct Heads` of a value whose last axis is contiguous."""
    base, (batch, head, row, _) = _broadcast(value, context)
    return f"(struct Heads){{{base}, {batch}, {head}, {row}}}"


def _keys_or_values(value: str, context: Context) -> str:
    """Return the `struct Heads` of keys or values, which may be in the memory of a tensor of the caller."""
    dense, root = _heads(value, context), context.plan.growing.get(value)
    if root is None:
        return dense
    batch, head, row, _ = caller_strides(root, context.graph.types[value].shape)
    steps = ", ".join(context.dim(step * context.graph.types[value].dtype.bytes) for step in (batch, head, row))
    return f"{context.grows(value)} ? (struct Heads){{{context.external(root)}, {steps}}} : {dense}"


def _mask(code: Code, value: str, context: Context) -> None:
    """Print the fields of an attention mask, which is a tensor of the caller, a value of the program or a constant."""
    kind = context.graph.types[value]
    if value in context.graph.constants:
        array = np.ascontiguousarray(context.graph.constants[value])
        strides = [str(step) if size > 1 else "0" for size, step in zip(array.shape, array.strides, strict=True)]
        base, strides = context.constant(array, "uint8_t", "mask"), ["0"] * (HEAD_AXES - array.ndim) + strides
    else:
        base, strides = _broadcast(value, context)
    code(f"a.mask = {base}, a.mask_bytes = {kind.dtype.bytes};")
    for axis, step in enumerate(strides):
        code(f"a.mask_stride[{axis}] = {step};")


def _kernels(code: Code, name: str, tiles: ActivationTiles, context: Context) -> None:
    """Print the table of kernels with float results, indexed by the width in blocks of 16 columns."""
    most, rows = tiles.tile.blocks, tiles.tile.rows
    specs = [replace(tiles.tile, blocks=blocks) for blocks in range(1, most + 1)]
    tables = ["0", *(context.tiles(spec) if spec.blocks in tiles.widths else "0" for spec in specs)]
    code(f"static const TileKernel* const kernels[] = {{{', '.join(tables)}}};")
    code(f"{name}.kernels = (struct FloatKernels){{kernels, {most}, {rows}}};")


def _scratch(code: Code, name: str, value: str, context: Context) -> None:
    """Print the fields for the scratch memory of the threads."""
    scratch = f"{value}.scratch"
    _, lines, _ = context.plan.buffers[scratch].shape
    code(f"{name}.scratch = r->arena + r->offsets[{context.index[scratch]}];")
    code(f"{name}.scratch_bytes = {context.dim(lines * CACHE_LINE)}, {name}.sharers = {MAX_SCRATCH_THREADS};")
