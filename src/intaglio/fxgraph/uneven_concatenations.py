"""Concatenations of values with ranges too different for one scale, which stay in float if only floats are read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import fx

from intaglio import numerics
from intaglio.fxgraph.node_info import origin
from intaglio.fxgraph.nodes import record_of

Extrema = tuple[float, float]

FEWEST_VALUES = 16
"""Number of quantized values that the scale of a concatenation must leave to every operand. An operand with fewer has
less than 4 of the 8 bits; boxes in pixels beside scores in 0..1 leave one or two to the scores."""


def is_concatenation(node: fx.Node) -> bool:
    """Return whether a node joins operands that share the quantization parameters of the result."""
    record = record_of(node)
    return record is not None and record.variadic and record.shares_qparams


def is_uneven(operands: Sequence[Extrema]) -> bool:
    """Return whether the joint scale of operands leaves too few quantized values to one of them.

    Operands that are constant in the data, or have no finite values, do not count.
    """
    seen = [(low, high) for low, high in operands if low < high]
    if len(seen) < 2:
        return False
    joint = max(0.0, *(high for _, high in seen)) - min(0.0, *(low for low, _ in seen))
    return min(high - low for low, high in seen) * numerics.QUANT_STEPS < FEWEST_VALUES * joint


def connected_values(graph: fx.Graph, concatenations: Collection[str]) -> frozenset[fx.Node]:
    """Return the values that are computed for some concatenations, or from them.

    They reach from the convolutions, linear layers and products in front, whose results are among them, to those
    behind. They do not depend on what a recipe leaves in float.

    Args:
        graph: the graph.
        concatenations: node names of concatenations.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes if concatenations else ():
        follows = node.op == "call_function" and not _is_anchor(node) and found.intersection(node.all_input_nodes)
        if node.name in concatenations or follows:
            found.add(node)
    for node in reversed(graph.nodes):
        if node in found and not _is_anchor(node):
            found.update(node.all_input_nodes)
    return frozenset(found)


def _is_anchor(node: fx.Node) -> bool:
    record = record_of(node)
    return record is not None and record.anchor


def notes_on_concatenations(found: Mapping[fx.Node, Sequence[Extrema]]) -> tuple[str, ...]:
    """Return a note for each concatenation that stays in float because of the ranges of its operands."""
    return tuple(
        f"{origin(node).path or 'model'} ({origin(node).operator}): ranges of {_listed(operands)} are too different "
        "for one scale, so the concatenation and what belongs to it stay in float"
        for node, operands in found.items()
    )


def _listed(operands: Iterable[Extrema]) -> str:
    return " and ".join(dict.fromkeys(f"{low:.3g} to {high:.3g}" for low, high in operands))
