"""Start and end of a search: from the reference of a recipe to the chosen model."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from intaglio import build
from intaglio.errors import InputError
from intaglio.lower import requantize
from intaglio.mixed_precision.assignment_problem import solver
from intaglio.mixed_precision.group_errors import sample_calls
from intaglio.mixed_precision.group_latencies import TimedCall
from intaglio.mixed_precision.group_measurements import GroupMeasurements, TimeBudget
from intaglio.mixed_precision.objective import Objective
from intaglio.mixed_precision.precision_groups import candidates_of, entries_of
from intaglio.mixed_precision.search_journal import SearchJournal, journal_key
from intaglio.mixed_precision.search_result import SearchResult
from intaglio.mixed_precision.search_run import SearchRun
from intaglio.native import cpu as machine
from intaglio.progress import report_progress
from intaglio.quant.calibrate.batches import Binder
from intaglio.reporting.timing.measure_speed import measure_speed
from intaglio.runtime import QuantizedModel
from intaglio.runtime.kept_attributes import KeptAttributes
from intaglio.signature import bind, check_tensors
from intaglio.torch_private import pytree
from intaglio.tune.reference_pool import ReferencePool
from intaglio.tune.schedule_search import first_sample, unflatten_call


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search.

    Attributes:
        budget: minutes.
        evaluations: largest number of calls of the metric, the one with the float model included.
        candidates: settings by name, or ``None`` for the default ones.
        journal: file of the journal, or ``None``.
        timed_call: arguments of the call that is timed, or ``None`` for the first sample of the data.
        isa: instruction sets to build for.
    """

    budget: float = 10.0
    evaluations: int = 20
    candidates: Mapping[str, Any] | None = None
    journal: str | Path | None = None
    timed_call: Any = None
    isa: str | Iterable[str] | None = None

    def __post_init__(self) -> None:
        solver()
        if self.isa is not None and not isinstance(self.isa, str):
            object.__setattr__(self, "isa", tuple(self.isa))
        if not self.budget > 0:
            problem = f"it is {self.budget}, but must be a number of minutes above 0"
            raise InputError("budget", None, problem, remedy="pass budget=10 to search for ten minutes")
        if self.evaluations < 2:
            problem = f"it is {self.evaluations}, but the float model and the int8 model need one evaluation each"
            raise InputError("evaluations", None, problem, remedy="pass evaluations=2 or more")


def searched(pool: ReferencePool, objective: Objective, exact: nn.Module, options: SearchOptions) -> SearchResult:
    """Search until the budget is used up, the user interrupts it, or nothing is left to try.

    Args:
        pool: the reference of the recipe, and what others are made from.
        objective: the metric and the limits.
        exact: the float model.
        options: options of the search.

    Raises:
        InputError: the metric fails, or the journal belongs to another search.
    """
    begin, calls = time.monotonic(), sample_calls(pool.captured, pool.batches)
    candidates = candidates_of(options.candidates, objective.with_size)
    call = _timed_call(pool, options.timed_call)
    journal = SearchJournal(None if options.journal is None else Path(options.journal), _key(pool, options, call))
    budget = TimeBudget(options.budget, begin)
    run = SearchRun(pool, objective, exact, call, calls, options.isa, journal, budget, options.evaluations)
    interrupted = False
    run.start()
    try:
        if not run.is_done(options.candidates is None):
            run.measurements = GroupMeasurements.of(pool, candidates, calls, journal, budget)
            run.run()
    except KeyboardInterrupt:
        interrupted = True
    return _result(run, interrupted, time.monotonic() - begin)


def _result(run: SearchRun, interrupted: bool, seconds: float) -> SearchResult:
    """Return the result of a search, and warn if no trial is accepted. A model of the journal is built again."""
    assert run.best is not None
    chosen, model, reference = run.best
    quantizer = run.quantizer(chosen.assignment)
    if reference is None:
        reference = run.pool.reference(quantizer) if chosen.assignment else run.pool.base
    if model is None:
        model = _built(run, reference)
    if not interrupted:
        report_progress("measure")
        model.measured = measure_speed(run.exact, model, (run.call[0], dict(run.call[1])))
    groups = run.measurements.groups if run.measurements is not None else ()
    entries = entries_of(groups, chosen.assignment)
    changes = {selector: None if setting.quantize is False else setting for selector, setting in entries}
    found = SearchResult(
        model,
        reference,
        quantizer.recipe.with_parameters(reference.parameters),
        changes,
        run.exact_metric.value,
        run.floor,
        {str(name): limit for name, limit in run.objective.limits.items()},
        str(run.objective.cost),
        tuple(run.trials),
        chosen,
        seconds,
        interrupted,
        None if run.exact_metric.samples is None else run.objective.confidence,
    )
    if not found.reached and not interrupted:
        target = "keeps the limits" if run.objective.max_drop is None else f"reaches the metric {run.floor:.6g}"
        target += " within the limits" if run.objective.limits and run.objective.max_drop is not None else ""
        best = f"the best of {len(run.trials)} trials has {chosen.metric:.6g}"
        if chosen.standard_error:
            target += f" with a confidence of {100 * run.objective.confidence:g} %"
            best += f" with a standard error of {chosen.standard_error:.2g}"
        more = "more samples in evaluate, " if chosen.standard_error else ""
        advice = f"A larger budget, more evaluations, a larger max_drop or limit, {more}or another recipe may help"
        warnings.warn(f"search: no trial {target}; {best}. {advice}", stacklevel=7)
    return found


def _built(run: SearchRun, reference: Any) -> QuantizedModel:
    model = build.compile(requantize(reference), isa=run.isa)
    model.kept_attributes = KeptAttributes.of(run.exact)
    return model


def _timed_call(pool: ReferencePool, given: Any) -> TimedCall:
    """Return the arguments of the timed call."""
    signature, binder = pool.captured.signature, Binder.of(pool.captured.signature)
    args, kwargs = binder(pool.batches[0] if given is None else given)
    leaves = bind(signature, args, kwargs)
    if given is not None:
        check_tensors(signature, leaves)
        return args, kwargs
    return unflatten_call(signature, first_sample(signature, leaves, ()))


def _key(pool: ReferencePool, options: SearchOptions, call: TimedCall) -> str:
    """Return the key of the journal."""
    recipe = replace(pool.quantizer.recipe, parameters=None)
    shapes = [getattr(leaf, "shape", leaf) for leaf in pytree.tree_leaves(call)]
    parts = (
        pool.base.parameters.to_json(),
        recipe.to_toml(),
        json.dumps({name: str(value) for name, value in (options.candidates or {}).items()}),
        shapes,
        machine.cpu_name(),
        torch.get_num_threads(),
        options.isa,
    )
    return journal_key(parts)
