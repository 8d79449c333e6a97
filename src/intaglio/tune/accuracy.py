"""Accuracy-driven mixed precision: leave operators in float until a metric is close to the float model's."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from intaglio import build
from intaglio.errors import InputError, UnsupportedError
from intaglio.lower import requantize
from intaglio.progress import report_progress
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.prepare import Prepared, prepare
from intaglio.quant.correct.corrections import Corrected
from intaglio.quant.equalization.apply_equalization import apply_equalization
from intaglio.quant.qdq.convert import Reference, convert
from intaglio.quant.qdq.parameters import Parameter, Parameters, owners
from intaglio.quant.qdq.qparams import activation_qparams
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.runtime import QuantizedModel
from intaglio.runtime.kept_attributes import KeptAttributes
from intaglio.tracing import Captured
from intaglio.tune.compare_models import compare
from intaglio.tune.float_search import FloatSearch, Left, preference
from intaglio.tune.tuned import Trial, Tuned

RANKING_SAMPLES = 32
"""Number of samples on which operators are ranked."""
WITHOUT_GENERATE = (
    "let evaluate call the model, for instance for its loss, and call quantize with tuned.recipe.with_parameters(None)"
)
"""Remedy for a metric of generated tokens."""

Evaluate = Callable[[Any], Any]
logger = logging.getLogger("intaglio")


@dataclass(frozen=True)
class Criterion:
    """The metric to reach.

    Attributes:
        evaluate: function of a model that returns its metric, higher for better.
        max_drop: largest accepted loss of the metric, as a fraction of the float model's or, without ``relative``, as
            an absolute difference.
        relative: whether ``max_drop`` is a fraction.
        evaluations: largest number of calls of ``evaluate``, the one with the float model included.
    """

    evaluate: Evaluate
    max_drop: float = 0.01
    relative: bool = True
    evaluations: int = 20

    def __post_init__(self) -> None:
        if not callable(self.evaluate):
            raise InputError(
                "evaluate",
                None,
                f"expected a function, got a {type(self.evaluate).__name__}",
                remedy="pass a function that takes a model and returns its metric",
            )
        if not 0 <= self.max_drop < math.inf:
            problem = f"it is {self.max_drop}, but must be a finite number of at least 0"
            raise InputError("max_drop", None, problem, remedy="pass max_drop=0.01 to accept a loss of 1 %")
        if self.evaluations < 2:
            problem = f"it is {self.evaluations}, but the float model and the int8 model need one evaluation each"
            raise InputError("evaluations", None, problem, remedy="pass evaluations=2 or more")

    def floor(self, baseline: float) -> float:
        """Return the lowest accepted metric, given the float model's."""
        return baseline - self.max_drop * (abs(baseline) if self.relative else 1.0)

    def metric_of(self, model: Any, name: str) -> float:
        """Return the metric of a model.

        Args:
            model: the model.
            name: its name in error messages.

        Raises:
            InputError: the function fails or does not return one finite number.
        """
        try:
            with torch.no_grad():
                found = self.evaluate(model)
        except Exception as error:
            problem = f"it raised {type(error).__name__} for {name}: {error}"
            generates = isinstance(error, AttributeError) and error.name == "generate"
            raise InputError("evaluate", None, problem, remedy=WITHOUT_GENERATE if generates else None) from error
        number = _number(found)
        if number is None or not math.isfinite(number):
            shown = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
            remedy = "return one finite number, where higher is better; for a loss, return its negative"
            raise InputError("evaluate", None, f"it returned {shown} for {name}", remedy=remedy)
        return number


def _number(found: Any) -> float | None:
    if isinstance(found, (torch.Tensor, np.ndarray, np.generic)):
        return float(found.item()) if math.prod(found.shape) == 1 and np.isrealobj(found) else None
    return float(found) if isinstance(found, (int, float)) else None


@dataclass(frozen=True)
class SearchStart:
    """Starting point that all trials share.

    Attributes:
        captured: graph of the float model.
        quantizer: quantizer of the recipe alone.
        reference: reference that this quantizer gives.
        batches: batches for ranking and for calibration of new sites.
    """

    captured: Captured
    quantizer: Quantizer
    reference: Reference
    batches: Sequence[Any]

    def quantizer_leaving(self, left: Iterable[str]) -> Quantizer:
        """Return the quantizer that leaves these operators in float too."""
        return replace(self.quantizer, recipe=self.quantizer.recipe.with_selection(skip=left))

    def reference_leaving(self, left: Left) -> Reference:
        """Return the reference with more operators in float and otherwise unchanged parameters.

        Only values that were not quantized by themselves before are calibrated: those that used to share a kernel with
        an operator that is now in float.
        """
        return self.reference_of(self.quantizer_leaving(left))

    def reference_of(self, quantizer: Quantizer, corrected: bool = True) -> Reference:
        """Return the reference of another quantizer, with the same corrections if ``corrected``, and the same
        parameters of sites that do not change."""
        prepared, known = prepare(self.captured, quantizer), self.reference.parameters
        if not corrected:
            known = replace(known, entries={}, corrected=Corrected())
        before = {site.name: site.spec for site in self.reference.annotations.sites}
        changed = {site.name for site in prepared.annotations.sites if before.get(site.name) not in (None, site.spec)}
        kept = {name: entry for name, entry in known.entries.items() if name not in changed}
        return convert(prepared, self._with_missing(prepared, replace(known, entries=kept)))

    def _with_missing(self, prepared: Prepared, known: Parameters) -> Parameters:
        """Return the parameters with calibrated entries for sites that do not have any yet."""
        prepared = apply_equalization(prepared, known.corrected.equalization)
        sites = [
            site
            for site in owners(prepared.annotations.sites, prepared.annotations.leaders)
            if site.role == Role.ACTIVATION and site.name not in known.entries
        ]
        if not sites:
            return known
        found = activation_qparams(prepared, calibrate(prepared, self.batches, progress=False))
        entries = {
            site.name: Parameter(site.datatype, q.qmin, q.qmax, q.scales, q.zeros)
            for site in sites
            for q in [found[site.name]]
        }
        return replace(known, entries={**known.entries, **entries})

    def ranked(self) -> list[str]:
        """Return selectors of quantized operators, the most harmful first.

        The harm of an operator is the error caused by its own rounding or by the rounding of its inputs. One operator
        is omitted, because at least one must be quantized.
        """
        report = compare(self.captured, self.reference, self.batches, samples=RANKING_SAMPLES)
        alone = {row.node: row.alone for row in report.rows}
        selectors = {row.node: row.skip for row in report.rows}
        regions = self.reference.annotations.regions
        inside = {node.name for region in regions for node in region.computed}
        losses: dict[str, float] = {}
        for region in regions:
            own = [node.name for node in region.computed]
            read = [value.name for value in region.activations() if value.name not in inside]
            selector = next((found for name in own if (found := selectors.get(name))), None)
            if selector is not None:
                worst = min(alone.get(name, math.inf) for name in (*own, *read))
                losses[selector] = min(losses.get(selector, math.inf), worst)
        return self._keep_one_quantized(sorted(losses, key=lambda name: (losses[name], name)))

    def _keep_one_quantized(self, ranked: list[str]) -> list[str]:
        """Return the ranking without the least harmful operator that can be quantized alone. With all of them in float
        nothing would be quantized."""
        for kept in reversed(ranked):
            others = [selector for selector in ranked if selector != kept]
            try:
                prepare(self.captured, self.quantizer_leaving(others))
                return others
            except UnsupportedError:
                continue
        return []


def autotuned(start: SearchStart, criterion: Criterion, exact: nn.Module, isa: str | Iterable[str] | None) -> Tuned:
    """Run the search trial by trial. Warn if no trial reaches the metric."""
    baseline = criterion.metric_of(exact, "the float model")
    floor, trials = criterion.floor(baseline), list[Trial]()
    best: tuple[Trial, Reference, QuantizedModel] | None = None
    kept = KeptAttributes.of(exact)

    def measure(left: Left) -> float:
        nonlocal best
        report_progress("trials", len(trials) + 1, criterion.evaluations, f"{len(left)} more in float")
        reference = start.reference_leaving(left) if left else start.reference
        model = build.compile(requantize(reference), isa=isa)
        model.kept_attributes = kept
        metric = criterion.metric_of(model, f"the int8 model with {', '.join(left) or 'nothing more'} in float")
        trial = Trial(left, metric, metric >= floor, model.coverage.macs)
        trials.append(trial)
        logger.info("%s", trial)
        if best is None or preference(left, metric, floor) > preference(best[0].left, best[0].metric, floor):
            best = trial, reference, model
        return metric

    search = FloatSearch(measure, floor, criterion.evaluations - 1)
    if not search.reaches_metric(()):
        search.run(start.ranked())
    assert best is not None
    chosen, reference, model = best
    recipe = start.quantizer_leaving(chosen.left).recipe.with_parameters(reference.parameters)
    tuned = Tuned(model, reference, recipe, baseline, floor, tuple(trials), chosen)
    if not tuned.reached:
        warnings.warn(
            f"autotune: no trial reaches the metric {floor:.6g}; the best of {len(trials)} trials has "
            f"{chosen.metric:.6g}. More evaluations, a larger max_drop or another recipe may help",
            stacklevel=3,
        )
    return tuned
