"""Kernel selection for every step with alternatives: products, recurrent layers, data movement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from intaglio.ir import Dim, Graph, Op, Schedule
from intaglio.kernels import DepthwiseSpec, Isa, TileSpec
from intaglio.kernels.depthwise_spec import MAX_INPUT_ROWS
from intaglio.kernels.instruction_set import LARGEST_SIZE
from intaglio.kernels.tile_spec import PACKED_RESULTS
from intaglio.kernels.winograd_sizes import FEWEST_PIXELS, MOST_INPUTS
from intaglio.ops import op_def
from intaglio.ops.movement.data_movement import Box, Run, Strides, reshaped_copy
from intaglio.ops.movement.pixel_shuffle import SHUFFLE
from intaglio.ops.opdef import Tail
from intaglio.plan.execution_plan import Plan
from intaglio.plan.kernel_records import (
    MAX_RUNS,
    ActivationTiles,
    DepthwiseKernel,
    DepthwiseLoops,
    Kernel,
    Movement,
    MovementKernel,
    RecurrentTiles,
    TiledKernel,
)
from intaglio.plan.plan_records import Choice, Partition, is_flat
from intaglio.plan.scheduling.convolution_pieces import Piece, pieces
from intaglio.plan.scheduling.value_bounds import saturates_to_bounds

TILE_RESULTS = {Tail.REQUANTIZE: "u8", Tail.ADD: "add", Tail.DEQUANTIZE_ROWS: "rows"}
"""Result of the microkernel for each tail; "f32" for all others, whose functions are applied to floats while these are
in the first-level cache.
"""
MIN_DEPTHWISE_GROUPS = 8
MAX_DEPTHWISE_SIDE = 6
"""Maximum number of output rows and of output pixels per row of a depthwise tile."""
MAX_DEPTHWISE_COLUMNS = 15
"""Maximum number of tap columns of a depthwise kernel."""
RECURRENT_CHUNK_BYTES = 1 << 19
"""Bytes of x that stay in cache while all panels of a recurrent layer pass over them."""
MOST_TRANSFORMED_CHANNELS = 1 << 17
"""Largest product of input and output channels of Winograd's method: 4 MB of weights, which every chunk of an
image reads from the third-level cache."""
SHORT_RUN = 8
"""An innermost run shorter than this is swapped with a longer one around it."""


def choose_kernels(plan: Plan, isa: Isa) -> Plan:
    """Choose the kernels of every partition, one per piece, by the value that the partition computes."""
    kernels: dict[str, tuple[Kernel, ...]] = {}
    reasons: dict[str, str] = {}
    for partition in plan.partitions:
        record, made = op_def(partition.anchor), partition.ops[-1].outputs[0]
        if record.multiplies_weight:
            kernels[made], reasons[made] = _product_kernels(partition, plan, isa)
        elif record.multiplies_activations:
            kernels[made] = (_activation_tiles(partition, plan.graph, isa),)
            reasons[made] = (
                f"the widest tile of {isa.name}; the last tile may have any width, since columns may be dynamic"
            )
        elif record.recurrent:
            kernels[made] = (RecurrentTiles(_recurrent_schedule(partition.anchor, plan.graph, isa)),)
            reasons[made] = (
                f"the widest tile of {isa.name} that the gates fill; threads share the panels if there are few rows"
            )
        elif record.moves_data:
            kernels[made] = (kernel := movement_kernel(partition.anchor, plan),)
            reasons[made] = MOVEMENT_REASONS[kernel.movement]
    return replace(plan, kernels=kernels).with_reasons(Choice.KERNEL, reasons)


# ---- products with constant weights


def _product_kernels(partition: Partition, plan: Plan, isa: Isa) -> tuple[tuple[Kernel, ...], str]:
    """Return the kernels of all pieces, and the reason for the first one."""
    parts = pieces(partition.anchor, plan.graph)
    found = [_product_kernel(partition, piece, plan, isa) for piece in parts]
    return tuple(kernel for kernel, _ in found), found[0][1]


def _product_kernel(partition: Partition, piece: Piece, plan: Plan, isa: Isa) -> tuple[Kernel, str]:
    """Return the kernel of a piece and why it was chosen."""
    tail, clamps_float = partition.tail[0], partition.output in plan.guarded
    kind = op_def(tail).tail
    result = "f32" if kind is None else TILE_RESULTS.get(kind, "f32")
    reason = why_not_depthwise(piece, partition.anchor.attrs.get("groups", 1), tail)
    if reason is None:
        looks_up = bool(isa.lookup_condition) and partition.lut is not None
        saturates = result in PACKED_RESULTS and saturates_to_bounds(tail, plan.graph)
        kernel, reason = depthwise_kernel(piece, result, saturates, clamps_float, looks_up, isa)
        return _with_joined_pixels(kernel, partition, piece, plan), reason
    looks_up = bool(isa.lookup_condition) and partition.lut is not None and kind is Tail.REQUANTIZE
    schedule, permuted = plan.schedules[partition.output], isa.packs and result in PACKED_RESULTS
    tile = TileSpec(
        schedule.tile_rows,
        schedule.tile_columns,
        result,
        saturates=permuted and saturates_to_bounds(tail, plan.graph),
        clamps_float=clamps_float,
        remainder=len(tail.outputs) > 1,
        residual_remainder=len(tail.inputs) > 4,
    )
    tile = replace(tile, row_taps=_row_taps(partition, piece, tile, isa))
    flat = is_flat(partition, plan.graph, plan.buffers)
    int4 = _int4_tile(partition, tile, plan.graph, isa)
    widens = isa.widens and int4 is None and partition.head is None and _is_worth_widening(piece, tile)
    transforms = widens and _is_worth_transforming(piece, partition, plan.graph)
    return TiledKernel(tile, permuted, looks_up, flat, int4, not isa.int4_any_rows, widens, transforms), reason


def _is_worth_widening(piece: Piece, tile: TileSpec) -> bool:
    """Return whether more than one panel reads the input, and steps of 4 channels keep channels together."""
    outputs, inputs, *_ = piece.shape
    return outputs > 16 * tile.blocks and inputs % 4 == 0


def _is_worth_transforming(piece: Piece, partition: Partition, graph: Graph) -> bool:
    """Return whether Winograd's method computes a piece in less time: a layer of 3x3 taps with so many pixels, and so
    few channels, that its weights, which become 3.6 times as large, are not what takes the time. Images of
    free sizes are compared with that number in each call."""
    outputs, inputs, *taps = piece.shape
    sizes = graph.types[partition.anchor.output].shape[2:]
    if partition.anchor.attrs.get("groups", 1) > 1 or len(sizes) != 2 or taps != [3, 3] or piece.phases is not None:
        return False
    plain = piece.stride == piece.dilation == (1, 1) and inputs % 16 == 0
    few_channels = inputs <= MOST_INPUTS and inputs * outputs <= MOST_TRANSFORMED_CHANNELS
    pixels = sizes[0] * sizes[1]
    return plain and few_channels and (not isinstance(pixels, int) or pixels >= FEWEST_PIXELS)


def _row_taps(partition: Partition, piece: Piece, tile: TileSpec, isa: Isa) -> int:
    """Return the taps of a row whose products a kernel computes together: all of a row, or 1.

    The results of a tile must be neighbours, and so must be the pixels of a tap, which begin at multiples of 4 bytes.
    """
    _, inputs, _, taps = piece.shape
    neighbours = partition.head is None and piece.stride[1] == piece.dilation[1] == 1 and inputs % 4 == 0
    one_group = partition.anchor.attrs.get("groups", 1) == 1
    return taps if neighbours and one_group and taps == isa.row_taps and isa.joins_row_taps(tile) else 1


def _int4_tile(partition: Partition, tile: TileSpec, graph: Graph, isa: Isa) -> TileSpec | None:
    """Return the tile that reads the 4-bit weights of a linear layer, or ``None`` if kernels read int8 weights.

    Instruction sets without kernels for few rows read int8 weights.
    """
    if partition.head is not None or op_def(partition.anchor).why_not_int4(partition.anchor, graph.types):
        return None
    rows = isa.int4_tile_rows.get(tile.blocks)
    return None if rows is None else replace(tile, rows=rows, int4=True)


def why_not_depthwise(piece: Piece, groups: int, tail: Op) -> str | None:
    """Return why a convolution does not run in the depthwise kernels, or ``None``."""
    outputs, per_group, taps_y, taps_x = piece.shape
    if per_group != 1 or outputs != groups or groups < MIN_DEPTHWISE_GROUPS:
        return "every output sums several input channels"
    if taps_y > MAX_INPUT_ROWS - 3 or taps_x > MAX_DEPTHWISE_COLUMNS:
        return f"{taps_y}x{taps_x} taps are too many for depthwise kernels"
    kind = op_def(tail).tail
    if len(tail.outputs) > 1 or kind not in (Tail.REQUANTIZE, Tail.ACTIVATE, Tail.DEQUANTIZE):
        return f"depthwise kernels have no {tail.kind}"
    if kind is Tail.DEQUANTIZE and piece.phases is not None:
        return "depthwise kernels write float results of whole images only"
    return None


def depthwise_kernel(
    piece: Piece, result: str, saturates: bool, clamps_float: bool, looks_up: bool, isa: Isa
) -> tuple[Kernel, str]:
    """Return the cheapest tiles, or loops if the instruction set has no tiles for such taps, and the reason."""
    channels, _, taps_y, taps_x = piece.shape
    if isa.depthwise is None or piece.dilation[1] != 1:
        missing = f"{isa.name} has none" if isa.depthwise is None else "dilated columns have none"
        return DepthwiseLoops(clamps_float), f"every output sums one input channel; of depthwise tiles, {missing}"
    best = cheapest_depthwise_tile((taps_y, taps_x), piece.stride, piece.dilation[0])
    tile = replace(best, result=result, saturates=saturates, clamps_float=clamps_float)
    blocks = -(-channels // tile.channels)
    is_half = channels - (blocks - 1) * tile.channels <= tile.channels // 2
    last = replace(tile, lanes=tile.lanes // 2) if is_half else tile
    return DepthwiseKernel(
        tile, last, blocks, looks_up
    ), "the tile with the fewest cycles of loads and vector operations per output pixel"


def _with_joined_pixels(kernel: Kernel, partition: Partition, piece: Piece, plan: Plan) -> Kernel:
    """Return a depthwise kernel that computes neighbouring pixels as channels of one vector, if these fill it exactly.

    With a stride of 1, a tap of two neighbouring pixels of 32 channels reads 64 bytes that follow each other. The
    stride of the kernel along x is the number of pixels in a vector, and the weights are repeated.
    """
    channels, joined = piece.shape[0], 64 // piece.shape[0]
    if not isinstance(kernel, DepthwiseKernel) or joined < 2 or joined * channels != kernel.tile.channels:
        return kernel
    width = plan.graph.types[partition.output].shape[-1]
    images = [plan.buffers.get(plan.root(name)) for name in (partition.anchor.inputs[0], partition.output)]
    apart = {None if image is None else image.channels() for image in images}
    fills = isinstance(width, int) and width % joined == 0 and apart == {channels}
    if not fills or piece.stride[1] != 1 or kernel.tile.result != "u8" or partition.epilogue is not None:
        return kernel
    best = cheapest_depthwise_tile(kernel.tile.taps, (piece.stride[0], joined), piece.dilation[0])
    tile = replace(kernel.tile, rows=best.rows, columns=best.columns, stride=best.stride)
    return replace(kernel, tile=tile, last=tile, joined=joined)


@cache
def cheapest_depthwise_tile(taps: tuple[int, int], stride: tuple[int, int], dilation_y: int = 1) -> DepthwiseSpec:
    """Return the cheapest tile, the smallest of equals; with dilation along y, tiles have a single row."""
    most = MAX_DEPTHWISE_SIDE if dilation_y == 1 else 1
    specs = [
        DepthwiseSpec(r, c, taps, stride) for r, c in product(range(1, most + 1), range(1, MAX_DEPTHWISE_SIDE + 1))
    ]
    fitting = [spec for spec in specs if spec.fits and 4 * spec.quads <= MAX_INPUT_ROWS]
    return min(fitting, key=lambda spec: (spec.cost, spec.rows * spec.columns))


# ---- products of activations, recurrent layers


def _activation_tiles(partition: Partition, graph: Graph, isa: Isa) -> ActivationTiles:
    """Choose the widest tile and collect the widths of panels that can occur; a free size may end in any width."""
    anchor, most = partition.anchor, isa.blocks
    if partition.tail:
        widths: tuple[Dim, ...] = (graph.types[anchor.output].shape[-1],)
    else:
        widths = graph.types[anchor.inputs[1]].shape[2], graph.types[anchor.inputs[2]].shape[3]
    found = {blocks for width in widths for blocks in _panel_widths(width, most)}
    return ActivationTiles(TileSpec(isa.max_tile_rows[most], most, "f32"), frozenset(found))


def _panel_widths(width: Dim, most: int) -> set[int]:
    """Return the widths, in blocks of 16 columns, of the panels that ``width`` columns are divided into."""
    if not isinstance(width, int):
        return set(range(1, most + 1))
    blocks = -(-width // 16)
    return {min(blocks, most), (blocks - 1) % most + 1}


def _recurrent_schedule(op: Op, graph: Graph, isa: Isa) -> Schedule:
    """Return the schedule for all products of a recurrent layer, which have the same number of outputs."""
    constants = graph.constants
    outputs = next(len(constants[name]) for name in op.inputs if name in constants and constants[name].ndim == 2)
    blocks = min(isa.blocks, -(-outputs // 16))
    return Schedule(isa.max_tile_rows[blocks], blocks, min(outputs, LARGEST_SIZE), RECURRENT_CHUNK_BYTES)


# ---- data movement


MOVEMENT_REASONS = {
    Movement.INTERLEAVE: "two groups of channels of images, a byte per element",
    Movement.COPY: "operand and result can be divided into the same axes, merged where both are without gaps",
    Movement.RESHAPE: "only the logical order is the same on both sides",
}


def movement_kernel(op: Op, plan: Plan) -> MovementKernel:
    """Choose a kernel for data movement: strided copies, unless channels are interleaved or the shape changes."""
    types, result = plan.graph.types, op.outputs[0]
    record, images = op_def(op), [plan.buffers.get(name) for name in (*op.inputs, result)]
    if (
        record is SHUFFLE
        and op.attrs["groups"] == 2
        and types[result].dtype.bytes == 1
        and all(image is not None and image.channels_last for image in images)
    ):
        return MovementKernel(Movement.INTERLEAVE)
    if record.keeps_order and types[op.inputs[0]].shape != types[result].shape:
        source, to = ((types[name].shape, plan.location(name).strides) for name in (op.inputs[0], result))
        box = reshaped_copy(source, to, types[result].dtype.bytes)
        if box is None or len(box.runs) > MAX_RUNS:
            return MovementKernel(Movement.RESHAPE)
        return MovementKernel(Movement.COPY, (replace(box, runs=_ordered(box)),))
    copies = tuple(_copies(op, plan, plan.location(result).strides))
    if result not in plan.growing:
        return MovementKernel(Movement.COPY, copies)
    behind = _copies(op, plan, plan.location(op.inputs[0]).strides)
    return MovementKernel(Movement.COPY, copies, tuple(box for box in behind if box.operand > 0))


def _copies(op: Op, plan: Plan, to: Strides) -> Iterator[Box]:
    """Yield the copies of a step to these strides, except for operands that are already written in their place."""
    sides = [(plan.graph.types[name].shape, plan.location(name).strides) for name in op.inputs]
    size = plan.graph.types[op.output].dtype.bytes
    for box in op_def(op).strided_copies(op, sides, to, size):
        buffer = plan.buffers.get(op.inputs[box.operand])
        if buffer is None or buffer.first_channel is None:
            yield replace(box, runs=_ordered(box))


def _ordered(box: Box) -> tuple[Run, ...]:
    """Order runs with the innermost last, but not a short run inside of a long one; a fill reads a single element."""
    runs = [Run(run.size, 0, run.result) if box.fill else run for run in box.runs]
    if len(runs) > 1 and _is_short(runs[-1]) and not _is_short(runs[-2]):
        runs[-2:] = runs[:-3:-1]
    return tuple(runs)


def _is_short(run: Run) -> bool:
    return isinstance(run.size, int) and run.size < SHORT_RUN
