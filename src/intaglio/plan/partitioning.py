"""Integer graph -> partitions, by the rows of `intaglio.fusion.table`: a product and what reads its accumulators, a
product that weighs the channels of what a convolution reads, and a loop behind a product are one kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from intaglio.fusion.fusion_record import Fusion, match_rows
from intaglio.fusion.integer_graph_view import IntegerGraphView
from intaglio.fusion.loop_conditions import as_loop
from intaglio.fusion.table import ACCUMULATOR_FUSIONS, EPILOGUE_FUSIONS, HEAD_FUSIONS
from intaglio.ir import Graph, Op
from intaglio.plan.buffers import Buffer
from intaglio.plan.partition_view import PartitionView
from intaglio.plan.plan_records import Partition


def fuse(graph: Graph) -> tuple[Partition, ...]:
    """Put every operator in one partition, in execution order.

    A partition stands where its last operator stood, so that what its tail reads is made before.
    """
    view, taken = IntegerGraphView(graph), set[str]()

    def accept(row: Fusion, values: tuple[str, ...]) -> Partition:
        chain = [view.op(value) for value in values]
        return Partition(_name(chain), tuple(chain), fusions=(row.name,))

    values = [op.outputs[0] for op in graph.ops]
    found = match_rows(ACCUMULATOR_FUSIONS, values, view, accept, taken)
    found += [Partition(value, (view.op(value),)) for value in values if value not in taken]
    return tuple(sorted(found, key=lambda partition: view.position(partition.ops[-1].outputs[0])))


def join_heads(partitions: Sequence[Partition], graph: Graph, buffers: Mapping[str, Buffer]) -> list[Partition]:
    """Join a convolution of single pixels and the product of squeeze and excite in front of it, its head."""

    def joined(row: Fusion, head: Partition, partition: Partition) -> Partition:
        return replace(partition, ops=(*head.ops, *partition.ops), headed=True, fusions=(*partition.fusions, row.name))

    return _join(HEAD_FUSIONS, partitions, PartitionView(partitions, graph, buffers), joined)


def join_epilogues(partitions: Sequence[Partition], graph: Graph, buffers: Mapping[str, Buffer]) -> list[Partition]:
    """Join a product and the loop over single elements, or the dequantize, that alone reads what it makes."""

    def joined(row: Fusion, product: Partition, loop: Partition) -> Partition:
        epilogue = as_loop(loop.anchor, graph.types)
        return replace(product, ops=(*product.ops, epilogue), fusions=(*product.fusions, row.name))

    return _join(EPILOGUE_FUSIONS, partitions, PartitionView(partitions, graph, buffers), joined)


def _join(
    rows: tuple[Fusion, ...],
    partitions: Sequence[Partition],
    view: PartitionView,
    joined: Callable[[Fusion, Partition, Partition], Partition],
) -> list[Partition]:
    """Replace the two partitions of every match by one, in the place of the second."""
    by_value = {partition.ops[-1].outputs[0]: partition for partition in partitions}

    def accept(row: Fusion, values: tuple[str, ...]) -> tuple[str, ...]:
        first, second = values
        by_value[second] = joined(row, by_value.pop(first), by_value[second])
        return values

    match_rows(rows, list(by_value), view, accept, set())
    return list(by_value.values())


def _name(chain: Sequence[Op]) -> str:
    """Return ``layer1.0.conv1`` or, without a module of its own, the value that is made."""
    path = chain[0].origin.path
    return path if path and len(chain) > 1 else chain[-1].outputs[0]
