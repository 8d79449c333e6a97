"""Concatenations of values with ranges too different for one scale, which stay in float if only floats are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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


def notes_on_concatenations(found: Mapping[fx.Node, Sequence[Extrema]]) -> tuple[str, ...]:
    """Return a note for each concatenation that stays in float because of the ranges of its operands."""
    return tuple(
        f"{origin(node).path or 'model'} ({origin(node).operator}): ranges of {listed_ranges(operands)} are too "
        "different for one scale, so the concatenation and what belongs to it stay in float"
        for node, operands in found.items()
    )


def listed_ranges(operands: Iterable[Extrema]) -> str:
    """Return ranges as text, each of them once."""
    return " and ".join(dict.fromkeys(f"{low:.3g} to {high:.3g}" for low, high in operands))
