"""`explain`: why an operator is in int8 or float, where its scale comes from, what it costs, and what would change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from intaglio.argument_checks import check_arguments_except
from intaglio.formatting.html_text import definition_list, element
from intaglio.progress import shows_progress
from intaglio.quant.calibrate.batches import log_once
from intaglio.reporting.collect import Collection, Settings, collect
from intaglio.reporting.describe import describe, input_lines
from intaglio.reporting.find_operators import Found, find_operators
from intaglio.reporting.make_report import Report
from intaglio.reporting.number_formats import decibels, gain_text, macs_text, microseconds, percent
from intaglio.reporting.report_data import Suggestion
from intaglio.reporting.report_json import json_value
from intaglio.reporting.suggestions import Trials

MOST_EXPLAINED = 6
"""Operators of a module that are explained one by one; of more, only a line each is shown."""
COLUMN = 22
"""Width of the labels in text."""


@dataclass(frozen=True)
class ExplainedOperator:
    """Facts about one operator, and changes that were tried.

    Attributes:
        name: modules and operator.
        lines: pairs of a label and a sentence.
        summary: the most important facts in one line.
        changes: what would change the result, each tried on the samples.
    """

    name: str
    lines: tuple[tuple[str, str], ...]
    summary: str
    changes: tuple[Suggestion, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Facts about the operators with a name.

    Attributes:
        model: name of the model.
        where: the name that was asked for.
        operators: the operators.
        limits: what could not be said, and why.
    """

    model: str
    where: str
    operators: tuple[ExplainedOperator, ...]
    limits: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        operators = [
            {
                "name": one.name,
                "facts": [{"label": label, "text": text} for label, text in one.lines],
                "changes": [json_value(change) for change in one.changes],
            }
            for one in self.operators
        ]
        return {"model": self.model, "where": self.where, "operators": operators, "limits": list(self.limits)}

    def __str__(self) -> str:
        """Format a heading and a line for each fact of every operator; of many operators, one line each."""
        if len(self.operators) > MOST_EXPLAINED:
            heading = f"{self.where}: {len(self.operators)} operators; explain one of them for more"
            return "\n".join([heading, *(f"  {one.name}: {one.summary}" for one in self.operators)])
        parts = ["\n".join(_text(one)) for one in self.operators]
        return "\n\n".join([*parts, *(f"note: {limit}" for limit in self.limits)])

    def __repr__(self) -> str:
        count = len(self.operators)
        return f"Explanation({self.where!r}: {count} operator{'s' * (count != 1)} of {self.model})"

    def _repr_html_(self) -> str:
        """Return the explanation for notebooks."""
        if len(self.operators) > MOST_EXPLAINED:
            return definition_list([(one.name, one.summary) for one in self.operators])
        parts = [
            element("h4", one.name) + definition_list([*one.lines, *map(_change_line, one.changes)])
            for one in self.operators
        ]
        return "".join([*parts, *(element("p", limit) for limit in self.limits)])


def _text(one: ExplainedOperator) -> Iterator[str]:
    yield one.name
    for label, text in (*one.lines, *map(_change_line, one.changes)):
        yield f"  {label:{COLUMN}} {text}"


def _change_line(change: Suggestion) -> tuple[str, str]:
    """Return a change as label and sentence."""
    if change.failure:
        return f"Tried: {change.title}", f"could not be tried: {change.failure}"
    result = f"{gain_text(change.gain)}: the result has {decibels(change.after)} instead of {decibels(change.before)}"
    return f"Tried: {change.title}", f"{result}, {percent(change.macs)} of MACs in int8; {change.python}"


@check_arguments_except("model", "float_model")
@log_once()
@shows_progress("capture", "compare", "profile", "changes", only_if=lambda: True)
def explain(
    model: Any,
    where: str,
    float_model: nn.Module | None = None,
    data: Any = None,
    *,
    samples: int | None = 64,
    calls: int = 20,
    progress: bool | None = None,
) -> Explanation:
    """Explain why operators run in int8 or float, where their scales come from, what they cost and what would change.

    Without the float model and data, the explanation holds what the model keeps: decisions, scales and where they come
    from, kernels and times. With both, the errors are measured too, and what changes if the operator is in float, has a
    16-bit shortcut or another range method.

    Args:
        model: a quantized model, or a `Report` of one, whose numbers are then used; changes are then not tried.
        where: what you wrote: the path of a module, an ATen operator, a line such as ``net.py:12``; or the name of a
            site, of a node in the texts of stages, or of a row of `compare`.
        float_model: the float model that was quantized.
        data: an iterable of batches, as for `compare`.
        samples: number of samples to compare (``None``: all).
        calls: number of timed calls, at most 100,000; 0 measures no times.
        progress: whether to show progress (default: on a terminal and in a notebook).

    Returns:
        The explanation, which prints as text and shows as HTML in a notebook.

    Raises:
        InputError: no operator has the name; the error says the nearest ones.

    Examples:
        >>> print(intaglio.explain(int8, "layer2.0.conv1"))
        >>> print(intaglio.explain(int8, "layer2.0.conv1", model, batches))
    """
    if isinstance(model, Report):
        collection = Collection(model.data)
    else:
        settings = Settings(samples, calls)
        find_operators(collect(None, model, None, Settings(calls=0)).data, where)  # before anything is measured
        collection = collect(float_model, model, data, settings)
    found = find_operators(collection.data, where)
    explained = tuple(_explained(one, collection, len(found)) for one in found)
    return Explanation(collection.data.name, where, explained, collection.data.limits)


def _explained(found: Found, collection: Collection, count: int) -> ExplainedOperator:
    """Return what is known about an operator. Changes are tried if few operators are explained."""
    graph, one = found
    trials = Trials.of(collection.runs.get(graph.name)) if count <= MOST_EXPLAINED else None
    changes = trials.for_operator(one.facts) if trials is not None else ()
    lines = (*describe(graph, one), *input_lines(graph, one))
    facts = [one.facts.precision.value]
    if one.facts.reason:
        facts.append(one.facts.reason)
    if one.row is not None:
        facts.append(f"own error {decibels(one.row.alone)}, so far {decibels(one.row.so_far)}")
    if (time := graph.microseconds(one)) is not None:
        facts.append(f"{microseconds(time)}, {percent(graph.share(one))} of the time")
    if one.facts.macs:
        facts.append(f"{macs_text(one.facts.macs)} MACs")
    return ExplainedOperator(one.name, lines, "; ".join(facts), changes)
