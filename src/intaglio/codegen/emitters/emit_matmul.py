"""Print steps whose anchor is a convolution or a linear layer."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np

from intaglio import numerics
from intaglio.codegen.context import Context
from intaglio.codegen.emitters import emit_depthwise
from intaglio.codegen.emitters.emit_depthwise import CHANNELS
from intaglio.codegen.emitters.emit_loops import epilogue, fill_frames
from intaglio.codegen.emitters.emit_steps import fill_pair
from intaglio.codegen.int4_packing import pack_int4, panel_line_bytes, stored_int4
from intaglio.codegen.weight_packing import PanelPacking, pack_columns, pack_weights, packing
from intaglio.codegen.winograd_packing import transform_weights, transformed_bytes
from intaglio.codegen.writer import Code
from intaglio.ir import Op, Shape
from intaglio.kernels import TileSpec
from intaglio.kernels.tile_spec import INT4_CHANNELS, INT4_GROUP, INT4_MULTIPLES
from intaglio.kernels.winograd_sizes import FEWEST_PIXELS
from intaglio.ops import op_def
from intaglio.ops.opdef import Tail
from intaglio.ops.products.scratch_memory import CACHE_LINE, MAX_SCRATCH_THREADS
from intaglio.plan.buffers import nhwc_sizes
from intaglio.plan.kernel_records import DepthwiseKernel, DepthwiseLoops, TiledKernel
from intaglio.plan.plan_records import Partition
from intaglio.plan.scheduling.convolution_pieces import Piece, pieces, weights_of
from intaglio.plan.scheduling.value_bounds import result_bounds


def emit_matmul(code: Code, partition: Partition, context: Context) -> None:
    """Print all pieces of a convolution or linear layer, and fill the halo of the result."""
    anchor = partition.anchor
    parts = pieces(anchor, context.graph)
    for piece, kernel in zip(parts, context.plan.kernels[partition.output], strict=True):
        with code.block("") if len(parts) > 1 else nullcontext():
            if isinstance(kernel, TiledKernel):
                _emit_tiled(code, partition, context, piece, kernel)
            elif isinstance(kernel, DepthwiseKernel | DepthwiseLoops):
                _emit_depthwise(code, partition, context, piece, kernel)
    if partition.epilogue is not None:
        fill_frames(code, partition.epilogue, context)
    elif context.halo(partition.output):
        context.include("base/image.h")
        code(f"const struct Image frame = {context.image(partition.output)};")
        zero_point = context.graph.types[partition.output].qparams.zero
        code(f"fill_halo(&frame, {zero_point}, thread, threads);")


def _emit_depthwise(
    code: Code, partition: Partition, context: Context, piece: Piece, kernel: DepthwiseKernel | DepthwiseLoops
) -> None:
    """Print a depthwise piece: fill a `struct Depthwise` or `struct DepthwisePlain`, and run it."""
    tail, anchor = partition.tail[0], partition.anchor
    returns_float = op_def(tail).tail is Tail.DEQUANTIZE
    code(f"const struct Image in = {context.image(partition.anchor.inputs[0])};")
    layer = emit_depthwise.Layer(
        piece,
        _folded_bias(partition, context, piece),
        accumulator_scales(anchor, context) if returns_float else context.graph.constants[tail.inputs[1]],
        source="in",
        result=_sizes(anchor.output, False, context)
        if returns_float
        else _results(partition.output, context, piece, "in"),
        limits="0" if returns_float else context.limits(tail),
        table=_table(partition, context),
    )
    function = emit_depthwise.emit_layer(code, layer, kernel, context)
    if op_def(tail).tail is Tail.ACTIVATE:
        code(f"d.activation = {_activation(tail, context)};")
    if returns_float:
        behind = epilogue(partition, context, CHANNELS) if partition.epilogue else _stored(partition.output, context)
        code(f"d.epilogue = {behind};")
    code("d.shares = r->shares;")
    code(f"{function}(&d, thread, threads);")


def _stored(value: str, context: Context) -> str:
    """Print a function that copies float32 results to their place, and return its `struct Epilogue`: depthwise kernels
    write whole vectors, and so write to a buffer only."""
    context.include("base/image.h", "products/epilogue.h")
    body, code = Code(), Code()
    body(f"""
        const struct Image out = {context.image(value)};
        const int64_t line = pixel / out.width;
        uint8_t* to = at(&out, line / out.height, line % out.height, pixel % out.width) + 4 * channel;
    """)
    with body.block("for (int64_t p = 0; p < pixels; ++p)"):
        body("memcpy(to + p * out.pixel, tile + p * stride, 4 * (size_t)channels);")
    head = "const struct Run* r, const uint8_t* tile, int64_t stride, int64_t pixel, int64_t pixels, int64_t channel"
    with code.block(f"static void store_{value}({head}, int64_t channels)"):
        for line in context.dims_used(body.text()):
            code(line)
        code(body.text())
    context.functions.append(code.text())
    return f"(struct Epilogue){{store_{value}, r, 4}}"


def _emit_tiled(code: Code, partition: Partition, context: Context, piece: Piece, kernel: TiledKernel) -> None:
    """Print a piece as a tiled GEMM: fill a `struct Matmul` and run it."""
    anchor, schedule = partition.anchor, context.plan.schedules[partition.output]
    count = weights_of(anchor, context.graph)
    plan = _packing(anchor, piece, kernel, count)
    context.include("layers/int4_weights.h" if kernel.int4 else "layers/matmul.h")
    code("struct Matmul m = {};")
    code(f"m.in = {_source(partition, context)};")
    if partition.epilogue is None:
        code(f"m.out = {_results(partition.output, context, piece)};")
    else:
        code(f"m.out = {_sizes(anchor.output, not op_def(anchor).convolves, context)};")
        code(f"m.epilogue = {epilogue(partition, context, 16 * plan.blocks)};")
    _geometry(code, context, plan, piece, anchor.attrs.get("groups", 1), kernel.tile.row_taps)
    _weights(code, context, plan, piece, kernel, anchor.attrs.get("groups", 1), count)
    _operands(code, partition, context, plan, piece, kernel, count)
    code(f"""
        m.flat = {int(kernel.flat)}, m.rows = {schedule.tile_rows};
        m.mask = {plan.mask:#x}, m.last_mask = {plan.last_mask:#x};
        m.split_channels_below = {schedule.split_channels_below}, m.chunk_bytes = {schedule.chunk_bytes};
        m.shares = r->shares;
    """)
    _tiles(code, context, plan, kernel)
    if kernel.transforms:
        _transformed(code, context, plan, piece, kernel, context.graph.types[anchor.output].shape[2:])
    if kernel.int4:
        _int4_weights(code, context, plan, kernel.int4, kernel.expands, partition.output)
    if kernel.looks_up:
        with code.block(f"if ({context.isa.lookup_condition})"):
            tiles = {"m": kernel.tile} | ({"w": kernel.int4} if kernel.int4 else {})
            for name, tile in tiles.items():
                kernels, last_kernels = _kernels(context, plan, replace(tile, looks_up=True))
                code(f"{name}.kernels = {kernels}, {name}.last_kernels = {last_kernels};")
            code("m.tile.table = m.table.entries, m.table = {};")
    if context.isa.has_setup:
        code("struct TileSetup setup = {};")
        code("m.tile.setup = &setup;")
        if not kernel.flat:
            code(f"m.lines = {schedule.tile_rows} / LINE_PIXELS;")
    if op_def(anchor).row_groups:
        _multiply_groups(code, partition, context, plan, kernel.tile.result)
    elif kernel.int4:
        code("matmul_int4(&m, &w, thread, threads);")
    elif partition.head is None:
        code("matmul(&m, thread, threads);")
    else:
        context.include("layers/weighed_matmul.h")
        fill_pair(code, partition.head, context)
        code("matmul_weighed(&m, &p, thread, threads);")
    if context.isa.has_setup:
        code("release_tiles(&setup);")


def _tiles(code: Code, context: Context, plan: PanelPacking, kernel: TiledKernel) -> None:
    """Print the microkernels of a tiled product, also those for widened input."""
    kernels, last_kernels = _kernels(context, plan, kernel.tile)
    code(f"m.kernels = {kernels}, m.last_kernels = {last_kernels};")
    if kernel.widens:
        kernels, last_kernels = _kernels(context, plan, replace(kernel.tile, widened=True))
        code(f"m.widened_kernels = {kernels}, m.widened_last_kernels = {last_kernels};")


def _transformed(
    code: Code, context: Context, plan: PanelPacking, piece: Piece, kernel: TiledKernel, sizes: Shape
) -> None:
    """Print the weights and the microkernels for Winograd's method, for images with these sizes."""
    kernels, last_kernels = _kernels(context, plan, replace(kernel.tile, sums=True))
    code(f"m.sums_kernels = {kernels}, m.sums_last_kernels = {last_kernels};")
    size, key = transformed_bytes(plan, piece.shape[1]), (*piece.identity, plan, "transformed")
    weights = context.packed(size, key, lambda: transform_weights(piece.read(), plan), "int16_t", "transformed")
    code(f"m.transformed = {weights};")
    if any(not isinstance(size, int) for size in sizes):
        code(f"if (m.out.height * m.out.width < {FEWEST_PIXELS}) m.transformed = 0;")


def _int4_weights(code: Code, context: Context, plan: PanelPacking, tile: TileSpec, expands: bool, output: str) -> None:
    """Print how 4-bit weights are read, a `struct Int4Weights`."""
    scratch = f"{output}.scratch"
    _, lines, _ = context.plan.buffers[scratch].shape
    code("struct Int4Weights w = {};")
    kernels, last_kernels = _kernels(context, plan, tile)
    sizes = {"INT4_GROUP": INT4_GROUP, "INT4_CHANNELS": INT4_CHANNELS, "INT4_MULTIPLES": INT4_MULTIPLES}
    code(f'static_assert({" && ".join(f"{name} == {size}" for name, size in sizes.items())}, "panels");')
    code(f"w.kernels = {kernels}, w.last_kernels = {last_kernels}, w.rows = {tile.rows};")
    code(f"w.expands = {int(expands)};")
    code(f"w.scratch = r->arena + r->offsets[{context.index[scratch]}];")
    code(f"w.scratch_bytes = {context.dim(lines * CACHE_LINE)}, w.sharers = {MAX_SCRATCH_THREADS};")


def _multiply_groups(code: Code, partition: Partition, context: Context, plan: PanelPacking, result: str) -> None:
    """Print the call that multiplies each group of rows by its own weight."""
    at, (step,) = context.strided(partition.anchor.inputs[-1])
    count, columns = weights_of(partition.anchor, context.graph), plan.columns.size
    factors = columns if result == "rows" or op_def(partition.tail[0]).tail is Tail.DEQUANTIZE else 0
    code(f"const struct RowGroups groups = {{(const int64_t*){at}, {context.dim(step)}, {count},")
    code(f"    {4 * plan.run * columns}, {columns}, {factors}}};")
    code("matmul_groups(&m, &groups, thread, threads);")


def _source(partition: Partition, context: Context) -> str:
    """Return the image that a GEMM reads. Results of a fused head have no memory, only sizes."""
    value = partition.anchor.inputs[0]
    if partition.head is None:
        return context.image(value)
    return _sizes(value, False, context)


def _sizes(value: str, rows: bool, context: Context) -> str:
    """Return an image with the sizes of a value that is never stored."""
    sizes = ", ".join(map(context.dim, nhwc_sizes(context.graph.types[value].shape, rows)))
    return f"image(0, {sizes}, 0, 0)"


def _results(value: str, context: Context, piece: Piece, source: str = "m.in") -> str:
    """Return the image that a piece writes, or reads a residual operand from.

    It contains all pixels, or those of the piece's phases: one per pixel of the image `source`, plus or minus a few.
    """
    if piece.phases is None:
        return context.image(value)
    rows, columns = (
        f"{phase.first}, {step}, {source}.{size} + {phase.extra}"
        for phase, step, size in zip(piece.phases, piece.strides_out, ("height", "width"), strict=True)
    )
    return f"every({context.image(value)}, {rows}, {columns})"


def _packing(anchor: Op, piece: Piece, kernel: TiledKernel, count: int) -> PanelPacking:
    """Return the panel layout of a piece's weight, or of each of ``count`` weights."""
    outputs, per_group, _, taps_x = piece.shape
    outputs //= count
    groups = anchor.attrs.get("groups", 1)
    return packing(outputs, per_group * groups, groups, taps_x, piece.dilation[1], kernel.tile.blocks, kernel.permuted)


def _table(partition: Partition, context: Context) -> str:
    """Return the `struct ResultTable` of the results, or "{}" if there is none.

    Entries outside the bounds of the results are replaced by those of the nearest bound.
    """
    if partition.lut is None:
        return "{}"
    low, high = result_bounds(partition.tail[0], context.graph)
    inside = np.clip(np.arange(256), low, high)
    return context.result_table(context.graph.constants[partition.lut.inputs[1]][inside])


def _activation(tail: Op, context: Context) -> str:
    """Return the `struct Activation` of a tail that applies a function to float results."""
    step = context.graph.types[tail.output].qparams.step
    inverse = context.number(numerics.reciprocal(step), "float", "inverse")
    slope = context.number(tail.attrs.get("slope", 0), "float", "slope")
    gain = "0"
    if tail.inputs[2:]:
        values = context.graph.constants[tail.inputs[2]]
        gain = context.constant(np.concatenate([values, np.ones(15, np.float32)]), "float", "gain")
    context.include("elementwise/activation.h")
    function = f"{tail.attrs['function']}_quantized"
    return f"(struct Activation){{{function}, {inverse}, {slope}, {context.limits(tail)}, {gain}}}"


def accumulator_scales(anchor: Op, context: Context) -> np.ndarray:
    """Return the scales that dequantize the accumulators of an anchor, f32[1] or f32[outputs]."""
    return np.array(context.graph.types[anchor.output].qparams.scales, np.float64).astype(np.float32)


def _pack_each(values: np.ndarray, plan: PanelPacking, count: int) -> np.ndarray:
    """Return values in column order for each of ``count`` weights: one for each output, or one for all."""
    parts = [values] * count if values.size == 1 else np.split(values, count)
    return np.concatenate([pack_columns(part, plan) for part in parts])


def _row_scales(code: Code, tail: Op, context: Context, plan: PanelPacking, count: int) -> None:
    """Print the scales of rows and channels and the bias of a tail that dequantizes with per-token scales."""
    columns, bias = (context.graph.constants[name] for name in tail.inputs[2:4])
    for field, values in (("factor", np.broadcast_to(columns, bias.shape)), ("row_bias", bias)):
        packed = _pack_each(np.ascontiguousarray(values), plan, count)
        code(f"m.tile.{field} = {context.constant(packed, 'float', field)};")
    code(f"m.tile.row_scale = (const float*){context.strided(tail.inputs[1])[0]};")


def _panel_bytes(plan: PanelPacking, piece: Piece) -> int:
    taps = piece.shape[2] * (1 if plan.joined else piece.shape[3])
    return taps * plan.run * 4 * 16 * plan.blocks


def _kernels(context: Context, plan: PanelPacking, tile: TileSpec) -> tuple[str, str]:
    """Return the tables of kernels by height, for full panels and for the last panel."""
    last = replace(tile, blocks=plan.last_blocks)
    return context.tiles(tile if plan.panels > 1 else last), context.tiles(last)


def times(factor: int, text: str) -> str:
    """Return a C product, without a factor of 1."""
    return text if factor == 1 else f"{factor} * {text}"


def _geometry(code: Code, context: Context, plan: PanelPacking, piece: Piece, groups: int, row_taps: int) -> None:
    """Print the byte strides between output pixels, kernel rows and taps. Panels of joined taps are the same bytes as
    those of ``row_taps`` taps."""
    (_, per_group, taps_y, taps_x), (sy, sx), (dy, dx) = piece.shape, piece.stride, piece.dilation
    channels = per_group * groups
    taps = row_taps if plan.joined else taps_x
    code(f"""
        m.stride_y = {sy}, m.stride_x = {sx}, m.top = {-piece.start[0]}, m.left = {-piece.start[1]};
        m.tile.a_pixel = {sx * channels}, m.tile.tap_rows = {taps_y}, m.tile.a_row = {times(dy, "m.in.line")};
        m.tile.taps = {taps}, m.tile.a_tap = {dx * channels}, m.tile.run = {plan.run // row_taps};
    """)
    if any(plan.first):
        code(f"m.first_channel = {context.constant(np.array(plan.first, np.int32), 'int32_t', 'first_channel')};")


def _folded_bias(partition: Partition, context: Context, piece: Piece) -> np.ndarray:
    """Return the bias minus zero point times weights, i64[outputs]."""
    anchor, graph = partition.anchor, context.graph
    zeros, groups = graph.types[anchor.inputs[0]].qparams.zeros, anchor.attrs.get("groups", 1)
    bias = graph.constants[anchor.inputs[2]].astype(np.int64)
    is_linear = not op_def(anchor).convolves and weights_of(anchor, graph) == 1
    if is_linear and len(set(zeros)) == 1 and (stored := stored_int4(graph, piece.value)) is not None:
        return bias - zeros[0] * stored.sums()
    return bias - numerics.zero_point_term(piece.read(), zeros, groups)


def _weights(
    code: Code, context: Context, plan: PanelPacking, piece: Piece, kernel: TiledKernel, groups: int, count: int
) -> None:
    """Print the packed weights."""
    lines = piece.shape[1] // INT4_CHANNELS
    size = lines * panel_line_bytes(plan.blocks) if kernel.int4 else _panel_bytes(plan, piece)

    def pack() -> np.ndarray:
        if kernel.int4:
            stored = stored_int4(context.graph, piece.value)
            return pack_int4(piece.read()[:, :, 0, 0] if stored is None else stored, plan)
        return np.concatenate([pack_weights(part, plan, groups) for part in np.split(piece.read(), count)])

    total = size * plan.columns.size // (16 * plan.blocks) * count
    key = (*piece.identity, plan, groups, count, bool(kernel.int4))
    code(f"m.tile.b = {context.packed(total, key, pack, 'int8_t', 'weights')};")
    code(f"m.panels = {plan.panels}, m.blocks = {plan.blocks}, m.panel_bytes = {size};")


def _operands(
    code: Code,
    partition: Partition,
    context: Context,
    plan: PanelPacking,
    piece: Piece,
    kernel: TiledKernel,
    count: int,
) -> None:
    anchor, tail, graph = partition.anchor, partition.tail[0], context.graph

    def pack_bias() -> np.ndarray:
        return _pack_each(_folded_bias(partition, context, piece).astype(np.int32), plan, count)

    zeros = graph.types[anchor.inputs[0]].qparams.zeros
    key = (*piece.identity, anchor.inputs[2], zeros, plan, count)
    bias = context.packed(4 * count * plan.columns.size, key, pack_bias, "int32_t", "bias")
    code(f"m.tile.bias = {bias};")
    if op_def(tail).tail is Tail.DEQUANTIZE:
        factor = accumulator_scales(anchor, context)
        code(f"m.tile.factor = {context.constant(_pack_each(factor, plan, count), 'float', 'factor')};")
        code("m.tile.out_pixel = m.out.pixel, m.out_bytes = 4;")
        return
    if op_def(tail).tail is Tail.DEQUANTIZE_ROWS:
        _row_scales(code, tail, context, plan, count)
        code("m.tile.out_pixel = m.out.pixel, m.out_bytes = 4;")
        return
    factors = [graph.constants[name] for name in tail.inputs if name in graph.constants]
    code(f"m.tile.factor = {context.constant(pack_columns(factors[0], plan), 'float', 'factor')};")
    code(f"m.tile.limits = {context.limits(tail)};")
    if partition.lut is not None:
        code(f"m.table = {_table(partition, context)};")
    code("m.tile.out_pixel = m.out.pixel, m.out_bytes = 1;")
    if op_def(tail).tail is Tail.ACTIVATE:
        code(f"m.activation = {_activation(tail, context)};")
    if op_def(tail).tail is Tail.ADD:
        code(f"m.residual = {_results(tail.inputs[1], context, piece)};")
        code("m.tile.residual_pixel = m.residual.pixel;")
        pointer = context.constant(pack_columns(factors[1], plan), "float", "residual_factor")
        code(f"m.tile.residual_factor = {pointer};")
    for name, values in (("remainder", tail.outputs[1:]), ("residual_remainder", tail.inputs[4:])):
        for value in values:
            code(f"m.{name} = {_results(value, context, piece)}, m.tile.{name}_pixel = m.{name}.pixel;")
