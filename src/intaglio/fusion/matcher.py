"""The pattern matcher, which works on any graph with a `GraphView`. Matching never modifies a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from intaglio.fusion.pattern import Pattern
from intaglio.ir import TensorType

N = TypeVar("N", bound=Hashable)


class GraphView(Protocol[N]):
    """Queries about a graph that the matcher and the side conditions use."""

    def kinds(self, node: N) -> tuple[str, ...]:
        """Return the names by which a pattern can refer to the operator; none for inputs and constants."""

    def operands(self, node: N) -> tuple[N | None, ...]:
        """Return the tensor operands; ``None`` for an operand that is left out."""

    def readers(self, node: N) -> int:
        """Return the number of operators and outputs that read this value."""

    def constant(self, node: N) -> bool:
        """Return whether the value is constant."""

    def position(self, node: N) -> int:
        """Return the position in execution order."""

    def type_of(self, node: N) -> TensorType:
        """Return shape and element type of a tensor."""

    def attributes(self, node: N) -> Mapping[str, Any]:
        """Return the attributes of an operator, as its record binds them."""

    def array(self, node: N) -> np.ndarray:
        """Return the array of a constant."""


@dataclass(frozen=True)
class Match(Generic[N]):
    """A match of a pattern: its nodes, root first, and the values bound to its names."""

    nodes: tuple[N, ...]
    bound: tuple[tuple[str, N], ...]

    @property
    def root(self) -> N:
        """Return the node that the pattern's root matched."""
        return self.nodes[0]

    @property
    def anchor(self) -> N:
        """Return the operator furthest from the root along the pattern."""
        return self.nodes[-1]

    def __getitem__(self, name: str) -> N:
        return dict(self.bound)[name]


def match(pattern: Pattern, root: N, view: GraphView[N]) -> Match[N] | None:
    """Return the first match of a pattern at ``root``, or ``None``.

    Inner operators must not be read outside of the match, unless they are ``shared``.
    """
    return next(matches(pattern, root, view), None)


def matches(pattern: Pattern, root: N, view: GraphView[N]) -> Iterator[Match[N]]:
    """Yield the matches of a pattern at ``root``: at most one, or with ``any_operand`` one per operand that fits."""
    for choice in _choices(pattern, root, view):
        state = _MatchState(view)
        if state.match(choice, root, True) and state.is_private():
            yield Match(tuple(state.nodes), tuple(state.bound.items()))


def _choices(pattern: Pattern, root: N, view: GraphView[N]) -> Iterator[Pattern]:
    """Yield the pattern once per operand position if its root has ``any_operand``, else the pattern itself."""
    if not pattern.any_operand:
        yield pattern
        return
    for place in range(len(view.operands(root))):
        yield replace(pattern, operands=(*[Pattern()] * place, *pattern.operands), any_operand=False)


@dataclass
class _MatchState(Generic[N]):
    """State of one search: the values bound to names, and the operators matched so far, root first."""

    view: GraphView[N]
    bound: dict[str, N] = field(default_factory=dict)
    nodes: list[N] = field(default_factory=list)
    shared: set[N] = field(default_factory=set)

    def match(self, pattern: Pattern, node: N | None, root: bool = False) -> bool:
        """Match a pattern at a node, and extend the state if that succeeds."""
        if node is None or (pattern.is_constant and not self.view.constant(node)):
            return False
        if pattern.name and self.bound.setdefault(pattern.name, node) != node:
            return False
        if not pattern.kinds:
            return True
        if not set(pattern.kinds).intersection(self.view.kinds(node)):
            return False
        if node in self.nodes:
            return bool(pattern.name)  # the node and its operands were matched before
        if not (root or pattern.name or pattern.shared or self.view.readers(node) == 1):
            return False
        if pattern.where is not None and not pattern.where(node):
            return False
        return self._match_operands(pattern, node)

    def _match_operands(self, pattern: Pattern, node: N) -> bool:
        """Match the operands in each of their orders, restoring the state before each attempt."""
        bound, nodes = dict(self.bound), list(self.nodes)
        shared = self.shared | {node} if pattern.shared else self.shared
        for operands in _operand_orders(pattern, node, self.view):
            self.bound, self.nodes, self.shared = dict(bound), [*nodes, node], set(shared)
            pairs = zip(pattern.operands, operands, strict=False)
            if len(operands) >= len(pattern.operands) and all(self.match(inner, value) for inner, value in pairs):
                return True
        return False

    def is_private(self) -> bool:
        """Return whether inner operators that are not shared are only read inside of the match."""
        read = Counter(value for node in self.nodes for value in self.view.operands(node))
        return all(node in self.shared or self.view.readers(node) == read[node] for node in self.nodes[1:])


def _operand_orders(pattern: Pattern, node: N, view: GraphView[N]) -> list[tuple[N | None, ...]]:
    """Return the operands as written, and swapped for commutative operators, starting with the later operand first."""
    operands = view.operands(node)
    if not pattern.commutative or len(operands) < 2:
        return [operands]
    a, b, *rest = operands
    orders = [(a, b, *rest), (b, a, *rest)]
    if a is not None and b is not None and view.position(b) > view.position(a):
        orders.reverse()
    return orders
