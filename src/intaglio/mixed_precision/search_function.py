"""`search`: the public function that searches for a mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from intaglio.api import cached_batches, capture_model, convert_with_corrections
from intaglio.argument_checks import check_arguments_except
from intaglio.errors import InputError
from intaglio.mixed_precision.objective import Objective
from intaglio.mixed_precision.search_result import SearchResult
from intaglio.mixed_precision.search_start import SearchOptions, searched
from intaglio.progress import shows_progress
from intaglio.quant.calibrate.batches import log_once
from intaglio.quant.calibrate.distributed import Group
from intaglio.stages import Quantizer, convert, prepare
from intaglio.tracing.already_quantized import refuse_quantized
from intaglio.tracing.copies.copy_model import copy_model
from intaglio.tune.reference_pool import ReferencePool

SEARCH_STAGES = (
    "capture",
    "equalize",
    "calibrate",
    "correct",
    "candidates",
    "errors",
    "latencies",
    "trials",
    "measure",
)
"""Stages of `search` that show progress, in their order."""


@check_arguments_except("model")
@log_once()
@shows_progress(*SEARCH_STAGES, only_if=lambda: not Group.current().rank)
def search(
    model: nn.Module,
    data: Any,
    evaluate: Callable[[Any], Any],
    *,
    max_drop: float | None = None,
    relative: bool = True,
    max_latency: float | None = None,
    max_size: float | None = None,
    minimize: str = "latency",
    confidence: float = 0.95,
    budget: float = 10.0,
    evaluations: int = 20,
    candidates: Mapping[str, Any] | None = None,
    journal: str | Path | None = None,
    timed_call: Any = None,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    quantizer: Quantizer | None = None,
    samples: int | None = None,
    progress: bool | None = None,
    isa: str | Iterable[str] | None = None,
) -> SearchResult:
    """Choose the precision of every group of operators so that a model keeps an accuracy metric at the least latency,
    or has the best metric within a latency or size.

    Starts from the model that `quantize` would return. Two things are measured for each group of operators that run as
    one kernel, and for each candidate: the error that it alone causes in the results, and the time that it adds to a
    call. An integer linear program, solved to optimality, then chooses candidates for a range of errors. The choices
    are compiled, evaluated and timed as a whole: a bisection finds the cheapest one that keeps the metric, and changes
    that turn out not to be needed are undone. For limits, the prediction is corrected by what was measured, and solved
    again. Ctrl-C ends the search with the best model so far.

    Args:
        model: the float model, which is not changed.
        data: an iterable of batches. A function that runs the model is refused, because errors are measured on batches.
        evaluate: a function that takes a model, either the float model or an int8 model, and returns one finite number,
            higher for better, or a vector with a number for each sample, such as 1 for a correct class and 0 for a
            wrong one, whose mean is the metric. It is called without gradients, with the float model first.
        max_drop: the largest accepted loss of the metric, as a fraction of the float model's metric (default: 0.01, or
            without a bound if there is a limit).
        relative: if ``False``, ``max_drop`` is an absolute difference.
        max_latency: the largest accepted latency in milliseconds per call.
        max_size: the largest accepted size in megabytes of the saved model without its compiled program.
        minimize: what is minimized where ``max_drop`` is kept, "latency" or "size".
        confidence: if ``evaluate`` returns a number for each sample, the probability with which the chosen model keeps
            ``max_drop`` on other samples of the same kind, however many models are tried; 0.5 asks only for
            ``max_drop`` on the samples of ``evaluate``.
        budget: minutes. Measurements of groups take half of them at most; the groups that are not measured keep what
            the recipe says. The model that `quantize` returns is evaluated in any case.
        evaluations: the largest number of calls of ``evaluate``, the one with the float model included.
        candidates: settings by name, in the forms that `Recipe.of` takes (default: float, 16-bit shortcuts, other range
            methods and a scale per token; with a size also 4-bit weights). ``{"float": None}`` only leaves operators
            in float.
        journal: a file to which every measurement is written. If it exists, the search continues from it. Use a new one
            if ``evaluate`` changes.
        timed_call: arguments of the call that is timed, as a batch (default: the first sample of the data).
        example_inputs: a tuple with the arguments of one call (default: the first batch).
        dynamic_shapes: as in `quantize`.
        quantizer: the recipe to start from. Operators that it leaves in float stay in float.
        samples: as in `quantize`.
        progress: as in `quantize`.
        isa: instruction sets, as in `CompileOptions`.

    Returns:
        The chosen model, its recipe, and all trials with their Pareto front, and as ``measured`` the times of the model
        beside those of the float model, as ``quantize(measure=True)`` measures them. The model has the plain attributes
        of the float model, such as the configuration of a model of ``transformers``, but not its class: for that, call
        `quantize` with the recipe.

    Raises:
        InputError: SciPy is not installed, ``evaluate`` fails or returns neither a finite number nor a vector of them,
            ``data`` is a function, or the journal belongs to another search.

    Examples:
        >>> found = intaglio.search(model, batches, evaluate=lambda m: accuracy(m, test_set), max_drop=0.005)
        >>> found.model.save("model.int8")
    """
    refuse_quantized(model)
    objective = Objective(evaluate, max_drop, relative, max_latency, max_size, minimize, confidence)
    options = SearchOptions(budget, evaluations, candidates, journal, timed_call, isa)
    quantizer = quantizer or Quantizer()
    captured, _, data = capture_model(model, data, example_inputs, dynamic_shapes)
    prepared, given = prepare(captured, quantizer), quantizer.recipe.parameters
    cached, data = cached_batches(prepared, data, samples)
    if not cached:
        problem = "data is a function that runs the model, but search measures the error of operators on batches"
        raise InputError("data", None, problem, remedy="pass an iterable of batches")
    if given is not None or not prepared.observers:
        reference = convert(prepared, given)
    else:
        reference = convert_with_corrections([prepared], cached, data, samples, progress)
    exact = copy_model(model).eval() if any(part.training for part in model.modules()) else model
    return searched(ReferencePool(captured, quantizer, reference, cached), objective, exact, options)
