"""The search itself: measure the groups, solve for choices, evaluate and time them, and keep the best."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from intaglio import build
from intaglio.errors import IntaglioError
from intaglio.lower import requantize
from intaglio.mixed_precision.assignment_problem import AssignmentProblem, Choice, Quantity
from intaglio.mixed_precision.group_errors import model_error
from intaglio.mixed_precision.group_latencies import TimedCall, program_times, relative_ms
from intaglio.mixed_precision.group_measurements import GroupMeasurements, Isas, TimeBudget
from intaglio.mixed_precision.metric import Metric
from intaglio.mixed_precision.objective import Objective
from intaglio.mixed_precision.precision_groups import UNCHANGED, Assignment, changed_quantizer, entries_of
from intaglio.mixed_precision.search_journal import SearchJournal
from intaglio.mixed_precision.search_trial import SearchTrial
from intaglio.progress import report_progress
from intaglio.quant.qdq.convert import Reference
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.runtime import QuantizedModel
from intaglio.runtime.kept_attributes import KeptAttributes
from intaglio.tune.reference_pool import ReferencePool

CORRECTION_RANGE = (0.5, 4.0)
"""Smallest and largest factor between measured and predicted changes of a latency or size."""
KEPT_ALONE = 4
"""Number of groups that are quantized alone if no choice is accepted."""
CORRECTIONS = 6
"""Largest number of times that a prediction is corrected for limits."""

logger = logging.getLogger("intaglio")


class SearchEndedError(Exception):
    """Raised when the evaluations or the minutes of a search are used up."""


@dataclass
class SearchRun:
    """State of a search.

    Attributes:
        pool: references of the model.
        objective: the metric and the limits.
        exact: the float model.
        call: arguments of the timed call.
        calls: tensors of the calls on which errors are measured.
        isa: instruction sets to build for.
        journal: the journal.
        budget: the minutes.
        evaluations: largest number of calls of the metric, the one with the float model included.
        trials: trials in order.
        exact_metric: metric of the float model.
        base: program of the recipe without changes.
        base_ms: its latency in milliseconds, if latencies count.
        best: the best trial, its model and its reference, where they are still known.
    """

    pool: ReferencePool
    objective: Objective
    exact: nn.Module
    call: TimedCall
    calls: Sequence[Sequence[Tensor]]
    isa: Isas
    journal: SearchJournal
    budget: TimeBudget
    evaluations: int
    trials: list[SearchTrial] = field(default_factory=list)
    measurements: GroupMeasurements | None = None
    problem: AssignmentProblem | None = None
    exact_metric: Metric = field(default_factory=lambda: Metric(math.nan))
    base: QuantizedModel | None = None
    base_ms: float | None = None
    best: tuple[SearchTrial, QuantizedModel | None, Reference | None] | None = None

    @property
    def floor(self) -> float:
        """Return the lowest accepted metric."""
        return self.objective.floor(self.exact_metric.value)

    def start(self) -> None:
        """Evaluate the float model and the model without changes."""
        known = self.journal.known("float", "")
        if known is None:
            self.exact_metric = self.objective.metric_of(self.exact, "the float model")
            samples = self.exact_metric.samples
            values = {} if samples is None else {"samples": samples.tolist()}
            self.journal.add("float", "", metric=self.exact_metric.value, **values)
        else:
            samples = np.array(known["samples"]) if "samples" in known else None
            self.exact_metric = Metric(known["metric"], samples)
        self.base = build.compile(requantize(self.pool.base), isa=self.isa)
        self.base.kept_attributes = KeptAttributes.of(self.exact)
        if self.objective.with_latency:
            known = self.journal.known("base", "")
            self.base_ms = program_times([self.base], self.call)[0].call_ms if known is None else known["ms"]
            if known is None:
                self.journal.add("base", "", ms=self.base_ms)
        self.attempt({})

    def is_done(self, default_candidates: bool) -> bool:
        """Return whether the model without changes is accepted, and the default candidates can only make it slower."""
        minimizes_latency = self.objective.max_drop is not None and self.objective.cost == Quantity.LATENCY
        return default_candidates and minimizes_latency and self.trials[0].accepted

    def attempt(self, assignment: Assignment) -> SearchTrial | None:
        """Quantize, evaluate and time an assignment, and return the trial. Return ``None`` if the model cannot be
        quantized in this way.

        Raises:
            SearchEndedError: the evaluations or the minutes are used up.
        """
        same = next((trial for trial in self.trials if trial.assignment == assignment), None)
        if same is not None:
            return same
        record = self.journal.known("trial", {**assignment})
        if record is not None:
            return self._keep({name: record[name] for name in RECORDED}, assignment, None, None)
        if self.trials and (len(self.trials) + 1 >= self.evaluations or self.budget.spent()):
            raise SearchEndedError
        report_progress("trials", len(self.trials) + 1, self.evaluations, f"{len(assignment)} groups changed")
        try:
            reference = self.pool.reference(self.quantizer(assignment)) if assignment else self.pool.base
            model = self.base if not assignment else build.compile(requantize(reference), isa=self.isa)
        except IntaglioError as error:
            if not assignment:
                raise
            logger.info("search: a choice is not possible: %s", error.problem)
            return None
        assert model is not None
        model.kept_attributes = KeptAttributes.of(self.exact)
        values = self._measured(model, assignment)
        self.journal.add("trial", {**assignment}, **values)
        return self._keep(values, assignment, model, reference)

    def _measured(self, model: QuantizedModel, assignment: Assignment) -> dict[str, Any]:
        """Return metric, latency, size, error, share in int8 and standard error of a model."""
        listed = ", ".join(f"{selector} as {name}" for selector, name in assignment.items()) or "nothing"
        metric = self.objective.metric_of(model, f"the int8 model with {listed} changed")
        latency = self.base_ms
        if self.base_ms is not None and assignment:
            assert self.base is not None
            latency = relative_ms(self.base, model, self.call, self.base_ms)
        error = model_error(self.pool.captured, model, self.calls)
        deviation = metric.standard_error(self.exact_metric)
        values = metric.value, latency, saved_megabytes(model), error, model.coverage.macs, deviation
        return dict(zip(RECORDED, values, strict=True))

    def _keep(
        self,
        values: Mapping[str, Any],
        assignment: Assignment,
        model: QuantizedModel | None,
        reference: Reference | None,
    ) -> SearchTrial:
        limits = self.objective.limits
        kept = {Quantity.LATENCY: values["latency_ms"], Quantity.SIZE: values["size_mb"]}
        margin = self.objective.margin(values["standard_error"], self.evaluations - 1)
        accepted = values["metric"] - margin >= self.floor and all(kept[name] <= most for name, most in limits.items())
        predicted = self._predicted(assignment)
        trial = SearchTrial(dict(assignment), accepted=accepted, **values, **predicted)
        self.trials.append(trial)
        logger.info("%s", trial)
        if self.best is None or self.preference(trial) > self.preference(self.best[0]):
            self.best = trial, model, reference
        return trial

    def _predicted(self, assignment: Assignment) -> dict[str, float]:
        """Return the predicted latency and error, where the groups are measured."""
        if self.problem is None or self.measurements is None:
            return {}
        groups = {group.selector: group for group in self.measurements.groups}
        if not assignment.keys() <= groups.keys():
            return {}
        choice = tuple(group.choices.index(assignment.get(group.selector, UNCHANGED)) for group in groups.values())
        return {
            "predicted_ms": self.problem.total(Quantity.LATENCY, choice),
            "predicted_error": self.problem.total(Quantity.ERROR, choice),
        }

    def preference(self, trial: SearchTrial) -> tuple[float, ...]:
        """Return the sort key of a trial: accepted trials first, then those nearest to the limits, then by what is to
        be best."""
        over = sum(max(0.0, trial.cost(name) / most - 1) for name, most in self.objective.limits.items())
        cost = trial.cost(self.objective.cost)
        if trial.accepted and self.objective.max_drop is not None:
            return True, 0.0, -cost, trial.metric
        return trial.accepted, -over, trial.metric, -cost

    def measure(self) -> None:
        """Measure all groups and set up the integer program."""
        assert self.measurements is not None
        assert self.base is not None
        self.measurements.measure_errors()
        if self.objective.with_latency:
            self.measurements.measure_latencies(self.base, self.call, self.isa)
        self.problem = self.measurements.problem(self.base_ms, self.trials[0].size_mb)

    def assignment(self, choice: Choice) -> Assignment:
        """Return the assignment of a choice."""
        assert self.measurements is not None
        chosen = zip(self.measurements.groups, choice, strict=True)
        return {group.selector: group.choices[index] for group, index in chosen if index}

    def quantizer(self, assignment: Assignment) -> Quantizer:
        """Return the quantizer of an assignment."""
        groups = self.measurements.groups if self.measurements is not None else ()
        return changed_quantizer(self.pool.quantizer, entries_of(groups, assignment))

    # ---- strategies --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Search until nothing is left to try, or the evaluations or minutes are used up."""
        try:
            self.measure()
            if self.objective.limits:
                self._within_limits()
            if self.objective.max_drop is not None:
                self._cheapest_above_floor()
                self._cheapest_in_one_program()
                self._almost_all_in_float()
                self._undo_changes()
        except SearchEndedError:
            pass
        self._add_recorded()

    def _add_recorded(self) -> None:
        """Add the trials of the journal that this search did not come to, such as those for other limits."""
        assert self.measurements is not None
        choices = {group.selector: group.choices for group in self.measurements.groups}
        for assignment in self.journal.trials():
            if all(name in choices.get(selector, ()) for selector, name in assignment.items()):
                self.attempt(assignment)

    def _within_limits(self) -> None:
        """Try the choices of least error within the limits, and correct the prediction by what is measured."""
        for _ in range(CORRECTIONS):
            assert self.problem is not None
            choice = self.problem.solve(Quantity.ERROR, self.objective.limits)
            if choice is None:
                choice = self.problem.solve(next(iter(self.objective.limits)), {})
            if choice is None or any(trial.assignment == self.assignment(choice) for trial in self.trials):
                return
            trial = self.attempt(self.assignment(choice))
            if trial is not None:
                self._correct(choice, trial)

    def _correct(self, choice: Choice, trial: SearchTrial) -> None:
        """Scale the predicted changes of latency and size so that they agree with a trial."""
        assert self.problem is not None
        for name in self.objective.limits:
            base, predicted = self.trials[0].cost(name), self.problem.total(name, choice)
            if abs(predicted - base) > 1e-9 * base:
                factor = (trial.cost(name) - base) / (predicted - base)
                self.problem = self.problem.scaled(name, min(max(factor, CORRECTION_RANGE[0]), CORRECTION_RANGE[1]))

    def _cheapest_above_floor(self) -> None:
        """Try the front of predicted choices for the cheapest one that is accepted."""
        assert self.problem is not None
        self._bisect(self.problem.front(self.objective.cost, self.objective.limits))

    def _cheapest_in_one_program(self) -> None:
        """Try the front of choices without layers in float too, if the best trial has some.

        The first layers in float cost more than the next ones, because the threads of PyTorch and of the program
        compete for the cores, but an integer program has one cost for each of them.
        """
        assert self.problem is not None
        assert self.measurements is not None
        assert self.best is not None
        groups, best = self.measurements.groups, self.best[0]
        in_float = [
            (place, index)
            for place, group in enumerate(groups)
            for index, one in enumerate(group.candidates, 1)
            if group.multiplies and one.in_float
        ]
        if self.objective.cost != Quantity.LATENCY or not best.accepted:
            return
        if any(
            best.assignment.get(groups[place].selector) == groups[place].choices[index] for place, index in in_float
        ):
            self._bisect(self.problem.without(in_float).front(self.objective.cost, self.objective.limits))

    def _bisect(self, front: list[Choice]) -> None:
        """Bisect a front for the cheapest choice that is accepted. More accurate choices cost more."""
        low, high = -1, len(front)
        while high - low > 1:
            middle = (low + high) // 2
            trial = self.attempt(self.assignment(front[middle]))
            if trial is None:
                del front[middle]
                high -= 1
            elif trial.accepted:
                high = middle
            else:
                low = middle

    def _almost_all_in_float(self) -> None:
        """Leave all groups but one in float if no choice is accepted. A metric may depend on an operator whose error
        in the results is small."""
        assert self.best is not None
        assert self.measurements is not None
        groups = [group for group in self.measurements.groups if any(one.in_float for one in group.candidates)]
        if self.best[0].accepted or self.objective.limits:
            return
        everything = {g.selector: next(one.name for one in g.candidates if one.in_float) for g in groups}
        errors = self.measurements.errors
        for kept in sorted(groups, key=lambda group: errors[group.selector, UNCHANGED])[:KEPT_ALONE]:
            trial = self.attempt({key: name for key, name in everything.items() if key != kept.selector})
            if trial is not None and trial.accepted:
                return

    def _undo_changes(self) -> None:
        """Undo changes of the best trial that cost most for the error they avoid, as long as it is accepted."""
        assert self.best is not None
        if not self.best[0].accepted:
            return
        size = 0
        while True:
            changed = self._costly_changes(self.best[0].assignment)
            size = min(size or max(len(changed) // 2, 1), len(changed))
            if not size:
                return
            for part in _parts(changed, size):
                kept = {key: name for key, name in self.best[0].assignment.items() if key not in part}
                if len(kept) < len(self.best[0].assignment):
                    self.attempt(kept)
            if size == 1:
                return
            size //= 2

    def _costly_changes(self, assignment: Assignment) -> list[str]:
        """Return the changed groups whose change costs something, those with the least gain for their cost first."""
        assert self.problem is not None
        assert self.measurements is not None
        rates = {}
        for place, group in enumerate(self.measurements.groups):
            if (name := assignment.get(group.selector)) is not None:
                index = group.choices.index(name)
                errors, costs = (self.problem.costs[q][place] for q in (Quantity.ERROR, self.objective.cost))
                if (cost := costs[index] - costs[0]) > 0:
                    rates[group.selector] = (errors[0] - errors[index]) / cost
        return sorted(rates, key=lambda selector: (rates[selector], selector))


RECORDED = ("metric", "latency_ms", "size_mb", "error", "macs", "standard_error")
"""Fields of a trial that its record in the journal has."""


def _parts(items: list[str], size: int) -> Iterator[list[str]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def saved_megabytes(model: QuantizedModel) -> float:
    """Return the size of a model's file without the compiled program."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.intaglio"
        model.save(path, library=False)
        return path.stat().st_size / 1e6
