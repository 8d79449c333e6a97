"""The matcher: finds patterns in any graph that shows itself through a `GraphView`. Matching never writes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from intaglio.fusion.pattern import Pattern
from intaglio.ir import TensorType

N = TypeVar("N", bound=Hashable)


class GraphView(Protocol[N]):
    """What the matcher and the conditions of fusion rows need to see of a graph."""

    def kinds(self, node: N) -> tuple[str, ...]:
        """Return the names a pattern may call the operator by; none for inputs and constants."""

    def operands(self, node: N) -> tuple[N | None, ...]:
        """Return the tensor operands; ``None`` for one that is left out."""

    def readers(self, node: N) -> int:
        """Return how many operators and outputs read this value."""

    def constant(self, node: N) -> bool:
        """Return whether the value never changes."""

    def position(self, node: N) -> int:
        """Return the place in execution order."""

    def type_of(self, node: N) -> TensorType:
        """Return shape and element type of a tensor."""

    def attributes(self, node: N) -> Mapping[str, Any]:
        """Return the attributes of an operator as its record binds them."""

    def array(self, node: N) -> np.ndarray:
        """Return the elements of a constant."""


@dataclass(frozen=True)
class Match(Generic[N]):
    """The nodes a pattern took, root first, and what its names are bound to."""

    nodes: tuple[N, ...]
    bound: tuple[tuple[str, N], ...]

    @property
    def root(self) -> N:
        return self.nodes[0]

    @property
    def anchor(self) -> N:
        """Return the operator furthest from the root along the pattern."""
        return self.nodes[-1]

    def __getitem__(self, name: str) -> N:
        return dict(self.bound)[name]


def match(pattern: Pattern, root: N, view: GraphView[N]) -> Match[N] | None:
    """Match a pattern at ``root``, or return ``None``. Inner operators must have no reader outside the pattern."""
    bound: dict[str, N] = {}
    nodes: list[N] = []
    if not _match(pattern, root, view, bound, nodes, True):
        return None
    read = [value for node in nodes for value in view.operands(node)]
    private = all(view.readers(node) == read.count(node) for node in nodes[1:])
    return Match(tuple(nodes), tuple(bound.items())) if private else None


def _match(
    pattern: Pattern, node: N | None, view: GraphView[N], bound: dict[str, N], nodes: list[N], root: bool
) -> bool:
    if node is None or (pattern.is_constant and not view.constant(node)):
        return False
    if pattern.name and bound.setdefault(pattern.name, node) != node:
        return False
    if not pattern.kinds:
        return True
    if not set(pattern.kinds).intersection(view.kinds(node)):
        return False
    if node in nodes:
        return bool(pattern.name)  # bound to this node before, with its operands
    if not (root or pattern.name or view.readers(node) == 1):
        return False
    if pattern.where is not None and not pattern.where(node):
        return False
    saved_bound, saved_nodes = dict(bound), list(nodes)
    for operands in _operand_orders(pattern, node, view):
        bound.clear()
        bound.update(saved_bound)
        nodes[:] = [*saved_nodes, node]
        pairs = zip(pattern.operands, operands, strict=False)
        if len(operands) >= len(pattern.operands) and all(
            _match(inner, operand, view, bound, nodes, False) for inner, operand in pairs
        ):
            return True
    return False


def _operand_orders(pattern: Pattern, node: N, view: GraphView[N]) -> list[tuple[N | None, ...]]:
    """Return the operands as written; for commutative operators also swapped, the one that is made later first."""
    operands = view.operands(node)
    if not pattern.commutative or len(operands) < 2:
        return [operands]
    a, b, *rest = operands
    orders = [(a, b, *rest), (b, a, *rest)]
    if a is not None and b is not None and view.position(b) > view.position(a):
        orders.reverse()
    return orders
