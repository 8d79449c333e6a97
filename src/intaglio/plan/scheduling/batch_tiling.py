"""Batch tiling: run the leading steps on sub-batches, so that activations stay in the second-level cache.

What early steps leave for each other is larger than that cache for a whole batch, hardly for an image or two, and
their weights are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from intaglio.ir import Dim, Graph, Shape, evaluate, numel, symbol, symbols_of
from intaglio.ops import op_def
from intaglio.plan.execution_plan import Plan
from intaglio.plan.plan_records import BatchTiling, CacheSizes, Choice, Partition, Step, Target

STRIDED_AXES = 5
"""Of a tensor of the caller that lies anyhow: strides of the last five are known."""


def choose_batch_tiling(plan: Plan, target: Target) -> Plan:
    """Tile the batch over the leading barrier groups for which that keeps most in cache, if there are some."""
    tiling, reason = analytic_batch_tiling(plan, target.caches)
    return replace(plan, batch_tiling=tiling).because(Choice.BATCH_TILING, {"": reason})


def analytic_batch_tiling(plan: Plan, caches: CacheSizes) -> tuple[BatchTiling | None, str]:
    """Return the tiling with as many images as fit the second-level cache, at least one, and the reason for it.

    A sub-batch keeps activations in cache and reads weights again: tiling ends where the activations of one image
    exceed all weights by most, behind a step whose activations are much of the second-level cache. Free sizes besides
    the batch count as 1.
    """
    batch = batch_symbol(plan.graph)
    kept = best = groups = most = largest = 0
    for steps in separable(plan):
        activations = [_activation_bytes(step.partition, plan.graph) for step in steps]
        kept += sum(activations) - sum(_weight_bytes(step.partition, plan.graph) for step in steps)
        most = max(most, *activations)
        if kept > best and max(activations) > caches.l2 // 8:
            best, groups, largest = kept, steps[0].barrier_group + 1, most
    if not batch:
        return None, "no free batch"
    if not groups:
        return None, f"no leading step has activations above {caches.l2 // 8} bytes an image that outweigh the weights"
    images = max(1, caches.l2 // largest)
    return BatchTiling(batch, groups, images), f"the largest step has {largest} bytes of activations an image"


def separable(plan: Plan) -> Iterator[list[Step]]:
    """First barrier groups whose steps all keep images apart, and end before the program's tensors for the caller."""
    batch = batch_symbol(plan.graph)
    for _, steps in groupby(plan.steps, key=lambda step: step.barrier_group):
        found = list(steps)
        if batch is None or not all(_is_separable(step.partition, plan, batch) for step in found):
            return
        yield found


def batch_symbol(graph: Graph) -> str | None:
    """The free dimension that is the first input's first axis."""
    shape = graph.types[graph.inputs[0]].shape if graph.inputs else ()
    return next((name for name in symbols_of(shape[0]) if shape[0] == symbol(name)), None) if shape else None


def _is_separable(partition: Partition, plan: Plan, batch: str) -> bool:
    """Constants have no images; what is written must be a buffer, there and where it really lies."""
    graph, buffers = plan.graph, plan.buffers
    if not all(op_def(op).batch_separable for op in partition.ops):
        return False
    values = [name for op in partition.ops for name in (*op.inputs, *op.outputs) if name not in graph.constants]
    roots = [buffers[buffers[name].alias or name] for name in values if name in buffers]
    shapes = [graph.types[name].shape for name in values] + [root.shape for root in roots]
    return partition.output in buffers and all(_has_images(shape, batch) for shape in shapes)


def _has_images(shape: Shape, batch: str) -> bool:
    if not 1 < len(shape) <= STRIDED_AXES or shape[0] != symbol(batch):
        return False
    return not any(batch in symbols_of(dim) for dim in shape[1:])


def _weight_bytes(partition: Partition, graph: Graph) -> int:
    return sum(graph.constants[name].nbytes for name in partition.reads() if name in graph.constants)


def _activation_bytes(partition: Partition, graph: Graph) -> int:
    """Of one image, read and written."""
    values = (*partition.reads(), *partition.ops[-1].outputs)
    kinds = [graph.types[name] for name in values if name not in graph.constants]
    return sum(_at_one(numel(kind.shape)) * kind.dtype.bytes for kind in kinds)


def _at_one(dim: Dim) -> int:
    return evaluate(dim, dict.fromkeys(symbols_of(dim), 1))
