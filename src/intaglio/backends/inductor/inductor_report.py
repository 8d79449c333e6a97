"""Report about the implementation of every operator of a reference in a program that Inductor compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from intaglio.backends.inductor.inductor_graph import LABEL, is_int8_layer
from intaglio.fxgraph.node_info import origin
from intaglio.fxgraph.nodes import operator
from intaglio.ir import Origin

REPORTED_KINDS = {
    "int8 call": "a layer computed by a call of oneDNN on quantized values",
    "fused": "computed by the call of the layer in front of it",
    "generated": "in a loop of the C++ that Inductor generates",
    "float call": "computed by a library, in float",
    "callback": "computed by Python while the model runs",
}
"""Kinds of implementation and their descriptions."""
KIND_PRIORITY = ("int8 call", "callback", "float call", "fused", "generated")
"""Order in which the kind of an operator with several parts is chosen."""
INT8_CALLS = {"qconv": "qconv", "qconv_binary": "qconv", "qlinear": "qlinear", "qlinear_binary": "qlinear"}
"""Name of Inductor's lowering -> name in the report."""
FLOAT_CALLS = (
    "aten.convolution",
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten._scaled_dot_product",
    "mkldnn.",
    "mkl.",
)
NON_OPERATOR_PREFIXES = (
    "quantized_decomposed.",
    "intaglio.quantize",
    "intaglio.dequantize",
    "aten.sym_size",
)
"""Prefixes of nodes that are not operators of the model: quantize, dequantize and sizes."""


@dataclass(frozen=True)
class Placed:
    """Implementation of one operator of the model.

    Attributes:
        origin: module, operator and source line.
        kind: one of `REPORTED_KINDS`.
        call: the operators that an int8 call computes, in order; empty for other kinds.
    """

    origin: Origin
    kind: str
    call: str = ""

    def __str__(self) -> str:
        return f"{self.kind:10}  {self.origin}" + (f"  {self.call}" if self.call else "")


@dataclass(frozen=True)
class InductorReport:
    """Implementation of every operator of the model in execution order, and notes about the whole program."""

    operators: tuple[Placed, ...]
    notes: tuple[str, ...] = field(default=())

    def of(self, kind: str) -> tuple[Placed, ...]:
        """Return the operators of a kind."""
        return tuple(placed for placed in self.operators if placed.kind == kind)

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of operators of each kind."""
        found = Counter(placed.kind for placed in self.operators)
        return {kind: found[kind] for kind in REPORTED_KINDS}

    @property
    def summary(self) -> str:
        """Return the number of operators of each kind that occurs, as text."""
        return ", ".join(f"{count} {kind}" for kind, count in self.counts.items() if count)

    def __str__(self) -> str:
        return "\n".join([self.summary, *self.notes, *map(str, self.operators)])


def report_of(graph: fx.Graph, made: Iterable[fx.Node], notes: tuple[str, ...] = ()) -> InductorReport:
    """Return the report about a compiled graph.

    Args:
        graph: the graph given to Inductor, with `LABEL` on every node.
        made: the nodes for which Inductor generates code.
        notes: notes about the whole program.
    """
    targets: dict[str, list[Any]] = {}
    for node in made:
        if node.op == "call_function" and (label := node.meta.get("custom", {}).get(LABEL)):
            targets.setdefault(label, []).append(node.target)
    fused: dict[fx.Node, Any] = {}
    for layer in (node for node in graph.nodes if is_int8_layer(node)):
        chain = _nodes_of_call(layer, targets)
        fused.update((node, _int8_call(targets[chain[-1].name])) for node in chain)
    return InductorReport(tuple(_merged_parts(_implementations(graph, targets, fused))), notes)


def _implementations(
    graph: fx.Graph, targets: Mapping[str, list[Any]], fused: Mapping[fx.Node, Any]
) -> Iterator[tuple[Placed, bool]]:
    """Yield every node that computes, and whether it is only a part of the operator that it comes from."""
    for node in graph.nodes:
        where = origin(node)
        if not where.operator or "." not in operator(node) or operator(node).startswith(NON_OPERATOR_PREFIXES):
            continue
        call = fused.get(node)
        if call is None:
            placed = Placed(where, _kind(targets.get(node.name, ())))
        elif is_int8_layer(node):
            placed = Placed(where, "int8 call", _call_text(call))
        else:
            placed = Placed(where, "fused")
        yield placed, operator(node) != where.operator


def _merged_parts(parts: Iterable[tuple[Placed, bool]]) -> list[Placed]:
    """Merge consecutive parts of one operator. The merged entry has the kind that comes first in `KIND_PRIORITY`."""
    found: list[tuple[Placed, bool]] = []
    for entry, is_part in parts:
        if not found or found[-1][0].origin != entry.origin or not (is_part or found[-1][1]):
            found.append((entry, is_part))
            continue
        before, both_parts = found[-1][0], is_part and found[-1][1]
        found[-1] = min(before, entry, key=lambda placed: KIND_PRIORITY.index(placed.kind)), both_parts
    return [placed for placed, _ in found]


def _nodes_of_call(layer: fx.Node, targets: Mapping[str, list[Any]]) -> list[fx.Node]:
    """Return the layer and the following nodes up to the one that is labelled with the int8 call, or nothing if no call
    is found."""
    chain = [layer]
    while _int8_call(targets.get(chain[-1].name, ())) is None:
        if chain[-1].name in targets or len(chain[-1].users) != 1:
            return []
        chain.append(next(iter(chain[-1].users)))
    return chain


def _int8_call(targets: Any) -> Any:
    """Return the first lowering of a quantized layer among these targets, or ``None``. Lowerings are partial
    functions."""
    found: Iterator[Any] = (target for target in targets if _lowering(target) in INT8_CALLS)
    return next(found, None)


def _lowering(target: Any) -> str:
    return getattr(getattr(target, "func", None), "__name__", "")


def _call_text(target: Any) -> str:
    """Return the operators and the result type of an int8 call, for example ``qconv + sum + relu -> uint8``."""
    given = target.args[0].kwargs
    steps = [given.get(key) for key in ("binary_op_name", "postop_name", "unary_op_name")]
    dtype = str(given.get("output_dtype", "")).removeprefix("torch.")
    names = [step for step in steps if step and step != "none"]
    return " + ".join([INT8_CALLS[_lowering(target)], *names]) + f" -> {dtype}"


def _kind(targets: Any) -> str:
    """Return the kind of implementation from the targets that Inductor derived from a node."""
    names = [str(target) for target in targets]
    if any(name.startswith("intaglio.") for name in names):
        return "callback"
    lowered = any(_lowering(target) and "pool" not in _lowering(target) for target in targets)
    return "float call" if lowered or any(name.startswith(FLOAT_CALLS) for name in names) else "generated"
