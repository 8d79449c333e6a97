"""Batch tiling: run the leading steps on sub-batches, so that activations stay in the second-level cache.

The activations between early steps exceed that cache for a whole batch, but rarely for one or two images, and the
weights of these steps are small.
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
"""Maximum rank of a tensor of the caller with arbitrary strides; kernels know the strides of the last five axes."""


def choose_batch_tiling(plan: Plan, target: Target) -> Plan:
    """Tile the batch over the leading barrier groups that save most memory traffic, if there are any."""
    tiling, reason = analytic_batch_tiling(plan, target.caches)
    return replace(plan, batch_tiling=tiling).with_reasons(Choice.BATCH_TILING, {"": reason})


def analytic_batch_tiling(plan: Plan, caches: CacheSizes) -> tuple[BatchTiling | None, str]:
    """Return the tiling with as many images as fit into the second-level cache, at least one, and the reason for it.

    A sub-batch keeps activations in cache but reads the weights again. Tiling therefore ends after the barrier group at
    which the activations of one image, summed up to there, exceed the weights by most. Only groups with a step whose
    activations exceed an eighth of the second-level cache can be the last. Free sizes other than the batch count as 1.
    """
    batch = batch_symbol(plan.graph)
    kept = best = groups = most = largest = 0
    for steps in separable_groups(plan):
        activations = [_activation_bytes(step.partition, plan.graph) for step in steps]
        kept += sum(activations) - sum(_weight_bytes(step.partition, plan.graph) for step in steps)
        most = max(most, *activations)
        if kept > best and max(activations) > caches.l2 // 8:
            best, groups, largest = kept, steps[0].barrier_group + 1, most
    if not batch:
        return None, "the batch is not dynamic"
    if not groups:
        return None, f"no leading step has activations above {caches.l2 // 8} bytes per image that exceed its weights"
    images = max(1, caches.l2 // largest)
    return BatchTiling(batch, groups, images), f"the largest step has {largest} bytes of activations per image"


def separable_groups(plan: Plan) -> Iterator[list[Step]]:
    """Yield the leading barrier groups whose steps process images separately and write buffers, not the caller's
    tensors.
    """
    batch = batch_symbol(plan.graph)
    for _, steps in groupby(plan.steps, key=lambda step: step.barrier_group):
        found = list(steps)
        if batch is None or not all(_is_separable(step.partition, plan, batch) for step in found):
            return
        yield found


def batch_symbol(graph: Graph) -> str | None:
    """Return the free dimension that is the first axis of the first input, or ``None``."""
    shape = graph.types[graph.inputs[0]].shape if graph.inputs else ()
    return next((name for name in symbols_of(shape[0]) if shape[0] == symbol(name)), None) if shape else None


def _is_separable(partition: Partition, plan: Plan, batch: str) -> bool:
    """Return whether all operators of a partition process images separately and its results are in buffers with images.

    Constants are exempt, since they have no batch axis. The memory of views and aliases counts as well.
    """
    graph, buffers = plan.graph, plan.buffers
    if not all(op_def(op).batch_separable for op in partition.ops):
        return False
    values = {name for op in partition.ops for name in (*op.inputs, *op.outputs)} - graph.constants.keys()
    roots = {plan.root(name) for name in values} - graph.constants.keys()
    shapes = [graph.types[name].shape for name in values | roots]
    stored = all(name in buffers for name in partition.ops[-1].outputs)
    return stored and all(_has_images(shape, batch) for shape in shapes)


def _has_images(shape: Shape, batch: str) -> bool:
    """Return whether the batch is the first axis of a shape and occurs in no other axis."""
    if not 1 < len(shape) <= STRIDED_AXES or shape[0] != symbol(batch):
        return False
    return not any(batch in symbols_of(dim) for dim in shape[1:])


def _weight_bytes(partition: Partition, graph: Graph) -> int:
    """Return the bytes of constants that a partition reads."""
    return sum(graph.constants.nbytes(name) for name in partition.reads() if name in graph.constants)


def _activation_bytes(partition: Partition, graph: Graph) -> int:
    """Return the bytes of activations that a partition reads and writes per image."""
    values = (*partition.reads(), *partition.ops[-1].outputs)
    kinds = [graph.types[name] for name in values if name not in graph.constants]
    return sum(_at_one(numel(kind.shape)) * kind.dtype.bytes for kind in kinds)


def _at_one(dim: Dim) -> int:
    return evaluate(dim, dict.fromkeys(symbols_of(dim), 1))
