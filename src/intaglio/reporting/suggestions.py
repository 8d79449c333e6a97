"""Changes of a quantization that may make it more accurate, each tried on the samples of the report."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from intaglio.errors import IntaglioError
from intaglio.fxgraph.node_info import origin
from intaglio.fxgraph.nodes import record_of
from intaglio.lower.facts.operator_facts import OperatorFacts
from intaglio.progress import report_progress
from intaglio.quant.annotate.refusals import macs
from intaglio.quant.annotate.regions import Region
from intaglio.quant.calibrate.batches import Call
from intaglio.quant.qdq.convert import Reference
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.settings import Setting
from intaglio.reporting.report_data import Suggestion
from intaglio.tracing import Captured
from intaglio.tune import Comparison, ComparisonRun, ReferencePool, compare_results

logger = logging.getLogger("intaglio")

LARGE = 0.5
"""Share of the multiply-accumulates that linear layers have in a model for which scales by token are tried."""
OTHER_METHODS = ("minmax", "mse", "percentile:99.99", "kl")
"""Range methods that are tried for one operator."""

TWO_BYTES = {"operand_bytes": 2, "weight_bytes": 2}
"""Setting of a layer that reads two bytes of its operand and of its weight."""


@dataclass(frozen=True)
class Change:
    """A change of the quantization.

    Attributes:
        title: what it does.
        python: arguments of `intaglio.quantize`.
        command: options of ``intaglio quantize``.
        quantizer: the changed quantizer.
        corrected: whether the corrections of the model still fit.
    """

    title: str
    python: str
    command: str
    quantizer: Quantizer
    corrected: bool = True


class Trials:
    """Tries changes of a quantized model on the samples on which it was compared.

    Attributes:
        start: the model as it is.
        comparison: its errors.
        now: the errors of the results of its reference, which changes are measured with.
    """

    def __init__(self, start: ReferencePool, comparison: Comparison) -> None:
        self.start, self.comparison = start, comparison
        self.now = compare_results(start.captured, start.base, start.batches, samples=None)

    @staticmethod
    def of(run: ComparisonRun | None) -> Trials | None:
        """Return the trials for a comparison, or ``None`` if the model's reference is not known."""
        if run is None or not run.graphs or not isinstance(run.stage, Captured):
            return None
        text = run.graphs[0].reference.model_info.texts.get("quantizer")
        if text is None or not run.comparison.rows or not run.comparison.results:
            return None
        batches = [_batch(call) for call in run.calls]
        start = ReferencePool(run.stage, Quantizer.from_toml(text), run.graphs[0].reference, batches)
        return Trials(start, run.comparison)

    def tried(self, change: Change) -> Suggestion:
        """Return a change with the error of the result that it leaves."""
        made = Suggestion(change.title, change.python, change.command, self.now.results[0], 0.0, self.now.agreement)
        try:
            make = self.start.reference if change.corrected else self.start.uncorrected
            reference = make(change.quantizer)
            then = compare_results(self.start.captured, reference, self.start.batches, samples=None)
        except IntaglioError as error:
            logger.info("report: %s cannot be tried: %s", change.title, error.problem)
            return replace(made, failure=error.problem.splitlines()[0])
        return replace(made, after=then.results[0], agreement_after=then.agreement, macs=_share_in_int8(reference))

    def for_model(self, count: int) -> tuple[Suggestion, ...]:
        """Return changes of the whole model, the one with the largest gain first.

        Args:
            count: number of the worst operators to leave in float, one at a time; 0 tries nothing.
        """
        found = self._tried_all(model_changes(self.start, self.comparison, count) if count else ())
        return tuple(sorted(found, key=lambda one: (bool(one.failure), -one.gain)))

    def for_operator(self, facts: OperatorFacts) -> tuple[Suggestion, ...]:
        """Return changes of the kernel of one operator."""
        return tuple(self._tried_all(operator_changes(self.start, facts)))

    def _tried_all(self, changes: Iterable[Change]) -> Iterator[Suggestion]:
        """Try changes, and report how many are done."""
        listed = list(changes)
        for done, change in enumerate(listed):
            report_progress("changes", done, len(listed), change.title)
            yield self.tried(change)


def model_changes(start: ReferencePool, comparison: Comparison, count: int) -> Iterator[Change]:
    """Yield changes of a whole model: the worst operators in float, alone and together, the worst layers in two bytes,
    16-bit residual sums, another range method, and a scale for each token."""
    worst, quantizer = comparison.skip_list(count), start.quantizer
    for selector in worst:
        yield _skip([selector], f"Leave {selector} in float", start)
    if 1 < len(worst) < len({row.skip for row in comparison.rows if row.skip}):
        yield _skip(worst, f"Leave these {len(worst)} in float together", start)
    default, regions = quantizer.recipe.default, start.base.annotations.regions
    if layers := [selector for selector in worst if _is_layer(regions, selector)]:
        names = f"{layers[0]}" if len(layers) == 1 else f"these {len(layers)} layers"
        yield _entry(f"Read two bytes in {names}", quantizer, *layers, **TWO_BYTES)
    if default.shortcut != 16 and any(_in_16_bits(region).adds_shortcut for region in regions):
        yield _setting(
            "Residual sums in 16 bits, and sensitive first layers in two bytes or in float",
            quantizer,
            "accurate",
            shortcut=16,
            two_bytes_below=30.0,
            float_below=30.0,
        )
    other = "minmax" if default.method != "minmax" else "mse"
    yield _setting(f"Choose all ranges with the method {other}", quantizer, "", method=other)
    if _share_of_linear(start.base) > LARGE and default.activations == "static":
        title = "A scale for each token, computed while the model runs"
        yield replace(_setting(title, quantizer, "int8_dynamic", activations="token"), corrected=False)


def operator_changes(start: ReferencePool, facts: OperatorFacts) -> Iterator[Change]:
    """Yield changes of the kernel of an operator: in float, in two bytes, with a 16-bit shortcut, with each other range
    method."""
    names = {facts.node}
    region = next((one for one in start.base.annotations.regions if names & _nodes(one)), None)
    if region is None or not facts.selector:
        return
    yield _skip([facts.selector], "In float", start)
    if _is_layer([region], facts.selector):
        yield _entry("In two bytes", start.quantizer, facts.selector, **TWO_BYTES)
    if region.setting.shortcut != 16 and _in_16_bits(region).adds_shortcut:
        yield _entry("Its residual sum in 16 bits", start.quantizer, facts.selector, shortcut=16)
    for method in OTHER_METHODS:
        if method != region.setting.method:
            yield _entry(f"Ranges by the method {method}", start.quantizer, facts.selector, method=method)


def _nodes(region: Region) -> set[str]:
    return {node.name for node in region.computed}


def _is_layer(regions: Iterable[Region], selector: str) -> bool:
    """Return whether a selector is the module of a layer with a weight, which may read two bytes."""
    layers = [one for one in regions if one.record.roles.weight is not None and one.record.accumulates]
    return any(origin(region.anchor).path == selector and not region.dynamic for region in layers)


def _entry(title: str, quantizer: Quantizer, *selectors: str, **fields: Any) -> Change:
    """Return the change of entries of the recipe, all with the same setting."""
    entries = tuple((selector, Setting(**fields)) for selector in selectors)
    recipe = replace(quantizer.recipe, entries=(*quantizer.recipe.entries, *entries))
    given = ", ".join(f"{selector!r}: {fields!r}" for selector in selectors)
    return Change(title, f"recipe={{{given}}}", "", replace(quantizer, recipe=recipe))


def _skip(selectors: Sequence[str], title: str, start: ReferencePool) -> Change:
    options = " ".join(f"--skip '{selector}'" for selector in selectors)
    return Change(title, f"skip={list(selectors)!r}", options, start.quantizer_leaving(selectors))


def _setting(title: str, quantizer: Quantizer, name: str, **fields: Any) -> Change:
    """Return the change of the default setting, as the recipe of a name where there is one and no other entries."""
    recipe = replace(quantizer.recipe, default=replace(quantizer.recipe.default, **fields))
    changed = replace(quantizer, recipe=recipe)
    if name and not recipe.entries:
        return Change(title, f'recipe="{name}"', f"--recipe {name}", changed)
    given = ", ".join(f"{key}={value!r}" for key, value in fields.items())
    default = f"default=intaglio.Setting({given})"
    text = f"intaglio.Recipe({default})" if not recipe.entries else f"dataclasses.replace(recipe, {default})"
    return Change(title, f"recipe={text}", "", changed)


def _in_16_bits(region: Region) -> Region:
    return replace(region, setting=replace(region.setting, shortcut=16))


def _share_of_linear(reference: Reference) -> float:
    """Return the share of multiply-accumulates in int8 that linear layers have."""
    nodes = [region.anchor for region in reference.annotations.regions]
    total = sum(map(macs, nodes))
    return sum(macs(node) for node in nodes if _is_linear(node)) / total if total else 0.0


def _is_linear(node: fx.Node) -> bool:
    """Return whether an operator is a linear layer."""
    record = record_of(node)
    return record is not None and record.multiplies_weight and not record.convolves


def _share_in_int8(reference: Reference) -> float:
    """Return the share of multiply-accumulates that a reference has in regions."""
    annotations = reference.annotations
    total = sum(macs(node) for node in annotations.module.graph.nodes)
    inside = sum(macs(node) for region in annotations.regions for node in region.computed)
    return inside / total if total else 0.0


def _batch(call: Call) -> Any:
    """Return a call as a batch of data."""
    args, kwargs = call
    return kwargs if not args else ((*args, *kwargs.values()) if kwargs or len(args) > 1 else args[0])
