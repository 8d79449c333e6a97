"""Numbers before text: tile shape, split and blocking of every partition, from its geometry and the caches."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from intaglio.codegen.tile import Isa
from intaglio.ir import Partition, Plan, Schedule, evaluate, symbols_of
from intaglio.ir.verify import PRODUCTS


@dataclass(frozen=True)
class Problem:
    """A matrix product as a schedule sees it: outputs, and output pixels at batch 1."""

    outputs: int
    outputs_per_group: int
    pixels: int
    width: int
    flat: bool


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of one core's first and second level."""

    l1: int = 32 << 10
    l2: int = 1 << 20


def schedules(plan: Plan, isa: Isa, caches: CacheSizes) -> dict[str, Schedule]:
    """Output value -> schedule, for every partition with a matrix product."""
    found = {}
    for step in plan.steps:
        if step.partition.anchor.kind in PRODUCTS:
            found[step.partition.ops[-1].output] = analytic(problem(step.partition, plan), isa, caches)
    return found


def problem(partition: Partition, plan: Plan) -> Problem:
    """Geometry of a convolution or linear layer."""
    graph, anchor = plan.graph, partition.anchor
    weight, out = graph.constants[anchor.inputs[1]], graph.types[anchor.output].shape
    groups = anchor.attrs.get("groups", 1)
    sizes = [evaluate(d, dict.fromkeys(symbols_of(d), 1)) for d in out]
    pixels = prod(sizes[:-1]) if anchor.kind == "linear" else sizes[0] * prod(sizes[2:])
    width = pixels if anchor.kind == "linear" else sizes[-1]
    return Problem(
        outputs=weight.shape[0],
        outputs_per_group=weight.shape[0] // groups,
        pixels=pixels,
        width=width,
        flat=is_flat(partition, plan),
    )


def is_flat(partition: Partition, plan: Plan) -> bool:
    """Whether all output pixels of all images are one line: single taps, stride 1, no halo anywhere."""
    anchor, buffers = partition.anchor, plan.buffers
    if anchor.kind == "linear":
        return True
    if anchor.kind.startswith("conv_transpose"):
        return False
    taps = plan.graph.constants[anchor.inputs[1]].shape[2:]
    images = [anchor.inputs[0], partition.ops[-1].output]
    images += [partition.tail[0].inputs[1]] if partition.tail[0].kind == "add" else []
    found = [buffers[name] for name in images if name in buffers]
    plain = not any(any(buffers[buffer.alias or buffer.value].halo) for buffer in found)
    return plain and {*taps, *anchor.attrs["stride"]} == {1} and not any(anchor.attrs["padding"])


def analytic(layer: Problem, isa: Isa, caches: CacheSizes) -> Schedule:
    """Widest tile the outputs fill; half the second level for input activations that all panels pass over.

    Threads share panels instead of pixels when the weights are larger than the activations: each then reads only its
    part of them from memory.
    """
    fits = layer.outputs_per_group if layer.outputs_per_group < layer.outputs else layer.outputs
    blocks = min(isa.blocks, max(1, -(-fits // 16)))
    while blocks > 1 and fits < layer.outputs and fits % (16 * blocks):
        blocks -= 1
    return Schedule(
        tile_rows=isa.tallest[blocks],
        tile_columns=blocks,
        split_channels_below=layer.outputs,
        chunk_bytes=caches.l2 // 2,
    )
