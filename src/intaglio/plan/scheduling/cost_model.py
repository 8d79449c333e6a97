"""Cost of a step as an expression over free sizes; the runtime derives the number of threads of a segment from it."""

from __future__ import annotations

from intaglio.ir import Cost, Dim, Graph, Op, Schedule, numel
from intaglio.ops import op_def
from intaglio.ops.products.scratch_memory import QUERY_BLOCK
from intaglio.plan.buffers import nhwc_sizes
from intaglio.plan.execution_plan import Plan
from intaglio.plan.plan_records import Step
from intaglio.plan.scheduling.convolution_pieces import weight_shape, weights_of

F32_PANEL = 64
"""Output channels of a packed panel of float weights; ``PANEL_F32`` of native/layers/linear_f32.h."""
F32_BLOCK = 48
"""Rows that a thread takes at a time; ``BLOCK`` of native/layers/linear_f32.h."""


def cost_of(step: Step, plan: Plan) -> Cost:
    """Return the cost of a step: multiply-accumulates, units that threads can divide, bytes of activations."""
    partition, graph = step.partition, plan.graph
    read = [name for name in partition.reads() if name not in graph.constants]
    moved: Dim = 0
    for kind in (graph.types[name] for name in (*read, *partition.ops[-1].outputs)):
        moved = moved + numel(kind.shape) * kind.dtype.bytes
    anchor, (first, *_) = partition.anchor, partition.anchor.outputs
    record = op_def(anchor)
    if record.macs is None:
        images, lines, _, _ = nhwc_sizes(graph.types[partition.output].shape, partition.output in plan.row_major)
        return Cost(0, images * lines, moved, step.barrier_group, step.segment)
    macs = record.macs(anchor.attrs, [graph.types[name].shape for name in anchor.inputs], graph.types[first].shape)
    if record.multiplies_weight:
        units = _tiles(anchor, graph, plan.schedules[partition.output])
    elif record.multiplies_activations:
        units = _query_blocks(anchor, graph)
    elif record.recurrent:
        units = _recurrent_panels(anchor, plan)
    else:
        units = _float_blocks(anchor, graph)
        kind = graph.types[anchor.inputs[1]]
        moved = moved + numel(kind.shape) * kind.dtype.bytes  # with few rows, reading the weights dominates
    return Cost(macs, units, moved, step.barrier_group, step.segment)


def _recurrent_panels(op: Op, plan: Plan) -> Dim:
    """Return the number of panels of the product in one time step of a recurrent layer."""
    shape, constants = plan.graph.types[op.inputs[0]].shape, plan.graph.constants
    outputs = next(len(constants[name]) for name in op.inputs if name in constants and constants[name].ndim == 2)
    batch = shape[0] if op.attrs["cell"] or op.attrs["batch_first"] else shape[1]
    return batch * (op.attrs["directions"] * -(-outputs // (16 * max(plan.max_tile_rows()))))


def _tiles(op: Op, graph: Graph, schedule: Schedule) -> Dim:
    """Return the number of tiles of all panels; a transposed convolution tiles its input, all others their result."""
    record, outputs = op_def(op), weight_shape(op, graph)[0] // weights_of(op, graph)
    shape = graph.types[op.inputs[0] if record.transposed else op.output].shape
    pixels = numel((shape[0], *shape[2:]) if record.convolves else shape[:-1])
    tiles = (pixels + (schedule.tile_rows - 1)) // schedule.tile_rows
    return tiles * -(-outputs // (16 * schedule.tile_columns))


def _float_blocks(op: Op, graph: Graph) -> Dim:
    """Return the number of blocks of rows of all panels of float weights."""
    rows = numel(graph.types[op.output].shape[:-1])
    return (rows + (F32_BLOCK - 1)) // F32_BLOCK * -(-weight_shape(op, graph)[0] // F32_PANEL)


def _query_blocks(op: Op, graph: Graph) -> Dim:
    """Return the number of blocks of rows of the first operand that threads can divide."""
    rows, outer = graph.types[op.inputs[0]].shape[-2], graph.types[op.output].shape[:-2]
    return numel(outer) * ((rows + (QUERY_BLOCK - 1)) // QUERY_BLOCK)
