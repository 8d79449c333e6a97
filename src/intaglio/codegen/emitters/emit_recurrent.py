"""Print the steps of LSTM, GRU and plain RNN: a `struct Recurrent`, with two GEMMs for every layer and direction."""

from __future__ import annotations

import numpy as np

from intaglio import numerics
from intaglio.codegen.context import Context
from intaglio.codegen.weight_packing import pack_columns, pack_weights, packing
from intaglio.codegen.writer import Code
from intaglio.ir import Op, Schedule
from intaglio.kernels import TileSpec
from intaglio.ops.products.recurrent import PER_DIRECTION
from intaglio.plan.kernel_records import RecurrentTiles
from intaglio.plan.plan_records import Partition


def emit_recurrent(code: Code, partition: Partition, context: Context) -> None:
    """Print a recurrent layer: fill a `struct Recurrent` and run it."""
    op, types = partition.anchor, context.graph.types
    attrs, x, rows = op.attrs, op.inputs[0], op.attrs["rows"]
    places = attrs["layers"] * attrs["directions"]
    first, given = 1 + rows, op.inputs[1 + rows + PER_DIRECTION * places :]
    _products(code, op, first, context.kernel(partition, RecurrentTiles).schedule, context)
    shape = types[x].shape
    steps, batch = (1, shape[0]) if attrs["cell"] else shape[:2]
    if attrs["batch_first"]:
        steps, batch = batch, steps
    row_t, row_b = (1, steps) if attrs["batch_first"] else (batch, 1)
    gates, hidden = types[op.inputs[first + 1]].shape
    context.include("sequences/recurrent.h", "sequences/rows.h")
    code("struct Recurrent q = {};")
    code(f"q.kind = RECURRENT_{op.kind.upper()}, q.gates = {gates};")
    code(f"q.layers = {attrs['layers']}, q.directions = {attrs['directions']};")
    code(f"q.steps = {context.dim(steps)}, q.batch = {context.dim(batch)};")
    code(f"q.inputs = {shape[-1]}, q.hidden = {hidden};")
    code(f"q.row_t = {context.dim(row_t)}, q.row_b = {context.dim(row_b)};")
    code(f"q.x = (uint8_t*){context.strided(x)[0]}, q.of_x = of_x, q.of_h = of_h;")
    if rows:
        code(f"q.x_scales = (const float*){context.strided(op.inputs[1])[0]};")
    else:
        scale = np.array([types[x].qparams.step], np.float32)
        code(f"q.x_scales = {context.constant(scale, 'float', 'x_scale')}, q.x_alike = 1;")
    results = list(op.outputs)
    if not attrs["cell"]:
        code(f"q.y = (float*){context.strided(results.pop(0))[0]};")
    for names, suffix in ((given, "0"), (results, "n")):
        for name, part in zip(names, ("hidden", "cell"), strict=False):
            code(f"q.{part}_{suffix} = {_states(name, attrs['cell'], context)};")
    scratch = context.index[f"{partition.output}.scratch"]
    code(f"q.scratch = r->arena + r->offsets[{scratch}];")
    code("recurrent(&q, r->barrier, thread, threads);")


def _states(name: str, cell: bool, context: Context) -> str:
    """Return the `struct States` of a state tensor with any strides. The state of a cell has no layer axis."""
    base, dense = context.strided(name)
    if name in context.plan.external and context.is_program_input(name):
        start = 5 * context.plan.external.index(name)
        steps = [f"r->strides[{start + axis}]" for axis in range(len(dense))]
    else:
        steps = [context.dim(step) for step in dense]
    return f"(struct States){{(float*){base}, {', '.join(['0'] * cell + steps)}}}"


def _products(code: Code, op: Op, first: int, schedule: Schedule, context: Context) -> None:
    """Print the `struct Matmul` arrays for inputs and hidden states, without images and per-token scales."""
    places = op.attrs["layers"] * op.attrs["directions"]
    arrays = [context.graph.constants[name] for name in op.inputs[first : first + PER_DIRECTION * places]]
    zero = context.graph.types[op.inputs[0]].qparams.zero
    code(f"struct Matmul of_x[{places}] = {{}}, of_h[{places}] = {{}};")
    for place in range(places):
        w_x, w_h, columns_x, columns_h, bias_x, bias_h = arrays[PER_DIRECTION * place : PER_DIRECTION * (place + 1)]
        zero_x = zero if place < op.attrs["directions"] else numerics.ROW_ZERO
        _product(code, f"of_x[{place}]", w_x, zero_x, columns_x, bias_x, schedule, context)
        _product(code, f"of_h[{place}]", w_h, numerics.ROW_ZERO, columns_h, bias_h, schedule, context)


def _product(
    code: Code,
    name: str,
    weight: np.ndarray,
    zero: int,
    columns: np.ndarray,
    bias: np.ndarray,
    schedule: Schedule,
    context: Context,
) -> None:
    """Print one `struct Matmul`.

    Threads divide the panels of output channels if there are few rows, as in a single time step, otherwise the rows.
    """
    outputs, inputs = weight.shape
    plan, rows = packing(outputs, inputs, 1, 1, 1, schedule.tile_columns, packed=False), schedule.tile_rows
    last = TileSpec(rows, plan.last_blocks, "rows")
    full = TileSpec(rows, plan.blocks, "rows") if plan.panels > 1 else last
    label = name.replace("[", "_").replace("]", "")
    start = -zero * weight.astype(np.int64).sum(1)
    scales, row_bias = (
        context.constant(pack_columns(part, plan), "float", f"{label}_{what}")
        for part, what in ((columns, "scales"), (bias, "row_bias"))
    )
    packed = pack_weights(weight.reshape(outputs, inputs, 1, 1), plan, 1)
    code(f"""
        {name}.stride_y = {name}.stride_x = 1, {name}.flat = 1, {name}.rows = {rows}, {name}.out_bytes = 4;
        {name}.tile.a_pixel = {name}.tile.a_tap = {inputs}, {name}.tile.tap_rows = {name}.tile.taps = 1;
        {name}.tile.run = {plan.run}, {name}.panels = {plan.panels}, {name}.blocks = {plan.blocks};
        {name}.panel_bytes = {plan.run * 64 * plan.blocks};
        {name}.tile.b = {context.constant(packed, "int8_t", f"{label}_weights")};
        {name}.tile.bias = {context.constant(pack_columns(start.astype(np.int32), plan), "int32_t", f"{label}_bias")};
        {name}.tile.factor = {scales}, {name}.tile.row_bias = {row_bias};
        {name}.kernels = {context.tiles(full)}, {name}.last_kernels = {context.tiles(last)};
        {name}.mask = {plan.mask:#x}, {name}.last_mask = {plan.last_mask:#x};
        {name}.split_channels_below = {schedule.split_channels_below}, {name}.chunk_bytes = {schedule.chunk_bytes};
    """)
