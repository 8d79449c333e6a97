"""Text form of a graph: one line per operator, deterministic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from intaglio.ir.graph import Graph, Op

MOST_VALUES = 4
"""Number of values of a constant that its line still shows."""


def graph_text(graph: Graph) -> str:
    """Return the text of a graph: inputs, constants, operators in order, outputs."""
    lines = [f"input %{name}: {graph.types[name]}" for name in graph.inputs]
    lines += [f"const %{name}: {graph.types[name]}{_few(graph, name)}" for name in graph.constants]
    lines += [line for op in graph.ops for line in op_lines(op, graph)]
    lines.append("return " + ", ".join(f"%{name}" for name in graph.outputs))
    return "\n".join(lines) + "\n"


def op_lines(op: Op, graph: Graph) -> list[str]:
    """Return the lines of one operator: ``%y = kind(%x, ...) {attrs}: type  # origin``, then its indented body."""
    left = ", ".join(f"%{name}" for name in op.outputs)
    right = ", ".join(f"%{name}" for name in op.inputs)
    types = ", ".join(str(graph.types[name]) for name in op.outputs)
    origin = f"  # {op.origin}" if str(op.origin) else ""
    lines = [f"{left} = {op.kind}({right}){_attrs(op.attrs)}: {types}{origin}"]
    if op.body is not None:
        lines += ["  " + line for line in graph_text(op.body).splitlines()]
    return lines


def _attrs(attrs: Mapping[str, Any]) -> str:
    if not attrs:
        return ""
    return " {" + ", ".join(f"{key}={_value(attrs[key])}" for key in sorted(attrs)) + "}"


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_value, value)) + ")"
    return str(value)


def _few(graph: Graph, name: str) -> str:
    if math.prod(graph.constants.layout(name)[0]) > MOST_VALUES:
        return ""
    return " = " + ", ".join(f"{v:.7g}" for v in graph.constants[name].ravel())
