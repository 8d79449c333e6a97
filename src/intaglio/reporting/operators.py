"""Operators of a graph for a report: facts, errors, values, weights and the steps of the program that compute them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from intaglio.lower.facts.operator_facts import ModelFacts, OperatorFacts, Precision
from intaglio.plan import Plan, plan_graph
from intaglio.reporting.report_data import GraphReport, Histogram, OperatorReport, WeightReport
from intaglio.reporting.values import histogram_of, weight_of
from intaglio.runtime import QuantizedModel
from intaglio.runtime.reports.profile import Profile
from intaglio.tune.comparison import Comparison, Row, number_repeated_calls
from intaglio.tune.op_error import GraphComparison


@dataclass(frozen=True)
class OperatorSteps:
    """Steps of a program by operator.

    Attributes:
        computed_in: node -> number of the step that computes it.
        counted: node -> numbers of the steps whose time is counted for it.
        views: nodes whose results share the memory of their inputs.
    """

    computed_in: Mapping[str, int] = field(default_factory=dict)
    counted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    views: frozenset[str] = frozenset()


def graph_report(
    name: str,
    facts: ModelFacts,
    steps: OperatorSteps,
    rows: Iterable[Row] = (),
    compared: GraphComparison | None = None,
    profile: Profile | None = None,
    comparison: Comparison | None = None,
) -> GraphReport:
    """Return the report of one graph.

    Args:
        name: name of the graph.
        facts: its operators and sites.
        steps: the steps that compute the operators.
        rows: errors of its operators.
        compared: the comparison that they come from, with the statistics of values.
        profile: the times of the steps.
        comparison: the errors of the results of this graph, if they are not those of the whole model.
    """
    by_node = {row.node: row for row in rows}
    named = dict(zip((one.node for one in facts.operators), _names(facts.operators, by_node), strict=True))
    kernels = _kernels(facts, steps)
    values = _Values(facts, compared)
    operators = []
    for one in facts.operators:
        members = kernels.get(one.node, (one.node,))
        owner = next((node for node in members if steps.counted.get(node)), one.node)
        operators.append(
            OperatorReport(
                named[one.node],
                one,
                by_node.get(one.node),
                values.histogram(one.node),
                facts.site(one.site),
                values.weight(one),
                steps.counted.get(one.node, ()),
                tuple(named[node] for node in members if node != one.node),
                named[owner] if owner != one.node else "",
                one.node in steps.views,
            )
        )
    return GraphReport(name, tuple(operators), profile, comparison)


class _Values:
    """Histograms and weights of the operators that were compared."""

    def __init__(self, facts: ModelFacts, compared: GraphComparison | None) -> None:
        self.facts, self.compared = facts, compared

    def histogram(self, node: str) -> Histogram | None:
        """Return the histogram of a node's exact values."""
        statistics = None if self.compared is None else self.compared.statistics.get(node)
        return None if statistics is None else histogram_of(statistics)

    def weight(self, one: OperatorFacts) -> WeightReport | None:
        """Return the weight of an operator."""
        site = self.facts.site(one.weight)
        if self.compared is None or site is None or one.node not in self.compared.names.nodes:
            return None
        return weight_of(self.compared.names, one.node, site)


def _names(operators: Sequence[OperatorFacts], rows: Mapping[str, Row]) -> list[str]:
    """Return the name of every operator: that of its row, or one of the same form."""
    made = [Row(one.node, "", one.path, one.operator, one.source, 0.0, 0.0, folded=one.folded) for one in operators]
    made = [replace(row, detail=one.detail) for row, one in zip(made, operators, strict=True)]
    names = [rows[row.node].name if row.node in rows else row.name for row in number_repeated_calls(made)]
    seen = Counter(names)
    return [name if seen[name] == 1 else f"{name} %{one.node}" for name, one in zip(names, operators, strict=True)]


def _kernels(facts: ModelFacts, steps: OperatorSteps) -> dict[str, tuple[str, ...]]:
    """Return for each node the nodes that run in the same kernel, in execution order."""
    groups: dict[object, list[str]] = {}
    for one in facts.operators:
        step = steps.computed_in.get(one.node)
        if step is not None:
            groups.setdefault(step, []).append(one.node)
        elif one.precision == Precision.INT8 and one.region >= 0 and not steps.computed_in:
            groups.setdefault(f"region {one.region}", []).append(one.node)
    return {node: tuple(nodes) for nodes in groups.values() for node in nodes}


def steps_of(facts: ModelFacts, model: QuantizedModel) -> OperatorSteps:
    """Return which steps of a model's program compute which operators.

    A step computes the operator whose result it stores, and the operators before it whose results nothing stores. Its
    time is counted for the operator with the most multiply-accumulates. Steps that only quantize or convert a value are
    counted for the operator that the value comes from.
    """
    plan = plan_graph(model.graph)
    if len(plan.steps) != len(model.artifact.program.steps):
        return OperatorSteps()
    stored = {name: index for index, step in enumerate(plan.steps) for op in step.partition.ops for name in op.outputs}
    computed_in, views = _assigned(facts, plan, stored)
    counted: dict[str, list[int]] = {}
    members: dict[int, list[OperatorFacts]] = {}
    for one in facts.operators:
        if one.node in computed_in:
            members.setdefault(computed_in[one.node], []).append(one)
    for index, group in members.items():
        counted.setdefault(max(group, key=lambda one: one.macs).node, []).append(index)
    sources = _sources(facts, model)
    for index, step in enumerate(plan.steps):
        if index not in members:
            read = next((sources[name] for name in step.partition.reads() if name in sources), None)
            if read is not None and len(step.partition.ops) == 1:
                counted.setdefault(read, []).append(index)
    return OperatorSteps(computed_in, {node: tuple(sorted(found)) for node, found in counted.items()}, views)


def _assigned(facts: ModelFacts, plan: Plan, stored: Mapping[str, int]) -> tuple[dict[str, int], frozenset[str]]:
    """Return the step of every node that one computes, and the nodes whose values are views."""
    readers: dict[str, list[str]] = {}
    for one in facts.operators:
        for source in one.reads:
            readers.setdefault(source, []).append(one.node)
    computed = {name for op in plan.graph.ops for name in op.outputs}
    found: dict[str, int] = {}
    behind: dict[str, int] = {}  # where what a node computes is stored, for nodes before it that store nothing
    views = set[str]()
    for one in reversed(facts.operators):
        if one.precision == Precision.INPUT:
            continue
        step = stored.get(one.value)
        if step is None and one.value in computed:
            views.add(one.node)
            if (root := plan.root(one.value)) in stored:
                behind[one.node] = stored[root]
            continue
        if step is None:
            step = next((behind[reader] for reader in readers.get(one.node, ()) if reader in behind), None)
        if step is not None:
            found[one.node] = behind[one.node] = step
    return found, frozenset(views)


def _sources(facts: ModelFacts, model: QuantizedModel) -> dict[str, str]:
    """Return the node of each value of the integer graph that an operator or an input has."""
    found = {one.value: one.node for one in facts.operators if one.value}
    inputs = {one.path: one.node for one in facts.operators if one.precision == Precision.INPUT}
    for entry, value in zip(model.signature.inputs, model.graph.inputs, strict=False):
        node = inputs.get(value, inputs.get(entry.name))
        if node is not None:
            found.setdefault(value, node)
    return found
