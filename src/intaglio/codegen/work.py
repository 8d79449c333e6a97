"""What a step has to do, over the free sizes; the runtime decides by it how many threads run a stretch."""

from __future__ import annotations

from intaglio.codegen.context import Context
from intaglio.codegen.emit_linear_f32 import BLOCK, PANEL
from intaglio.codegen.emit_recurrent import RECURRENT
from intaglio.ir import Dim, Op, Partition, Step, Work, lies, numel
from intaglio.ir.scratch import QUERIES
from intaglio.ir.verify import PRODUCTS


def work_of(step: Step, context: Context) -> Work:
    partition, types = step.partition, context.graph.types
    read = [name for name in partition.reads() if name not in context.graph.constants]
    moved: Dim = 0
    for kind in (types[name] for name in (*read, *partition.ops[-1].outputs)):
        moved = moved + numel(kind.shape) * kind.dtype.bytes
    if partition.anchor.kind in PRODUCTS:
        return Work(*_product(partition, context), moved, step.phase, step.segment)
    if partition.anchor.kind in ("attention", "bmm"):
        return Work(*_pairs(partition, context), moved, step.phase, step.segment)
    if partition.anchor.kind in RECURRENT:
        return Work(*_steps(partition.anchor, context), moved, step.phase, step.segment)
    if partition.anchor.kind == "linear_f32":
        return Work(*_float_product(partition.anchor, context, moved), step.phase, step.segment)
    value = partition.ops[-1].outputs[0]
    images, lines, _, _ = lies(types[value].shape, value in context.plan.rows)
    return Work(0, images * lines, moved, step.phase, step.segment)


def _steps(op: Op, context: Context) -> tuple[Dim, Dim]:
    """Multiply-accumulates of an LSTM or GRU, and panels of one step's product."""
    shape, constants = context.graph.types[op.inputs[0]].shape, context.graph.constants
    weights = [constants[name] for name in op.inputs if name in constants and constants[name].ndim == 2]
    batch = shape[0] if op.attrs["cell"] or op.attrs["batch_first"] else shape[1]
    panels = -(-weights[0].shape[0] // (16 * context.isa.blocks))
    return numel(shape[:-1]) * sum(weight.size for weight in weights), batch * (op.attrs["directions"] * panels)


def _product(partition: Partition, context: Context) -> tuple[Dim, Dim]:
    """Multiply-accumulates, and tiles of all panels. Every pixel meets every weight: of the input where that is spread,
    else of the result."""
    anchor, schedule = partition.anchor, context.schedules[partition.output]
    weight = context.graph.constants[anchor.inputs[1]]
    spread = anchor.kind.startswith("conv_transpose")
    shape = context.graph.types[anchor.inputs[0] if spread else anchor.output].shape
    pixels = numel(shape[:-1] if anchor.kind == "linear" else (shape[0], *shape[2:]))
    tiles = (pixels + (schedule.tile_rows - 1)) // schedule.tile_rows
    return pixels * weight.size, tiles * -(-weight.shape[0] // (16 * schedule.tile_columns))


def _float_product(op: Op, context: Context, moved: Dim) -> tuple[Dim, Dim, Dim]:
    """Multiply-accumulates, blocks of rows of all panels, and bytes with those of weights, which of few rows are what
    takes the time."""
    weight = context.graph.constants[op.inputs[1]]
    rows = numel(context.graph.types[op.output].shape[:-1])
    blocks = (rows + (BLOCK - 1)) // BLOCK
    return rows * weight.size, blocks * -(-len(weight) // PANEL), moved + weight.nbytes


def _pairs(partition: Partition, context: Context) -> tuple[Dim, Dim]:
    """Multiply-accumulates of two activations, and blocks of rows that threads divide. What a causal mask excludes is
    counted."""
    anchor, types = partition.anchor, context.graph.types
    rows, depth = types[anchor.inputs[0]].shape[-2:]
    *outer, _, width = types[anchor.output].shape
    inner = depth * width
    if anchor.kind == "attention":
        inner = types[anchor.inputs[1]].shape[-2] * (depth + width)
    blocks = numel(tuple(outer)) * ((rows + (QUERIES - 1)) // QUERIES)
    return numel(tuple(outer)) * rows * inner, blocks
