"""Verifier for the structure of a graph and the element types of its operators; it runs after every pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from intaglio.ir.graph import Graph, Op
from intaglio.ir.types import I32, U8, DType


@dataclass(frozen=True)
class TypeRule:
    """Element types of an operator's operands and results.

    Attributes:
        operands: Allowed element types of each operand.
        results: Allowed element types of the results.
        optional: Allowed element types of an optional last operand.
        symmetric: Operands that kernels read like weights: zero point 128, quantized values 1..255.
        outputs: Smallest and largest number of results.
        keeps_type: The result has the element type of the first operand.
    """

    operands: tuple[tuple[DType, ...], ...]
    results: tuple[DType, ...]
    optional: tuple[DType, ...] = ()
    symmetric: tuple[int, ...] = ()
    outputs: tuple[int, int] = (1, 1)
    keeps_type: bool = False


Rules = Callable[[Op], TypeRule | None]
"""Returns the type rule of an operator, or ``None`` if it accepts any types."""


class VerifyError(AssertionError):
    """Raised for an invalid graph that a pass produced; this is always a bug in intaglio."""


def verify_graph(graph: Graph, rules: Rules, body_rules: Rules, after: str = "") -> Graph:
    """Return the graph if it is valid; otherwise raise `VerifyError` with the pass, the operator and the rule.

    Args:
        graph: The graph to check.
        rules: Returns the type rule of an operator of the graph.
        body_rules: Returns the type rule of an operator in the body of a loop.
        after: Name of the pass that produced the graph.
    """
    place = f" after {after}" if after else ""
    defined = {*graph.inputs, *graph.constants}
    _require(len(defined) == len(graph.inputs) + len(graph.constants), f"an input is also a constant{place}")
    for name in defined:
        _require(name in graph.types, f"%{name} has no type{place}")
    for op in graph.ops:
        label = f"{op.kind} -> %{', '.join(op.outputs)}{place}"
        _check_names(op, graph, defined, label)
        if op.body is not None:
            _check_body_signature(op, op.body, graph, label)
            verify_graph(op.body, body_rules, body_rules, f"{op.kind}{place}")
        if (rule := rules(op)) is not None:
            _check_types(op, rule, graph, label)
        defined.update(op.outputs)
    for name in graph.outputs:
        _require(name in defined, f"output %{name} is not computed{place}")
        _require(
            graph.types[name].dtype is not I32 or graph.types[name].q is None,
            f"output %{name} is an accumulator, which only its own partition may read",
        )
    _check_accumulators(graph, place)
    for name in graph.constants:
        shape, _ = graph.constants.layout(name)
        _require(
            shape == graph.types[name].shape,
            f"constant %{name} has shape {list(shape)}, but its type is {graph.types[name]}{place}",
        )
    return graph


def _check_names(op: Op, graph: Graph, defined: set[str], label: str) -> None:
    """Check that operands are defined before, and that results are defined once and have types."""
    for name in op.inputs:
        _require(name in defined, f"{label}: %{name} is read before it is computed")
    for name in op.outputs:
        _require(name not in defined, f"{label}: %{name} is computed twice")
        _require(name in graph.types, f"{label}: %{name} has no type")


def _check_types(op: Op, rule: TypeRule, graph: Graph, label: str) -> None:
    """Check the element types of operands and results against a rule."""
    operands = rule.operands
    if rule.optional and len(op.inputs) > len(operands):
        operands = (*operands, rule.optional)
    _require(len(op.inputs) == len(operands), f"{label}: it expects {len(operands)} operands, but has {len(op.inputs)}")
    for name, allowed in zip(op.inputs, operands, strict=True):
        if (dtype := graph.types[name].dtype) not in allowed:
            raise VerifyError(f"{label}: %{name} is {dtype}; allowed are {', '.join(map(str, allowed))}")
    for index in rule.symmetric:
        q = graph.types[op.inputs[index]].qparams
        around = q.zeros == (128,) and q.qmin >= 1 and q.qmin + q.qmax == 256
        _require(around, f"{label}: %{op.inputs[index]} must be quantized symmetrically around 128")
    least, most = rule.outputs
    _require(
        least <= len(op.outputs) <= most, f"{label}: it has {len(op.outputs)} results, but must have {least} to {most}"
    )
    for result in (graph.types[name] for name in op.outputs):
        if result.dtype not in rule.results:
            results = ", ".join(map(str, rule.results))
            raise VerifyError(f"{label}: its result is {result.dtype}; allowed are {results}")
        if rule.keeps_type:
            _require(
                result.dtype is graph.types[op.inputs[0]].dtype,
                f"{label}: data movement must not change the element type",
            )
        if result.dtype in (U8, I32):
            _require(result.q is not None, f"{label}: quantized values need quantization parameters")


def _check_body_signature(op: Op, body: Graph, graph: Graph, label: str) -> None:
    """Check that the body's inputs and outputs have the types of the operator's operands and results, in order."""
    for outer, inner in ((op.inputs, body.inputs), (op.outputs, body.outputs)):
        same = [graph.types[name] for name in outer] == [body.types[name] for name in inner]
        _require(len(outer) == len(inner) and same, f"{label}: the operands and results of its body have other types")


def _check_accumulators(graph: Graph, place: str) -> None:
    """Check that every accumulator has exactly one reader, since it never leaves its partition."""
    users = graph.users()
    for op in graph.ops:
        for name in op.outputs:
            kind = graph.types[name]
            if kind.dtype is I32 and kind.q is not None:
                _require(
                    len(users[name]) == 1,
                    f"accumulator %{name} has {len(users[name])} readers, but must have one{place}",
                )


def _require(condition: bool, text: str) -> None:
    """Raise `VerifyError` unless the condition holds."""
    if not condition:
        raise VerifyError(text)
