"""Interpreter of the integer graph: reference implementations in NumPy, which every kernel must match bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from intaglio.ir import Expression, Graph, Op, evaluate
from intaglio.ops.opdef import OpDef

Island = Callable[[Op, Sequence[np.ndarray]], Sequence[np.ndarray]]


def run_op(
    op: Op,
    args: Sequence[np.ndarray],
    graph: Graph,
    ops: Mapping[str, OpDef],
    symbols: Mapping[str, int] | None = None,
) -> Sequence[np.ndarray]:
    """Run the reference implementation of an operator and return all of its results.

    ``symbols`` are the values of the free dimensions in its attributes.

    Raises:
        ValueError: The operator has no reference implementation.
    """
    op = replace(op, attrs={key: _fixed(value, symbols) for key, value in op.attrs.items()}) if symbols else op
    name = op.attrs["operator"] if op.is_host else op.kind
    if name not in ops or (reference := ops[name].reference) is None:
        raise ValueError(f"the operator {name} has no reference implementation")
    found = reference(op, args, [graph.types[name] for name in op.inputs], graph.types[op.output])
    return found if isinstance(found, tuple) else [found]


def _fixed(value: Any, symbols: Mapping[str, int]) -> Any:
    """Return an attribute with its dimensions evaluated."""
    if isinstance(value, tuple):
        return tuple(_fixed(item, symbols) for item in value)
    return evaluate(value, symbols) if isinstance(value, Expression) else value


def sizes_of(graph: Graph, inputs: Sequence[np.ndarray]) -> dict[str, int]:
    """Return the values of free dimensions that are an axis of an input, or of which such an axis is a multiple."""
    found: dict[str, int] = {}
    for name, array in zip(graph.inputs, inputs, strict=True):
        for dim, size in zip(graph.types[name].shape, array.shape, strict=True):
            if isinstance(dim, Expression) and len(dim.terms) == 1 and len(dim.terms[0][0]) == 1:
                (((atom,), factor),) = dim.terms
                if isinstance(atom, str):
                    found.setdefault(atom, size // factor)
    return found


def interpret(
    graph: Graph,
    inputs: Sequence[np.ndarray],
    ops: Mapping[str, OpDef],
    island: Island | None = None,
    watch: Callable[[str, np.ndarray], None] | None = None,
) -> list[np.ndarray]:
    """Run a graph and return its outputs in logical (channels second) order.

    Args:
        graph: The graph.
        inputs: Arrays of its inputs.
        ops: Operator records by name, including those of host operators.
        island: Runs a float subgraph: ``island(op, arrays)`` returns its results.
        watch: Called as ``watch(name, array)`` with every value that is computed.

    Returns:
        The arrays of the graph's outputs.
    """
    values: dict[str, np.ndarray] = {**graph.constants, **dict(zip(graph.inputs, inputs, strict=True))}
    symbols = sizes_of(graph, inputs)
    for op in graph.ops:
        args = [values[name] for name in op.inputs]
        if op.is_island:
            if island is None:
                raise ValueError(
                    f"the graph has the float island {op.attrs['key']}, but no function to run islands is given"
                )
            results = island(op, args)
        else:
            results = run_op(op, args, graph, ops, symbols)
        for name, array in zip(op.outputs, results, strict=True):
            values[name] = array
            if watch is not None:
                watch(name, array)
    return [values[name] for name in graph.outputs]
