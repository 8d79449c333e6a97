"""`GroupMeasurements`: errors, latencies and sizes of all candidates, and the integer program that they give."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from intaglio import build
from intaglio.errors import IntaglioError
from intaglio.lower import requantize
from intaglio.mixed_precision.assignment_problem import AssignmentProblem, Quantity
from intaglio.mixed_precision.group_errors import ExactRun, ResultErrors, UnknownValueError
from intaglio.mixed_precision.group_latencies import INTERLEAVED, TimedCall, measured_differences
from intaglio.mixed_precision.precision_groups import (
    UNCHANGED,
    Candidate,
    OperatorGroup,
    changed_quantizer,
    entries_of,
    groups_of,
    is_changed,
    weight_bytes,
)
from intaglio.mixed_precision.search_journal import SearchJournal
from intaglio.progress import report_progress
from intaglio.quant.qdq.convert import Reference
from intaglio.runtime import QuantizedModel
from intaglio.tune.reference_pool import ReferencePool

MEASURED_SHARE = 0.5
"""Share of the budget that measurements of groups may take."""
OWN_PROGRAM_SHARE = 0.01
"""Share of the error that a group of several kernels must cause to be measured in a program of its own."""
GROUP_STRIDE = 8
"""Distance between groups that are measured one after the other."""
NOTABLE_GAIN = 0.01
"""Share by which a candidate must lower an error or a size to be considered for it."""

Isas = str | Iterable[str] | None
"""Instruction sets to build for; ``None`` for the best one of this machine."""
logger = logging.getLogger("intaglio")


@dataclass
class TimeBudget:
    """Minutes of a search.

    Attributes:
        minutes: the budget.
        begin: when the search began, in seconds of the monotonic clock.
    """

    minutes: float
    begin: float = field(default_factory=time.monotonic)

    def spent(self, share: float = 1.0) -> bool:
        """Return whether a share of the budget is over."""
        return time.monotonic() - self.begin > 60 * self.minutes * share


@dataclass
class GroupMeasurements:
    """Measurements of the groups of a model.

    Attributes:
        pool: references of the model.
        groups: its groups, with the candidates that change them.
        calls: tensors of the calls on which errors are measured.
        journal: journal of the search.
        budget: time of the search.
        variants: references with all groups at one candidate, by its name.
        errors: relative squared error by selector and candidate; 0 in float.
        latencies: milliseconds that a candidate adds, by selector and candidate.
    """

    pool: ReferencePool
    groups: list[OperatorGroup]
    calls: Sequence[Sequence[torch.Tensor]]
    journal: SearchJournal
    budget: TimeBudget
    variants: dict[str, Reference] = field(default_factory=dict)
    errors: dict[tuple[str, str], float] = field(default_factory=dict)
    latencies: dict[tuple[str, str], float] = field(default_factory=dict)

    @staticmethod
    def of(
        pool: ReferencePool,
        candidates: Sequence[Candidate],
        calls: Sequence[Sequence[torch.Tensor]],
        journal: SearchJournal,
        budget: TimeBudget,
    ) -> GroupMeasurements:
        """Find the groups of a model and the candidates that change each of them."""
        groups, variants = groups_of(pool.base), {UNCHANGED: pool.base}
        for done, candidate in enumerate(candidates):
            report_progress("candidates", done, len(candidates), candidate.name)
            changed = [group for group in groups if group.takes(candidate)]
            if not candidate.in_float:
                found = _variant(pool, changed, candidate)
                if found is None:
                    continue
                variants[candidate.name] = found
                before, after = pool.base.annotations, found.annotations
                changed = [group for group in changed if is_changed(group, before, after)]
            selectors = {group.selector for group in changed}
            groups = [
                replace(group, candidates=(*group.candidates, candidate)) if group.selector in selectors else group
                for group in groups
            ]
        return GroupMeasurements(pool, groups, calls, journal, budget, variants)

    def measure_errors(self) -> None:
        """Measure the error that each candidate of each group causes alone, in half of the budget at most. Candidates
        that are not measured are dropped."""
        wanted = [(group, name) for group in self.groups for name in group.choices if name in self.variants]
        known = {(group.selector, name): self.journal.known("error", [group.selector, name]) for group, name in wanted}
        missing = [(group, name) for group, name in wanted if known[group.selector, name] is None]
        sums = {(group.selector, name): ResultErrors() for group, name in missing}
        for place, tensors in enumerate(self.calls if missing else ()):
            exact = ExactRun(self.pool.base, self.pool.captured, tensors)
            for done, (group, name) in enumerate(_spread(missing)):
                report_progress("errors", place * len(missing) + done, len(missing) * len(self.calls), group.selector)
                if self.budget.spent(MEASURED_SHARE * 0.6 * (place + 1) / len(self.calls)):
                    break
                try:
                    sums[group.selector, name].add(exact.result, exact.result_with(group, self.variants[name]))
                except (UnknownValueError, RuntimeError) as error:
                    logger.info("search: the error of %s as %s is not known: %r", group.selector, name, error)
                    sums.pop((group.selector, name))
                    missing = [(one, other) for one, other in missing if (one, other) != (group, name)]
        for (selector, name), found in sums.items():
            if found.signal:
                self.journal.add("error", [selector, name], error=found.relative)
        for group in self.groups:
            in_float = [(group.selector, one.name) for one in group.candidates if one.in_float]
            self.errors |= dict.fromkeys(in_float, 0.0)
        for key in known:
            if (record := self.journal.known("error", list(key))) is not None:
                self.errors[key] = float(record["error"])
        self._drop(lambda group, name: (group.selector, name) in self.errors)

    def measure_latencies(self, base: QuantizedModel, call: TimedCall, isa: Isas) -> None:
        """Measure how much longer a call takes with each candidate of each group. Candidates that are not measured are
        dropped."""
        tasks = list(self._latency_tasks())
        for done, (candidate, changed, own) in enumerate(tasks):
            report_progress("latencies", done, len(tasks), candidate.name)
            unknown = [one for one in changed if self.journal.known("latency", [one.selector, candidate.name]) is None]
            if unknown:
                self._measure_program(base, call, isa, candidate, changed, own)
        for group in self.groups:
            for one in group.candidates:
                record = self.journal.known("latency", [group.selector, one.name])
                if record is not None or not one.changes_program:
                    self.latencies[group.selector, one.name] = 0.0 if record is None else float(record["ms"])
        self._drop(lambda group, name: (group.selector, name) in self.latencies)

    def _measure_program(
        self,
        base: QuantizedModel,
        call: TimedCall,
        isa: Isas,
        candidate: Candidate,
        changed: list[OperatorGroup],
        own: bool,
    ) -> None:
        """Time a program in which some groups have a candidate, or its halves if it cannot be built, such as when
        nothing would be quantized."""
        if self.budget.spent(MEASURED_SHARE):
            return
        model, half = self._compiled(changed, candidate, isa), len(changed) // 2
        if model is None:
            for part in (changed[:half], changed[half:]) if half else ():
                self._measure_program(base, call, isa, candidate, part, own)
            return
        single = [group for group in self.groups if len(group.anchors) == 1]
        indices = [] if own else [single.index(group) for group in changed]
        for group, taken in zip(changed, measured_differences(base, model, call, single, indices), strict=True):
            self.journal.add("latency", [group.selector, candidate.name], ms=taken)

    def _latency_tasks(self) -> Iterator[tuple[Candidate, list[OperatorGroup], bool]]:
        """Yield the programs to time: a candidate, the groups that have it, and whether it is one group alone."""
        total = sum(self.errors.get((group.selector, UNCHANGED), 0.0) for group in self.groups)
        by_name = {one.name: one for group in self.groups for one in group.candidates if one.changes_program}
        for candidate in by_name.values():
            able = [group for group in self.groups if candidate in group.candidates]
            single = [group for group in able if len(group.anchors) == 1]
            for start in range(min(INTERLEAVED, len(single))):
                yield candidate, single[start::INTERLEAVED], False
            for group in able:
                if len(group.anchors) > 1 and self.errors[group.selector, UNCHANGED] >= OWN_PROGRAM_SHARE * total:
                    yield candidate, [group], True

    def _compiled(self, groups: list[OperatorGroup], candidate: Candidate, isa: Isas) -> QuantizedModel | None:
        """Return the program with some groups at a candidate, or ``None`` if there is none."""
        assignment = {group.selector: candidate.name for group in groups}
        quantizer = changed_quantizer(self.pool.quantizer, entries_of(groups, assignment))
        try:
            return build.compile(requantize(self.pool.reference(quantizer)), isa=isa)
        except IntaglioError as error:
            logger.info("search: %s cannot be timed: %s", candidate.name, error.problem)
            return None

    def _drop(self, known: Callable[[OperatorGroup, str], bool]) -> None:
        """Keep only the candidates with a known measurement, in groups whose unchanged form has one too."""
        kept = []
        for group in self.groups:
            candidates = tuple(one for one in group.candidates if known(group, one.name))
            if (group.selector, UNCHANGED) not in self.errors:
                candidates = ()
            kept.append(replace(group, candidates=candidates))
        self.groups = kept

    def problem(self, base_ms: float | None, base_mb: float) -> AssignmentProblem:
        """Return the integer program.

        Args:
            base_ms: milliseconds of the unchanged program, if latencies count.
            base_mb: megabytes of the unchanged model.
        """
        better = [replace(group, candidates=tuple(self._better(group))) for group in self.groups]
        self.groups = [group for group in better if group.candidates]
        sizes = tuple(tuple(self._megabytes(group, name) for name in group.choices) for group in self.groups)
        errors = tuple(tuple(self.errors[group.selector, name] for name in group.choices) for group in self.groups)
        latencies = tuple(
            tuple(self.latencies.get((group.selector, name), 0.0) for name in group.choices) for group in self.groups
        )
        costs = {Quantity.ERROR: errors, Quantity.LATENCY: latencies, Quantity.SIZE: sizes}
        rest = base_mb - math.fsum(row[0] for row in sizes)
        return AssignmentProblem(costs, {Quantity.LATENCY: base_ms or 0.0, Quantity.SIZE: rest})

    def _better(self, group: OperatorGroup) -> Iterator[Candidate]:
        """Yield the candidates that are better than the unchanged form in some quantity."""
        size, error = self._megabytes(group, UNCHANGED), self.errors.get((group.selector, UNCHANGED), 0.0)
        for one in group.candidates:
            saves_time = self.latencies.get((group.selector, one.name), 0.0) < 0
            saves_error = self.errors[group.selector, one.name] < (1 - NOTABLE_GAIN) * error
            if saves_time or saves_error or self._megabytes(group, one.name) < (1 - NOTABLE_GAIN) * size:
                yield one

    def _megabytes(self, group: OperatorGroup, name: str) -> float:
        reference = self.variants.get(name, self.pool.base)
        return weight_bytes(group, reference.annotations, datatype_bits=name in self.variants) / 1e6


def _variant(pool: ReferencePool, groups: Sequence[OperatorGroup], candidate: Candidate) -> Reference | None:
    """Return the reference with all groups at a candidate, or ``None`` if the model does not have it."""
    entries = [entry for group in groups for entry in group.entries(candidate)]
    try:
        return pool.reference(changed_quantizer(pool.quantizer, entries)) if entries else None
    except IntaglioError as error:
        logger.info("search: the candidate %s is not possible: %s", candidate.name, error.problem)
        return None


def _spread(items: Sequence[tuple[OperatorGroup, str]]) -> list[tuple[OperatorGroup, str]]:
    """Return items in an order in which the first of them are spread over all, the unchanged form of a group first."""
    by_group: dict[str, list[tuple[OperatorGroup, str]]] = {}
    for item in items:
        by_group.setdefault(item[0].selector, []).append(item)
    listed = list(by_group.values())
    return [item for start in range(GROUP_STRIDE) for one in listed[start::GROUP_STRIDE] for item in one]
