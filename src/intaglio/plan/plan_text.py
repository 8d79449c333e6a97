"""The printer of plans."""

from __future__ import annotations

from intaglio.ir import Graph
from intaglio.plan.plan_records import Partition


def partitions_text(partitions: tuple[Partition, ...], graph: Graph) -> str:
    """Every partition's name, operators and result."""
    lines = []
    for index, partition in enumerate(partitions):
        kinds = " + ".join(op.kind for op in partition.ops)
        result = ", ".join(f"%{name}: {graph.types[name]}" for name in partition.ops[-1].outputs)
        lines.append(f"p{index:02d} {partition.name}: {kinds} -> {result}")
    return "\n".join(lines) + "\n"
