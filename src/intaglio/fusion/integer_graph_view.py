"""Views of the integer graph for the matcher. A node is the name of a value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from intaglio.ir import Graph, Op, TensorType


class ValueView:
    """Implements the queries of a `GraphView` about values of an integer graph.

    Args:
        graph: The graph.
        ops: Its operators, or those of a pass that is rewriting it.
        place: Position of each node in execution order.
    """

    def __init__(self, graph: Graph, ops: Sequence[Op], place: Mapping[str, int]) -> None:
        self.graph, self.ops, self._place = graph, list(ops), place

    def readers(self, node: str) -> int:
        """Return the number of operators and outputs that read this value."""
        return self._readers[node]

    def constant(self, node: str) -> bool:
        """Return whether the value is constant."""
        return node in self.graph.constants

    def position(self, node: str) -> int:
        """Return the position in execution order; -1 for inputs and constants."""
        return self._place.get(node, -1)

    def type_of(self, node: str) -> TensorType:
        """Return the type of the value."""
        return self.graph.types[node]

    def array(self, node: str) -> np.ndarray:
        """Return the array of a constant."""
        return self.graph.constants[node]

    @cached_property
    def _readers(self) -> Counter[str]:
        return Counter([*(name for op in self.ops for name in op.inputs), *self.graph.outputs])


class IntegerGraphView(ValueView):
    """View of the operators of an integer graph, or of a loop body, whose nodes are values.

    Args:
        graph: The graph.
        ops: Replaces the operators of the graph while a pass is rewriting it.
    """

    def __init__(self, graph: Graph, ops: Sequence[Op] | None = None) -> None:
        ops = graph.ops if ops is None else ops
        super().__init__(graph, ops, {name: index for index, op in enumerate(ops) for name in op.outputs})

    def op(self, node: str) -> Op:
        """Return the operator that computes a value."""
        return self.ops[self._place[node]]

    def ops_between(self, first: str, last: str) -> Sequence[Op]:
        """Return the operators after the one that computes ``first`` and before the one that computes ``last``."""
        return self.ops[self._place[first] + 1 : self._place[last]]

    def users(self, node: str) -> list[Op]:
        """Return the operators that read a value, in order."""
        return [op for op in self.ops if node in op.inputs]

    def kinds(self, node: str) -> tuple[str, ...]:
        """Return the kind of the operator that computes the value; none for inputs and constants."""
        return (self.op(node).kind,) if node in self._place else ()

    def operands(self, node: str) -> tuple[str, ...]:
        """Return the operands of that operator; none for inputs and constants."""
        return self.op(node).inputs if node in self._place else ()

    def attributes(self, node: str) -> Mapping[str, Any]:
        """Return the attributes of that operator."""
        return self.op(node).attrs

    @property
    def outputs(self) -> Collection[str]:
        """Return the outputs of the graph."""
        return self.graph.outputs
