"""View of a plan's partitions for the matcher: a partition is matched by its anchor; its result identifies it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from intaglio.fusion.integer_graph_view import ValueView
from intaglio.ir import Dim, Graph, Op
from intaglio.plan.buffers import Buffer
from intaglio.plan.plan_records import Partition, is_flat


class PartitionView(ValueView):
    """View of partitions in execution order and of the memory of their values (`fusion.partition_conditions`)."""

    def __init__(self, partitions: Sequence[Partition], graph: Graph, buffers: Mapping[str, Buffer]) -> None:
        place = {name: index for index, one in enumerate(partitions) for name in one.ops[-1].outputs}
        super().__init__(graph, graph.ops, place)
        self.buffers = buffers
        self._partitions = {name: partitions[index] for name, index in place.items()}

    def operators(self, node: str) -> tuple[Op, ...]:
        """Return the operators of a partition, anchor first; none for other values."""
        return self._partitions[node].ops[self._partitions[node].has_head :] if node in self._partitions else ()

    def is_flat(self, node: str) -> bool:
        """Return whether all pixels that a partition computes are contiguous in memory."""
        return is_flat(self._partitions[node], self.graph, self.buffers)

    def has_halo(self, value: str) -> bool:
        """Return whether the images of a value have a halo."""
        buffer = self.buffers[value]
        return any(self.buffers[buffer.alias or buffer.value].halo)

    def pixel_channels(self, value: str) -> Dim:
        """Return the number of elements per pixel in memory."""
        return self.buffers[value].channels()

    def kinds(self, node: str) -> tuple[str, ...]:
        """Return the kind of the anchor; none for other values."""
        return (self._partitions[node].anchor.kind,) if node in self._partitions else ()

    def operands(self, node: str) -> tuple[str, ...]:
        """Return the values from outside that a partition reads, operands of the anchor first, including repeats."""
        ops = self.operators(node)
        made = {name for op in ops for name in op.outputs}
        return tuple(name for op in ops for name in op.inputs if name not in made)

    def attributes(self, node: str) -> Mapping[str, Any]:
        """Return the attributes of the anchor."""
        return self._partitions[node].anchor.attrs
