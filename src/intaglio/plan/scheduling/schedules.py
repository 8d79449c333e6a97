"""Schedules of products: tile shape, threading and blocking of every partition, from its geometry and the caches.

`analytic_schedule` decides without measurements. The alternatives of a timed search are `tile_candidates` and
`order_candidates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from intaglio.ir import Schedule, evaluate, symbols_of
from intaglio.kernels import Isa
from intaglio.kernels.instruction_set import LARGEST_SIZE
from intaglio.ops import op_def
from intaglio.plan.execution_plan import Plan
from intaglio.plan.plan_records import CacheSizes, Choice, Partition, Target, is_flat
from intaglio.plan.scheduling.convolution_pieces import weight_shape, weights_of

GENERATOR = 6
"""Version of the kernels and the loops around them; when it is increased, schedules timed before are invalid."""
MANY_ROWS = 64
FEW_TILE_ROWS = 4.5
"""Mean pixels of a tile from which products take longer than the second-level cache needs to deliver their weights."""
LARGE_WEIGHTS = 16
"""Ratio of the bytes of weights to those of the input from which weights are large: threads then divide channels with
every instruction set, so that each reads only its part of the weights."""


@dataclass(frozen=True)
class GemmProblem:
    """Dimensions of a matrix product that determine its schedule.

    Attributes:
        outputs: Output channels.
        outputs_per_group: Output channels per group.
        pixels: Output pixels at batch 1.
        width: Width of the output image, or its pixels for a linear layer.
        flat: All output pixels of all images are contiguous in memory.
        floats: The results of a linear layer stay float, for a sum and a norm that read them row by row.
        read: Bytes of input for each output pixel.
        touched: Number of results and elements of residual operands of each output pixel.
        weights: Bytes of weights.
    """

    outputs: int
    outputs_per_group: int
    pixels: int
    width: int
    flat: bool
    floats: bool = False
    read: int = 1
    touched: int = 0
    weights: int = 0


def analytic_schedules(plan: Plan, target: Target) -> dict[str, Schedule]:
    """Return the analytic schedule of every partition with a matrix product, by the value it computes."""
    products = [partition for partition in plan.partitions if op_def(partition.anchor).multiplies_weight]
    return {partition.output: analytic_schedule(gemm_problem(partition, plan), target) for partition in products}


def choose_schedules(plan: Plan, target: Target, timed: Mapping[str, Schedule]) -> Plan:
    """Take the given schedules where they exist, and analytic ones elsewhere.

    Given schedules are those of a timed search, or all those of a program in a file, most of which are analytic.
    """
    found, reasons = analytic_schedules(plan, target), dict[str, str]()
    for partition in plan.partitions:
        given = timed.get(partition.output)
        if given is not None and given != found.get(partition.output):
            reasons[partition.output] = "a timed search found it to be faster"
        elif partition.output in found:
            reasons[partition.output] = _reason(gemm_problem(partition, plan), found[partition.output], target)
    return replace(plan, schedules={**found, **timed}).with_reasons(Choice.SCHEDULE, reasons)


def _reason(layer: GemmProblem, schedule: Schedule, target: Target) -> str:
    """Return the reason for an analytic schedule."""
    fill = f"widest tile of {target.isa} that {layer.outputs_per_group} output channels fill"
    if layer.outputs_per_group == layer.outputs and schedule.tile_columns < min(
        max(target.max_tile_rows), -(-layer.outputs // 16)
    ):
        fill = f"widest tile of {target.isa} that has room for lines of {layer.width} pixels"
    shared = "panels of channels" if layer.pixels < schedule.split_channels_below else "pixels"
    more = "below" if layer.pixels < schedule.split_channels_below else "from"
    return f"{fill}; {layer.pixels} pixels per image, {more} {schedule.split_channels_below}: threads share {shared}"


def gemm_problem(partition: Partition, plan: Plan) -> GemmProblem:
    """Return the dimensions of a convolution or linear layer."""
    graph, anchor = plan.graph, partition.anchor
    weight, out = weight_shape(anchor, graph), graph.types[anchor.output].shape
    groups, outputs = anchor.attrs.get("groups", 1), weight[0] // weights_of(anchor, graph)
    sizes = [evaluate(d, dict.fromkeys(symbols_of(d), 1)) for d in out]
    convolves = op_def(anchor).convolves
    pixels = sizes[0] * prod(sizes[2:]) if convolves else prod(sizes[:-1])
    width = sizes[-1] if convolves else pixels
    return GemmProblem(
        outputs=outputs,
        outputs_per_group=outputs // groups,
        pixels=pixels,
        width=width,
        flat=is_flat(partition, graph, plan.buffers),
        floats=not convolves and op_def(partition.tail[0]).converts,
        read=weight[1] * groups * prod(anchor.attrs.get("stride", ())),
        touched=outputs * (len(activation_operands(partition)) - 1),
        weights=prod(weight),
    )


def activation_operands(partition: Partition) -> list[str]:
    """Return input, results, residual operand and its remainders: the operands and results that are not constants."""
    anchor, first, last = partition.anchor, partition.tail[0], partition.ops[-1]
    residual = () if op_def(first).residual is None else (first.inputs[1], *first.inputs[4:])
    return [anchor.inputs[0], *last.outputs, *residual]


def analytic_schedule(layer: GemmProblem, target: Target) -> Schedule:
    """Return a schedule with the widest tile that the outputs fill and half of the second-level cache for activations,
    results and residual operands.

    A tile is one block narrower where lines are too short for the widest one and the weights of its channels exceed
    the first-level cache: 7 pixels are a tile of 4 and one of 3, each of which reads the weights of 64 channels, or a
    single tile of 48 channels (512 channels of 7 by 7 pixels with 3x3 taps on a Zen 5: 84 -> 96 % of the peak).

    Threads divide panels instead of pixels when the weights are larger than the activations, so that each thread reads
    only its part of the weights from memory. With float results they divide pixels from `MANY_ROWS` on: each thread
    then reads next what it has written itself, instead of half of every row from another core (BERT-base, 128 tokens,
    two threads: 12.77 -> 12.29 ms). With AVX512-VNNI and AMX they do so from 64 pixels on for all products without
    large weights, because there reading from another core takes longer than reading all weights. With AMX, ResNet-50
    takes 2.50 instead of 2.70 ms on two threads, and BERT-base with 128 tokens 9.7 instead of 10.1 ms because large
    weights are exempt. With AVX512-VNNI, MobileNetV2 takes 0.58 instead of 0.62 ms and ResNet-50 4.43 instead of
    4.61 ms on two cores of a Zen 5 that share no cache, and as long as before on cores that do.
    """
    tile_outputs = layer.outputs_per_group if layer.outputs_per_group < layer.outputs else layer.outputs
    blocks = min(max(target.max_tile_rows), max(1, -(-tile_outputs // 16)))
    while blocks > 1 and tile_outputs < layer.outputs and tile_outputs % (16 * blocks):
        blocks -= 1
    if tile_outputs == layer.outputs and _rereads_weights(layer, blocks, target):
        blocks -= 1
    most = MANY_ROWS if layer.floats else LARGEST_SIZE
    if layer.weights < LARGE_WEIGHTS * layer.pixels * layer.read:
        most = min(most, target.split_channels_below)
    return Schedule(
        tile_rows=_tile_rows(layer, blocks, target),
        tile_columns=blocks,
        split_channels_below=min(layer.outputs, most),
        chunk_bytes=target.caches.l2 // 2 * layer.read // (layer.read + layer.touched),
    )


def _tile_rows(layer: GemmProblem, blocks: int, target: Target) -> int:
    """Return the height of tiles: the fast one of the instruction set, or the maximum for lines that fit into one tile
    and for weights of which the first-level cache does not keep those of a tile beside its activations."""
    tallest = target.max_tile_rows[blocks]
    one_tile = not layer.flat and layer.width <= tallest
    if one_tile or 16 * blocks * layer.weights // layer.outputs > target.caches.l1 // 2:
        return tallest
    return target.fast_tile_rows.get(blocks, tallest)


def _rereads_weights(layer: GemmProblem, blocks: int, target: Target) -> bool:
    """Return whether the second-level cache delivers weights for few pixels each, and for more if tiles are narrower by
    a block."""
    tiles = -(-layer.width // target.max_tile_rows[blocks])
    if blocks == 1 or 16 * blocks * layer.weights // layer.outputs <= target.caches.l1:
        return False
    return layer.width < FEW_TILE_ROWS * tiles and -(-layer.width // target.max_tile_rows[blocks - 1]) < tiles


@dataclass(frozen=True)
class Geometry:
    """Everything that the time of a matrix product depends on, besides machine and schedule. Its text is a key on disk.

    Attributes:
        kinds: Kinds of head, anchor and tail.
        weight: Shape of the weight.
        attrs: Attributes of the anchor, sorted.
        read: Shape of the input.
        written: Shape of the result.
        halos: Halos of those `images` that are buffers.
        pixels_apart: Their channels from pixel to pixel.
    """

    kinds: tuple[str, ...]
    weight: tuple[int, ...]
    attrs: tuple[tuple[str, object], ...]
    read: tuple[int, ...]
    written: tuple[int, ...]
    halos: tuple[tuple[int, int], ...]
    pixels_apart: tuple[int, ...]

    @property
    def pixels(self) -> int:
        """Return the number of output pixels of all images."""
        return prod(self.written[:-1] if self.kinds[0] == "linear" else (self.written[0], *self.written[2:]))


def geometries(plan: Plan, sizes: Mapping[str, int]) -> dict[str, Geometry]:
    """Return the geometry, with these free sizes, of every partition whose time depends on a schedule, by its result.

    Depthwise convolutions are excluded, because their kernels have no schedule.
    """
    found = {}
    for step in plan.steps:
        anchor = step.partition.anchor
        if op_def(anchor).multiplies_weight:
            outputs, per_group, *_ = weight_shape(anchor, plan.graph)
            if per_group > 1 or outputs != anchor.attrs.get("groups", 1):
                found[step.partition.output] = _geometry(step.partition, plan, sizes)
    return found


def _geometry(partition: Partition, plan: Plan, sizes: Mapping[str, int]) -> Geometry:
    """Return the geometry of one partition with these free sizes."""
    graph, anchor = plan.graph, partition.anchor
    buffers = [plan.buffers[value] for value in activation_operands(partition) if value in plan.buffers]
    roots = [plan.buffers[buffer.alias or buffer.value] for buffer in buffers]
    read, written = (
        tuple(evaluate(dim, sizes) for dim in graph.types[value].shape) for value in (anchor.inputs[0], anchor.output)
    )
    return Geometry(
        kinds=tuple(op.kind for op in partition.ops),
        weight=weight_shape(anchor, graph),
        attrs=tuple(sorted(anchor.attrs.items())),
        read=read,
        written=written,
        halos=tuple(root.halo for root in roots),
        pixels_apart=tuple(evaluate(root.nhwc_sizes()[3], sizes) for root in roots),
    )


def tile_candidates(start: Schedule, layer: Geometry, isa: Isa) -> tuple[Schedule, ...]:
    """Return narrower and taller tiles than that of ``start``; with groups, no panel may belong to two of them."""
    outputs, groups = layer.weight[0], dict(layer.attrs).get("groups", 1)
    per_group = outputs // groups if isinstance(groups, int) else outputs
    narrower = [
        blocks
        for blocks in range(start.tile_columns - 1, 0, -1)
        if blocks in isa.max_tile_rows and (per_group == outputs or per_group % (16 * blocks) == 0)
    ]
    return tuple(replace(start, tile_rows=isa.max_tile_rows[blocks], tile_columns=blocks) for blocks in narrower)


def order_candidates(start: Schedule, layer: Geometry, caches: CacheSizes, threads: int) -> tuple[Schedule, ...]:
    """Return schedules with the same tile and another order of work, or another amount of input in cache.

    The alternatives are panel by panel or all panels over some pixels, and half or twice the input in cache, as far as
    they make a difference.
    """
    panels = -(-layer.weight[0] // (16 * start.tile_columns))
    by_channels = layer.pixels < start.split_channels_below
    found = []
    if panels > 1:
        found.append(replace(start, split_channels_below=0 if by_channels else layer.pixels + 1))
    if panels > 1 and not by_channels:
        share = prod(layer.read) // threads
        for size in (caches.l2 // 4, caches.l2):
            if min(size, share) != min(start.chunk_bytes, share):
                found.append(replace(start, chunk_bytes=size))
    return tuple(found)


def unsupported_reason(schedule: Schedule, isa: Isa) -> str | None:
    """Return why an instruction set has no kernels for a schedule, or ``None``."""
    rows, columns = schedule.tile_rows, schedule.tile_columns
    if not 1 <= rows <= isa.max_tile_rows.get(columns, 0):
        return f"{isa.name} has no tile of {rows} pixels by {columns} blocks"
    if not all(0 <= size <= LARGEST_SIZE for size in (schedule.split_channels_below, schedule.chunk_bytes)):
        return f"sizes must be from 0 to {LARGEST_SIZE}, but the schedule is {schedule}"
    return None
