"""Operators of the integer graph as the matcher sees them. A node is the name of a value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from intaglio.ir import Graph, Op, TensorType


class ValueView:
    """Answers what a matcher asks of the values of an integer graph, whatever its nodes stand for.

    ``ops``: those of the graph, or those of a pass that is rewriting it. ``place``: the position of each node.
    """

    def __init__(self, graph: Graph, ops: Sequence[Op], place: Mapping[str, int]) -> None:
        self.graph, self.ops, self._place = graph, list(ops), place

    def readers(self, node: str) -> int:
        return self._readers[node]

    def constant(self, node: str) -> bool:
        return node in self.graph.constants

    def position(self, node: str) -> int:
        return self._place.get(node, -1)

    def type_of(self, node: str) -> TensorType:
        return self.graph.types[node]

    def array(self, node: str) -> np.ndarray:
        return self.graph.constants[node]

    @cached_property
    def _readers(self) -> Counter[str]:
        return Counter([*(name for op in self.ops for name in op.inputs), *self.graph.outputs])


class IntegerGraphView(ValueView):
    """Shows the operators of an integer graph, or of the body of a loop, as a `GraphView` whose nodes are values.

    ``ops``: in place of those of the graph, where a pass is rewriting them.
    """

    def __init__(self, graph: Graph, ops: Sequence[Op] | None = None) -> None:
        ops = graph.ops if ops is None else ops
        super().__init__(graph, ops, {name: index for index, op in enumerate(ops) for name in op.outputs})

    def op(self, node: str) -> Op:
        """Return the operator that makes a value."""
        return self.ops[self._place[node]]

    def between(self, first: str, last: str) -> Sequence[Op]:
        """Return the operators behind the one that makes ``first`` and in front of the one that makes ``last``."""
        return self.ops[self._place[first] + 1 : self._place[last]]

    def users(self, node: str) -> list[Op]:
        """Return the operators that read a value, in order."""
        return [op for op in self.ops if node in op.inputs]

    def kinds(self, node: str) -> tuple[str, ...]:
        return (self.op(node).kind,) if node in self._place else ()

    def operands(self, node: str) -> tuple[str, ...]:
        return self.op(node).inputs if node in self._place else ()

    def attributes(self, node: str) -> Mapping[str, Any]:
        return self.op(node).attrs

    @property
    def outputs(self) -> Collection[str]:
        """Return the results of the graph."""
        return self.graph.outputs
