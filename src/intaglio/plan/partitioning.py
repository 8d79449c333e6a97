"""Partitioning of the integer graph into kernels, by the fusions of `intaglio.fusion.table`.

A product and the operators that read its accumulators are one kernel. So are a convolution and the channel-wise
multiplication of its input, and a product and the loop that follows it.
"""

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


def partition_ops(graph: Graph) -> tuple[Partition, ...]:
    """Put every operator into one partition, in execution order.

    A partition takes the position of its last operator, so that all operands of its tail are computed before.
    """
    view, taken = IntegerGraphView(graph), set[str]()

    def accept(row: Fusion, values: tuple[str, ...]) -> Partition:
        chain = [view.op(value) for value in values]
        return Partition(_name(chain), tuple(chain), fusions=(row.name,))

    values = [op.outputs[0] for op in graph.ops]
    found = match_rows(ACCUMULATOR_FUSIONS, values, view, accept, taken)
    found += [Partition(value, (view.op(value),)) for value in values if value not in taken]
    return tuple(sorted(found, key=lambda partition: view.position(partition.ops[-1].outputs[0])))


def merge_heads(partitions: Sequence[Partition], graph: Graph, buffers: Mapping[str, Buffer]) -> list[Partition]:
    """Join a 1x1 convolution and its head, the multiplication of squeeze-and-excite before it."""

    def joined(row: Fusion, head: Partition, partition: Partition) -> Partition:
        return replace(
            partition, ops=(*head.ops, *partition.ops), has_head=True, fusions=(*partition.fusions, row.name)
        )

    return _join(HEAD_FUSIONS, partitions, PartitionView(partitions, graph, buffers), joined)


def merge_epilogues(partitions: Sequence[Partition], graph: Graph, buffers: Mapping[str, Buffer]) -> list[Partition]:
    """Join a product and the elementwise loop, or the dequantize, that is the only reader of its result."""

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
    """Replace the two partitions of every match by one, at the position of the second."""
    by_value = {partition.ops[-1].outputs[0]: partition for partition in partitions}

    def accept(row: Fusion, values: tuple[str, ...]) -> tuple[str, ...]:
        first, second = values
        by_value[second] = joined(row, by_value.pop(first), by_value[second])
        return values

    match_rows(rows, list(by_value), view, accept, set())
    return list(by_value.values())


def _name(chain: Sequence[Op]) -> str:
    """Return the module path of the first operator, such as ``layer1.0.conv1``, or the name of the result."""
    path = chain[0].origin.path
    return path if path and len(chain) > 1 else chain[-1].outputs[0]
