"""User patterns: the operators they match, their settings and callbacks, and their integer reference implementation."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from intaglio.argument_checks import check_arguments, check_fields
from intaglio.errors import SelectorError, UnsupportedError
from intaglio.fusion.matcher import Match, match
from intaglio.fusion.pattern import Pattern, const, op, wildcard
from intaglio.fusion.table import GRAPH_FUSIONS
from intaglio.fxgraph.fx_graph_view import FxGraphView
from intaglio.fxgraph.node_info import info, known_type, origin, tensor_type, update_info
from intaglio.fxgraph.nodes import arguments, is_constant, known_record, operator, resolve_dims
from intaglio.ir import DType, Origin
from intaglio.ops import BY_TARGET, OPS, Call, OpDef
from intaglio.quant.recipes.settings import Setting
from intaglio.torch_private import schema_of


class ParameterChooser(Protocol):
    """Protocol of a pattern's `calibration`; `intaglio.calibration.CalibrationCallback` is its base class."""

    def calibrate(self, info: Any) -> Mapping[str, Any]:
        """Return parameters by site name for the region that a `CalibrationInfo` describes."""


@check_fields
@dataclass(frozen=True)
class QuantizerPattern:
    """A named pattern, a small DAG of operators (`intaglio.patterns`), whose matches are quantized.

    Operators are named by record ("conv2d", "clamp") or by overload ("aten.relu.default"). Where matches overlap, the
    one with the higher `priority` wins, then the larger, then the one that ends earlier in the graph, then the pattern
    with more operands, then the name.

    Attributes:
        name: unique name.
        pattern: root of the DAG.
        calibration: callback that chooses the parameters of each region of a match.
        priority: precedence over overlapping matches.
        setting: takes precedence over the default of the recipe, not over its entries.
        ranks: allowed ranks of the result; empty for any.
        quantize_always: quantize every match; otherwise only matches that contain a convolution or linear layer or are
            next to something quantized.
        operator: record of the whole match, with operands named as the leaves of the pattern. Without it the
            built-in fusion rows and records decide which kernels run the match.
        rewrite: callback(pre, post, node_map) that replaces a match, or returns ``None`` to keep it.
    """

    name: str
    pattern: Pattern
    calibration: ParameterChooser | None = None
    priority: int = 0
    setting: Setting | None = None
    ranks: tuple[int, ...] = ()
    quantize_always: bool = True
    operator: OpDef | None = None
    rewrite: Callable[..., fx.Node | None] | None = None


@dataclass(frozen=True, eq=False)
class CompositeMatch:
    """Operators that one record represents.

    Attributes:
        record: the operator record.
        reads: for each operand the name of a node that reads it, and the operand's index among that node's inputs.
        attrs: attributes as the record binds them.
    """

    record: OpDef
    reads: tuple[tuple[str, int], ...]
    attrs: Mapping[str, object]


@dataclass(frozen=True, eq=False)
class Found:
    """A match that won over overlapping ones, with its operators in execution order."""

    pattern: QuantizerPattern
    nodes: tuple[fx.Node, ...]
    bound: Mapping[str, fx.Node]


@dataclass(frozen=True)
class Rejected:
    """A match that overlaps a stronger one or cannot be quantized."""

    pattern: str
    origin: Origin
    reason: str

    def __str__(self) -> str:
        return f"{self.pattern} at {self.origin.path or 'model'} ({self.origin.operator}): {self.reason}"


# -- built-in patterns ------------------------------------------------------------------------------------------------

ALIASES = {
    "dense": "linear",
    "dense_bias": "linear_bias",
    "multiply": "mul",
    "Conv2DPattern": "conv2d",
    "Conv2DBiasAddPattern": "conv2d_bias",
    "DensePattern": "linear",
    "DenseBiasAddPattern": "linear_bias",
    "AddPattern": "add",
    "MultiplyPattern": "mul",
}
"""Alternative names of built-in patterns; those in capitals are the classes of "Quantization in TVM"."""


BUILT_IN_PATTERNS: Mapping[str, Pattern] = {
    **{row.name: row.pattern for row in GRAPH_FUSIONS},
    **{record.name: op(record.name) for record in OPS.values() if record.targets},
}
"""Patterns of all fusion rows and single operators by name."""
BUILT_IN: Mapping[str, Pattern] = {
    **BUILT_IN_PATTERNS,
    **{
        f"{record.name}_bias": op(record.name, wildcard("x"), wildcard("weight"), const("bias"))
        for record in OPS.values()
        if record.roles.bias is not None
    },
}
"""Built-in patterns by name: fusion rows, operators, and layers with a bias."""


@check_arguments
def builtin(
    *names: str, calibration: ParameterChooser | None = None, priority: int = 0, setting: Setting | None = None
) -> list[QuantizerPattern]:
    """Return built-in patterns by name; without names, all fusion rows and operators.

    Names are those of fusion rows ("anchor_add_clamp"), operators ("conv2d", "add") and layers with a bias
    ("conv2d_bias"); "Conv2DPattern" and the other classes of "Quantization in TVM" are names, too.

    Args:
        names: names of patterns (default: all of them).
        calibration: callback that chooses the parameters of the sites of these patterns.
        priority: among matches that overlap, the one with the highest priority wins.
        setting: settings of the operators that match.

    Raises:
        SelectorError: a name is unknown.
    """
    known = {**BUILT_IN, **{alias: BUILT_IN[name] for alias, name in ALIASES.items()}}
    for name in names:
        if name not in known:
            raise SelectorError(
                f"pattern {name!r}",
                None,
                "there is no built-in pattern of this name",
                remedy="nearest: " + ", ".join(_nearest(name, known)),
            )
    quantize_always = bool(names)
    return [
        QuantizerPattern(name, known[name], calibration, priority, setting, quantize_always=quantize_always)
        for name in names or BUILT_IN_PATTERNS
    ]


def patterns_of(given: Iterable[QuantizerPattern | str]) -> tuple[QuantizerPattern, ...]:
    """Replace names by built-in patterns and check the result.

    Raises:
        SelectorError: two patterns share a name, or a root is not an operator.
        UnsupportedError: the operator record of a pattern is not valid.
    """
    found = [one for entry in given for one in (builtin(entry) if isinstance(entry, str) else [entry])]
    for name, count in Counter(pattern.name for pattern in found).items():
        if count > 1:
            raise SelectorError(
                f"pattern {name!r}",
                None,
                f"{count} patterns have this name",
                remedy="give each pattern a name of its own",
            )
    for pattern in found:
        if not pattern.pattern.kinds:
            raise SelectorError(
                f"pattern {pattern.name!r}", None, "its root is not an operator", remedy="begin with op(...)"
            )
        if pattern.operator is not None:
            _check_leaves(pattern, pattern.operator)
    return tuple(found)


def _check_leaves(pattern: QuantizerPattern, record: OpDef) -> None:
    check_operators((record,))
    leaves = {leaf.name for leaf in pattern.pattern.leaves()}
    if missing := sorted(set(record.operands) - leaves):
        raise SelectorError(
            f"pattern {pattern.name!r}",
            record.name,
            f"the pattern has no leaf named {', '.join(missing)}; its leaves are {', '.join(sorted(leaves))}",
            remedy=f"name the leaves after the operands of the operator: wildcard({missing[0]!r})",
        )


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.3) or sorted(known)[:3]


# -- user-defined operators -------------------------------------------------------------------------------------------


def check_operators(records: Iterable[OpDef]) -> None:
    """Check the records of user-defined operators.

    Raises:
        UnsupportedError: a record cannot run on the host, or its name or overload belongs to another one.
    """
    names: set[str] = set()
    targets: set[str] = set()
    for record in records:
        problem = None
        if record.reference is None and record.function is None:
            problem = "it has neither a reference (computed in integers) nor a function (computed in float)"
        elif record.kernel is not None or record.variadic or record.roles.weight is not None:
            problem = "an operator of your own cannot have a kernel, a list of operands or a weight"
        elif record.name in OPS or record.name in names:
            problem = "another operator already has this name"
        elif taken := [target for target in record.targets if _has_integer_form(target) or target in targets]:
            problem = f"another operator already has the targets {', '.join(taken)}"
        if problem is not None:
            raise UnsupportedError(record.name, None, problem, remedy="see docs/patterns.md, An operator of your own")
        names.add(record.name)
        targets.update(record.targets)


def _has_integer_form(target: str) -> bool:
    record = BY_TARGET.get(target)
    return record is not None and record.has_integer_form


def is_host(record: OpDef) -> bool:
    """Return whether the operator runs in Python: it has a reference implementation but no kernel."""
    return record.kernel is None and record.reference is not None


def name_operators(graph: fx.Graph, records: Iterable[OpDef]) -> None:
    """Attach the records of user-defined operators to their nodes, where all later stages look them up."""
    records = tuple(records)
    check_operators(records)
    by_target = {target: record for record in records for target in record.targets}
    for node in graph.nodes:
        if (record := by_target.get(operator(node))) is not None:
            known = [argument.name for argument in schema_of(node.target).arguments]
            if missing := [name for name in record.operands if name not in known]:
                problem = f"the operator has no argument {', '.join(missing)}; its arguments are {', '.join(known)}"
                raise UnsupportedError(
                    record.name, operator(node), problem, remedy="name the operands after these arguments"
                )
            update_info(node, record=record)


# -- matching ---------------------------------------------------------------------------------------------------------


def find(
    graph: fx.Graph,
    patterns: Sequence[QuantizerPattern],
    reasons: Mapping[fx.Node, str | None],
    replaced: Iterable[Found] = (),
) -> tuple[list[Found], list[Rejected]]:
    """Match all patterns on a graph, and return the matches that won and those that were rejected.

    The result does not depend on the order of the patterns.

    Args:
        graph: prepared graph.
        patterns: user patterns.
        reasons: candidate root -> reason why the operator stays in float, or ``None``.
        replaced: what `rewrite` callbacks have built, which competes with the matches.
    """
    view = FxGraphView(graph)
    _check_kinds(patterns, view, graph)
    candidates = [found for found in replaced if all(reasons[node] is None for node in found.nodes)]
    rejected: list[Rejected] = []
    for pattern in patterns:
        for node in reasons:
            hit = match(pattern.pattern, node, view)
            if hit is None:
                continue
            found = Found(pattern, tuple(sorted(hit.nodes, key=view.position)), dict(hit.bound))
            if (reason := _guard(found, hit, reasons)) is None:
                candidates.append(found)
            else:
                rejected.append(Rejected(pattern.name, origin(node), reason))
    candidates.sort(key=lambda found: _rank(found, view))
    winner: dict[fx.Node, Found] = {}
    won: list[Found] = []
    for found in candidates:
        taken = [winner[node] for node in found.nodes if node in winner]
        if taken:
            reason = f"{taken[0].pattern.name} at {_place(taken[0])} takes precedence"
            rejected.append(Rejected(found.pattern.name, origin(found.nodes[-1]), reason))
        else:
            won.append(found)
            winner.update(dict.fromkeys(found.nodes, found))
    return won, rejected


def _rank(found: Found, view: FxGraphView) -> tuple[int, int, int, int, str]:
    """Return the sort key of a match, strongest first. Equal matches rank by the number of leaves in their pattern."""
    pattern, leaves = found.pattern, sum(1 for _ in found.pattern.pattern.leaves())
    return -pattern.priority, -len(found.nodes), view.position(found.nodes[-1]), -leaves, pattern.name


def _place(found: Found) -> str:
    where = origin(found.nodes[-1])
    return f"{where.path or 'model'} ({where.operator})"


def _check_kinds(patterns: Sequence[QuantizerPattern], view: FxGraphView, graph: fx.Graph) -> None:
    """Check that every operator name is known. A name with a dot may be an overload that the model does not contain."""
    known = {*OPS, *(kind for node in graph.nodes for kind in view.kinds(node))}
    for pattern in patterns:
        for kind in pattern.pattern.named_kinds():
            if kind not in known and "." not in kind:
                raise SelectorError(
                    f"pattern {pattern.name!r}",
                    None,
                    f"there is no operator {kind!r}",
                    remedy="nearest: "
                    + ", ".join(_nearest(kind, known))
                    + "; or give an overload, such as aten.relu.default",
                )


def _guard(found: Found, hit: Match[fx.Node], reasons: Mapping[fx.Node, str | None]) -> str | None:
    """Return why a match stays in float, or ``None``. Operators of a composite need no record of their own."""
    kind = tensor_type(hit.root)
    if kind is not None and found.pattern.ranks and len(kind.shape) not in found.pattern.ranks:
        ranks = " or ".join(map(str, found.pattern.ranks))
        return f"its result has rank {len(kind.shape)}; the pattern is for rank {ranks}"
    record = found.pattern.operator
    if record is None:
        return next((reason for node in found.nodes if (reason := reasons[node]) is not None), None)
    for node in (*found.nodes, *(found.bound[name] for name in record.operands)):
        kind = tensor_type(node)
        if kind is None or kind.dtype is not DType.F32:
            return "it reads or computes a tensor that is not float32" + ("" if kind is None else f" but {kind.dtype}")
        if info(node).zero_points is not None:
            return "it reads an image, whose channels have a scale and a zero point each"
    for index, name in enumerate(record.operands):
        if is_constant(found.bound[name]) is (index in record.roles.x):
            return (
                f"the operand {name} is {'a constant' if index in record.roles.x else 'computed while the model runs'}"
            )
    return record.check(composite_call(found, record))


def composite_call(found: Found, record: OpDef) -> Call:
    """Return a match as a call of its record; arguments of a named operator are called "name.argument"."""
    types = [tensor_type(found.bound[name]) for name in record.operands]
    given = {
        f"{name}.{key}": resolve_dims(value)
        for name, node in found.bound.items()
        if node in found.nodes
        for key, value in arguments(node).items()
        if not isinstance(value, fx.Node) or info(value).dim is not None
    }
    return Call(
        target=operator(found.nodes[-1]),
        arguments=given,
        shapes=tuple(kind.shape if kind else None for kind in types),
        floating=tuple(True for _ in types),
        constant=tuple(is_constant(found.bound[name]) for name in record.operands),
        result=known_type(found.nodes[-1]).shape,
    )


def composite_match(found: Found, record: OpDef) -> CompositeMatch:
    """Return the composite of a match, which locates the operands by the nodes that read them."""
    reads = [(node.name, place) for node in found.nodes for place in range(len(node.all_input_nodes))]
    values = [value for node in found.nodes for value in node.all_input_nodes]
    places = tuple(reads[values.index(found.bound[name])] for name in record.operands)
    return CompositeMatch(record, places, record.bind(composite_call(found, record)))


def record_at(nodes: Sequence[fx.Node]) -> OpDef:
    """Return the record of a chain: the composite's if it has one, otherwise the anchor's."""
    composite = info(nodes[-1]).composite
    return composite.record if composite is not None else known_record(nodes[0])


def composite_operands(nodes: Sequence[fx.Node], composite: CompositeMatch) -> list[fx.Node]:
    """Return the operand values of a composite in the order of its record."""
    by_name = {node.name: node for node in nodes}
    return [by_name[name].all_input_nodes[place] for name, place in composite.reads]
