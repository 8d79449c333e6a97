"""Changes of a quantization that may make it more accurate, each tried on the samples of the report."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from intaglio.errors import IntaglioError
from intaglio.fxgraph.nodes import record_of
from intaglio.quant.annotate.refusals import macs
from intaglio.quant.annotate.regions import Region
from intaglio.quant.calibrate.batches import Call
from intaglio.quant.qdq.convert import Reference
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.reporting.report_data import Suggestion
from intaglio.tracing import Captured
from intaglio.tune import Comparison, SearchStart, compare_results

logger = logging.getLogger("intaglio")

LARGE = 0.5
"""Share of the multiply-accumulates that linear layers have in a model for which scales by token are tried."""


@dataclass(frozen=True)
class Change:
    """A change of the quantization.

    Attributes:
        title: what it does.
        python: arguments of `intaglio.quantize`.
        command: options of ``intaglio quantize``.
        quantizer: the changed quantizer.
        recalibrated: whether the ranges of activations change too.
    """

    title: str
    python: str
    command: str
    quantizer: Quantizer
    recalibrated: bool = False


def suggestions(
    captured: Captured, reference: Reference, comparison: Comparison, calls: Sequence[Call], count: int
) -> tuple[Suggestion, ...]:
    """Return changes with the error of the result that each leaves, the one with the largest gain first.

    Args:
        captured: the captured float model.
        reference: the reference of the int8 model.
        comparison: the comparison of both over the calls.
        calls: the calls to measure on.
        count: number of operators to leave in float, one at a time; 0 tries nothing.
    """
    text = reference.model_info.texts.get("quantizer")
    if text is None or not comparison.rows or not comparison.results or not count:
        return ()
    batches = [_batch(call) for call in calls]
    start = SearchStart(captured, Quantizer.from_toml(text), reference, batches)
    now = compare_results(captured, reference, batches, samples=None)
    found = [_tried(start, change, now) for change in changes(start, comparison, count)]
    return tuple(sorted(found, key=lambda one: (bool(one.failure), -one.gain)))


def changes(start: SearchStart, comparison: Comparison, count: int) -> Iterator[Change]:
    """Yield the changes to try: the worst operators in float, alone and together, 16-bit residual sums, another range
    method, and a scale for each token."""
    worst, quantizer = comparison.skip_list(count), start.quantizer
    for selector in worst:
        yield _skip([selector], f"Leave {selector} in float", start)
    if len(worst) > 1:
        yield _skip(worst, f"Leave these {len(worst)} in float together", start)
    default, regions = quantizer.recipe.default, start.reference.annotations.regions
    if default.shortcut != 16 and any(_in_16_bits(region).adds_shortcut for region in regions):
        yield _setting("Residual sums in 16 bits", quantizer, "accurate", shortcut=16)
    other = "minmax" if default.method != "minmax" else "mse"
    method = _setting(f"Choose all ranges with the method {other}", quantizer, "", method=other)
    yield replace(method, recalibrated=True)
    if _share_of_linear(start.reference) > LARGE and default.activations == "static":
        title = "A scale for each token, computed while the model runs"
        yield _setting(title, quantizer, "int8_dynamic", activations="token")


def _skip(selectors: Sequence[str], title: str, start: SearchStart) -> Change:
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


def _tried(start: SearchStart, change: Change, now: Comparison) -> Suggestion:
    """Return a change with the errors that it leaves."""
    made = Suggestion(change.title, change.python, change.command, now.results[0], 0.0, now.agreement)
    try:
        reference = start.reference_of(change.quantizer, change.recalibrated)
        then = compare_results(start.captured, reference, start.batches, samples=None)
    except IntaglioError as error:
        logger.info("report: %s cannot be tried: %s", change.title, error.problem)
        return replace(made, failure=error.problem.splitlines()[0])
    return replace(made, after=then.results[0], agreement_after=then.agreement, macs=_share_in_int8(reference))


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
