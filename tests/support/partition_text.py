"""Partitions of a program as one line of text."""

from intaglio.ir import Op
from intaglio.plan import Partition


def shown(partition: Partition) -> str:
    """``linear + dequantize + loop(add relu)``."""
    return " + ".join(map(_kind, partition.ops))


def _kind(op: Op) -> str:
    return f"loop({' '.join(step.kind for step in op.body.ops)})" if op.kind == "loop" else op.kind
