"""What a step has to do, over the free sizes; the runtime decides by it how many threads run a stretch."""

from __future__ import annotations

from intaglio.ir import Dim, Graph, Op, Schedule, Work, numel
from intaglio.ir.verify import PRODUCTS
from intaglio.ops.products.lstm_gru import RECURRENT
from intaglio.plan.buffers import lies
from intaglio.plan.execution_plan import Plan
from intaglio.plan.plan_records import Partition, Step
from intaglio.plan.scratch_memory import QUERIES

F32_PANEL = 64
"""Output channels of a packed panel of float weights; ``PANEL_F32`` of native/linear_f32.h."""
F32_BLOCK = 48
"""Rows that a thread takes at a time; ``BLOCK`` of native/linear_f32.h."""


def work_of(step: Step, plan: Plan) -> Work:
    """Return what a step has to do: multiply-accumulates, units that threads divide, bytes of activations."""
    partition, graph = step.partition, plan.graph
    read = [name for name in partition.reads() if name not in graph.constants]
    moved: Dim = 0
    for kind in (graph.types[name] for name in (*read, *partition.ops[-1].outputs)):
        moved = moved + numel(kind.shape) * kind.dtype.bytes
    if partition.anchor.kind in PRODUCTS:
        return Work(*_product(partition, graph, plan.schedules[partition.output]), moved, step.phase, step.segment)
    if partition.anchor.kind in ("attention", "bmm"):
        return Work(*_pairs(partition, graph), moved, step.phase, step.segment)
    if partition.anchor.kind in RECURRENT:
        return Work(*_recurrent(partition.anchor, plan), moved, step.phase, step.segment)
    if partition.anchor.kind == "linear_f32":
        return Work(*_float_product(partition.anchor, graph, moved), step.phase, step.segment)
    value = partition.ops[-1].outputs[0]
    images, lines, _, _ = lies(graph.types[value].shape, value in plan.rows)
    return Work(0, images * lines, moved, step.phase, step.segment)


def _recurrent(op: Op, plan: Plan) -> tuple[Dim, Dim]:
    """Return multiply-accumulates of an LSTM or GRU, and panels of one time step's product."""
    shape, constants, blocks = plan.graph.types[op.inputs[0]].shape, plan.graph.constants, max(plan.tallest())
    weights = [constants[name] for name in op.inputs if name in constants and constants[name].ndim == 2]
    batch = shape[0] if op.attrs["cell"] or op.attrs["batch_first"] else shape[1]
    panels = -(-weights[0].shape[0] // (16 * blocks))
    return numel(shape[:-1]) * sum(weight.size for weight in weights), batch * (op.attrs["directions"] * panels)


def _product(partition: Partition, graph: Graph, schedule: Schedule) -> tuple[Dim, Dim]:
    """Return multiply-accumulates, and tiles of all panels.

    Every pixel meets every weight: of the input where a transposed convolution spreads it, else of the result.
    """
    anchor, weight = partition.anchor, graph.constants[partition.anchor.inputs[1]]
    spread = anchor.kind.startswith("conv_transpose")
    shape = graph.types[anchor.inputs[0] if spread else anchor.output].shape
    pixels = numel(shape[:-1] if anchor.kind == "linear" else (shape[0], *shape[2:]))
    tiles = (pixels + (schedule.tile_rows - 1)) // schedule.tile_rows
    return pixels * weight.size, tiles * -(-weight.shape[0] // (16 * schedule.tile_columns))


def _float_product(op: Op, graph: Graph, moved: Dim) -> tuple[Dim, Dim, Dim]:
    """Return multiply-accumulates, blocks of rows of all panels, and ``moved`` with the bytes of the weights.

    For few rows, reading the weights is what takes the time.
    """
    weight = graph.constants[op.inputs[1]]
    rows = numel(graph.types[op.output].shape[:-1])
    blocks = (rows + (F32_BLOCK - 1)) // F32_BLOCK
    return rows * weight.size, blocks * -(-len(weight) // F32_PANEL), moved + weight.nbytes


def _pairs(partition: Partition, graph: Graph) -> tuple[Dim, Dim]:
    """Return multiply-accumulates of two activations, and blocks of rows that threads divide.

    What a causal mask excludes is counted.
    """
    anchor, types = partition.anchor, graph.types
    rows, depth = types[anchor.inputs[0]].shape[-2:]
    *outer, _, width = types[anchor.output].shape
    inner = depth * width
    if anchor.kind == "attention":
        inner = types[anchor.inputs[1]].shape[-2] * (depth + width)
    blocks = numel(tuple(outer)) * ((rows + (QUERIES - 1)) // QUERIES)
    return numel(tuple(outer)) * rows * inner, blocks
