"""Patterns over any graph: small DAGs of operator names, matched from their root towards the inputs.

A pattern is a value (`op`, `seq`, `any`, `const`); a graph shows itself through a `View`. Matching never writes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from intaglio.ir.graph import Graph, prune
from intaglio.ir.verify import verify

N = TypeVar("N", bound=Hashable)


class View(Protocol[N]):
    """What a matcher needs to see of a graph."""

    def kinds(self, node: N) -> tuple[str, ...]:
        """Names a pattern may call the operator by; none for what is no operator (inputs, constants)."""

    def operands(self, node: N) -> tuple[N | None, ...]:
        """Tensor operands; ``None`` for one left out."""

    def readers(self, node: N) -> int:
        """How many operators and outputs read this value."""

    def constant(self, node: N) -> bool:
        """Whether the value never changes."""

    def position(self, node: N) -> int:
        """Place in execution order."""


@dataclass(frozen=True)
class Pattern:
    """``kinds`` empty: a leaf. ``name`` binds; leaves, or operators, of one name must be one value (a diamond)."""

    kinds: tuple[str, ...] = ()
    operands: tuple[Pattern, ...] = ()
    name: str = ""
    is_constant: bool = False
    where: Callable[[object], bool] | None = None
    commutative: bool = False

    def size(self) -> int:
        """Operators in the pattern."""
        return bool(self.kinds) + sum(operand.size() for operand in self.operands)


def any(name: str = "") -> Pattern:
    """Any value."""
    return Pattern(name=name)


def const(name: str = "") -> Pattern:
    """A value that never changes."""
    return Pattern(name=name, is_constant=True)


def op(
    kinds: str | Iterable[str],
    *operands: Pattern,
    name: str = "",
    where: Callable[[object], bool] | None = None,
    commutative: bool = False,
) -> Pattern:
    """An operator of one of these kinds. Operands beyond those given may be anything."""
    names = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    return Pattern(names, operands, name, where=where, commutative=commutative)


def seq(*kinds: str | Iterable[str]) -> Pattern:
    """A chain through first operands: ``seq("conv2d", "clamp")`` is ``op("clamp", op("conv2d", any()))``."""
    pattern = any("x")
    for entry in kinds:
        pattern = op(entry, pattern)
    return pattern


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
        """The operator furthest from the root along the pattern."""
        return self.nodes[-1]

    def __getitem__(self, name: str) -> N:
        return dict(self.bound)[name]


def match(pattern: Pattern, root: N, view: View[N]) -> Match[N] | None:
    """The pattern at ``root``, or ``None``. Inner operators must have no reader outside the pattern."""
    bound: dict[str, N] = {}
    nodes: list[N] = []
    if not _match(pattern, root, view, bound, nodes, True):
        return None
    read = [value for node in nodes for value in view.operands(node)]
    alone = all(view.readers(node) == read.count(node) for node in nodes[1:])
    return Match(tuple(nodes), tuple(bound.items())) if alone else None


def _match(pattern: Pattern, node: N | None, view: View[N], bound: dict[str, N], nodes: list[N], root: bool) -> bool:
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
    for operands in _orders(pattern, node, view):
        bound.clear()
        bound.update(saved_bound)
        nodes[:] = [*saved_nodes, node]
        pairs = zip(pattern.operands, operands, strict=False)
        if len(operands) >= len(pattern.operands) and all(
            _match(inner, operand, view, bound, nodes, False) for inner, operand in pairs
        ):
            return True
    return False


def _orders(pattern: Pattern, node: N, view: View[N]) -> list[tuple[N | None, ...]]:
    """Operands as written; for commutative operators the operand made later first."""
    operands = view.operands(node)
    if not pattern.commutative or len(operands) < 2:
        return [operands]
    a, b, *rest = operands
    orders = [(a, b, *rest), (b, a, *rest)]
    if a is not None and b is not None and view.position(b) > view.position(a):
        orders.reverse()
    return orders


Pass = Callable[[Graph], tuple[Graph, int]]


def run_passes(graph: Graph, passes: Iterable[Pass]) -> tuple[Graph, dict[str, int]]:
    """Each pass in turn, the verifier after every one; returns the graph and the rewrites each pass made."""
    counts = {}
    for step in passes:
        graph, counts[step.__name__] = step(graph)
        graph = verify(prune(graph), after=step.__name__)
    return graph, counts
