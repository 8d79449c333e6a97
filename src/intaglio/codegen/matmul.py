"""Steps whose anchor is a convolution or a linear layer."""

from __future__ import annotations

import numpy as np

from intaglio import numerics
from intaglio.codegen.context import Context
from intaglio.codegen.pack import Packing, pack_columns, pack_weights, packing
from intaglio.codegen.schedule import is_flat
from intaglio.codegen.tile import TileSpec
from intaglio.codegen.writer import Code
from intaglio.ir import Op, Partition, Schedule

RESULT = {"requantize": "u8", "add": "add", "dequantize": "f32"}


def emit_matmul(code: Code, partition: Partition, context: Context) -> None:
    """Fill a ``struct Matmul`` and run it; the result's halo after it."""
    anchor, tail = partition.anchor, partition.ops[-1]
    schedule = context.schedules[tail.output]
    weight, plan = packed_weight(partition, context, schedule)
    kernels = _kernels(partition, context, plan, schedule)
    for name, symbols in zip(("kernels", "last_kernels"), kernels, strict=True):
        code(f"static const TileKernel {name}[] = {{0, {', '.join(symbols)}}};")
    code("struct Matmul m = {};")
    code(f"m.in = {context.image(anchor.inputs[0])};")
    code(f"m.out = {context.image(tail.output)};")
    _geometry(code, anchor, context, plan, weight)
    _operands(code, partition, context, plan, weight)
    last_mask = (1 << (plan.outputs - 1) % 16 + 1) - 1
    code(f"""
        m.panels = {plan.panels}, m.blocks = {plan.blocks}, m.panel_bytes = {_panel_bytes(plan, weight)};
        m.flat = {int(is_flat(partition, context.plan))}, m.rows = {schedule.tile_rows}, m.last_mask = {last_mask};
        m.kernels = kernels, m.last_kernels = last_kernels, m.tile.mask = 0xffff;
        m.split_channels_below = {schedule.split_channels_below}, m.chunk_bytes = {schedule.chunk_bytes};
        matmul(&m, thread, threads);
    """)
    if context.halo(tail.output):
        code("fill_halo(&m.out, (uint8_t)m.tile.limits->zero_point, thread, threads);")


def packed_weight(partition: Partition, context: Context, schedule: Schedule) -> tuple[np.ndarray, Packing]:
    """The weight with four axes, and the panels it is cut into."""
    anchor = partition.anchor
    weight = context.graph.constants[anchor.inputs[1]]
    weight = weight.reshape(*weight.shape[:2], *(weight.shape[2:] or (1, 1)))
    groups = anchor.attrs.get("groups", 1)
    blocks = schedule.tile_columns
    packs = context.isa.packs and blocks == 4 and RESULT[partition.ops[-1].kind] != "f32"
    packed = packs and weight.shape[0] >= 64
    dilation_x = anchor.attrs.get("dilation", (1, 1))[1]
    outputs, per_group, _, taps_x = weight.shape
    return weight, packing(outputs, per_group * groups, groups, taps_x, dilation_x, blocks, packed)


def _panel_bytes(plan: Packing, weight: np.ndarray) -> int:
    taps = weight.shape[2] * (1 if plan.joined else weight.shape[3])
    return taps * plan.run * 4 * 16 * plan.blocks


def _kernels(partition: Partition, context: Context, plan: Packing, schedule: Schedule) -> tuple[list[str], list[str]]:
    """Symbols by height, for full panels and for the last one."""
    result, guard = RESULT[partition.ops[-1].kind], needs_guard(partition, context)
    heights = range(1, schedule.tile_rows + 1)
    full = [TileSpec(h, plan.blocks, result, plan.packed, guard) for h in heights]
    last = [TileSpec(h, plan.last_blocks, result, plan.last_packed, guard) for h in heights]
    if plan.panels == 1:
        full = last
    context.use([*full, *last])
    return [spec.name for spec in full], [spec.name for spec in last]


def needs_guard(partition: Partition, context: Context) -> bool:
    """Whether ``|acc * factor|`` may leave the range in which float32 converts to int32."""
    anchor, tail = partition.anchor, partition.ops[-1]
    if tail.kind == "dequantize":
        return False
    graph = context.graph
    weight, bias = (graph.constants[name] for name in anchor.inputs[1:])
    x = graph.types[anchor.inputs[0]].levels
    bound = numerics.accumulator_bound(weight, bias, x.qmin, x.qmax, x.zero)
    factors = [graph.constants[name].astype(np.float64) for name in tail.inputs if name in graph.constants]
    total = bound * np.abs(factors[0]) + (255 * np.abs(factors[1]) if len(factors) > 1 else 0)
    return bool(total.max(initial=0) >= numerics.CONVERTIBLE / 2)


def _geometry(code: Code, anchor: Op, context: Context, plan: Packing, weight: np.ndarray) -> None:
    """Strides between output pixels, rows of taps and taps, in bytes."""
    channels = weight.shape[1] * anchor.attrs.get("groups", 1)
    (sy, sx), (dy, dx) = anchor.attrs.get("stride", (1, 1)), anchor.attrs.get("dilation", (1, 1))
    top, _, left, _ = anchor.attrs.get("padding", (0, 0, 0, 0))
    taps = 1 if plan.joined else weight.shape[3]
    code(f"""
        m.stride_y = {sy}, m.stride_x = {sx}, m.top = {top}, m.left = {left};
        m.tile.a_pixel = {sx * channels}, m.tile.tap_rows = {weight.shape[2]}, m.tile.a_row = {dy} * m.in.line;
        m.tile.taps = {taps}, m.tile.a_tap = {dx * channels}, m.tile.run = {plan.run};
    """)
    if any(plan.first):
        code(f"m.first_channel = {context.constant(np.array(plan.first, np.int32), 'int32_t')};")


def _operands(code: Code, partition: Partition, context: Context, plan: Packing, weight: np.ndarray) -> None:
    anchor, tail, graph = partition.anchor, partition.ops[-1], context.graph
    zero_point = graph.types[anchor.inputs[0]].levels.zero
    bias = graph.constants[anchor.inputs[2]].astype(np.int64)
    folded = bias - zero_point * weight.astype(np.int64).reshape(len(weight), -1).sum(1)
    packed = pack_weights(weight, plan, anchor.attrs.get("groups", 1))
    code(f"m.tile.b = {context.constant(packed, 'int8_t')};")
    code(f"m.tile.bias = {context.constant(pack_columns(folded.astype(np.int32), plan), 'int32_t')};")
    if tail.kind == "dequantize":
        factor = np.array(graph.types[anchor.output].levels.scales, np.float64).astype(np.float32)
        code(f"m.tile.factor = {context.constant(pack_columns(factor, plan), 'float')};")
        code("m.tile.out_pixel = m.out.pixel, m.out_bytes = 4;")
        return
    factors = [graph.constants[name] for name in tail.inputs if name in graph.constants]
    code(f"m.tile.factor = {context.constant(pack_columns(factors[0], plan), 'float')};")
    code(f"m.tile.limits = {context.limits(tail)};")
    code("m.tile.out_pixel = m.out.pixel, m.out_bytes = 1;")
    if tail.kind == "add":
        code(f"m.other = {context.image(tail.inputs[1])};")
        code("m.tile.other_pixel = m.other.pixel;")
        code(f"m.tile.other_factor = {context.constant(pack_columns(factors[1], plan), 'float')};")
