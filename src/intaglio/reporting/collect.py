"""Collection of everything that a report shows, in one pass over the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from intaglio import eager
from intaglio.eager.quantization_state import session_of
from intaglio.errors import ArtifactError, InputError, IntaglioError
from intaglio.ir import Graph
from intaglio.lower import Lowered, requantize
from intaglio.lower.facts.operator_facts import ModelFacts
from intaglio.parts import PartlyQuantizedModel
from intaglio.progress import report_progress
from intaglio.reporting.operators import OperatorSteps, graph_report, steps_of
from intaglio.reporting.report_data import GraphReport, ModelKind, ReportData
from intaglio.reporting.run_record import run_record
from intaglio.reporting.timing.report_speed import speed_beside_float, timed_call
from intaglio.runtime import Coverage, QuantizedModel
from intaglio.runtime.reports.profile import Profile, calls_problem
from intaglio.runtime.saved.fingerprints import fingerprint_of_programs
from intaglio.signature import bind
from intaglio.tune import ComparisonRun, first_sample, random_sample, run_comparison
from intaglio.tune.schedule_search import unflatten_call


@dataclass(frozen=True)
class Settings:
    """Measurements of a report.

    Attributes:
        samples: number of samples to compare; ``None`` for all.
        calls: number of timed calls, at most 100,000; 0 measures no times.
        speed: whether to time the float model too.

    Raises:
        InputError: a number is too small or too large.
    """

    samples: int | None = 64
    calls: int = 20
    speed: bool = False

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            problem = f"samples = {self.samples}; it must be at least 1"
            raise InputError("report", None, problem, remedy="leave samples out")
        if (reason := calls_problem(self.calls, 0)) is not None:
            raise InputError("report", None, reason, remedy="pass 0 to measure no times")


@dataclass(frozen=True)
class Collection:
    """The content of a report, and the comparisons that it was made of.

    Attributes:
        data: the content.
        runs: the comparison of each graph that was compared, by name of the graph.
    """

    data: ReportData
    runs: Mapping[str, ComparisonRun] = field(default_factory=dict)


@dataclass
class _Collected:
    """Facts about a model that are known so far."""

    graphs: list[GraphReport] = field(default_factory=list)
    texts: list[Mapping[str, str]] = field(default_factory=list)
    integer: list[Graph] = field(default_factory=list)
    fingerprints: dict[str, str] = field(default_factory=dict)
    limits: list[str] = field(default_factory=list)
    isa: str = ""


def collect(float_model: nn.Module | None, model: Any, data: Any, settings: Settings) -> Collection:
    """Return the content of the report of a quantized model.

    Args:
        float_model: the float model; ``None`` if errors are not to be measured.
        model: what `quantize`, `load` or `eager.convert` returned.
        data: an iterable of batches, or ``None``.
        settings: what to measure.

    Raises:
        InputError: the model is not a quantized one.
    """
    if float_model is None or not settings.speed or not settings.calls:
        return _collected(float_model, model, data, settings)
    call, data = timed_call(float_model, model, data)
    found = _collected(float_model, model, data, settings)
    with _unchanged_state(model):
        speed, problem = speed_beside_float(float_model, model, call, settings.calls)
    limits = (*found.data.limits, problem) if problem else found.data.limits
    return replace(found, data=replace(found.data, measured=speed, limits=limits))


def _collected(float_model: nn.Module | None, model: Any, data: Any, settings: Settings) -> Collection:
    """Return the content without the times of the float model."""
    if isinstance(model, QuantizedModel):
        return _of_program(float_model, model, data, settings)
    if isinstance(model, PartlyQuantizedModel):
        return _of_parts(float_model, model, data, settings)
    if eager.is_session(model):
        return _of_session(float_model, model, data, settings)
    programs = {path: part for path, part in _modules(model) if isinstance(part, QuantizedModel)}
    if programs:
        return _of_programs(float_model, model, programs, data, settings)
    problem = f"a report is about a quantized model, got a {type(model).__name__}"
    raise InputError("report", None, problem, remedy="pass what quantize, load or eager.convert returns")


def _modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    return iter(model.named_modules()) if isinstance(model, nn.Module) else iter(())


def _of_program(float_model: nn.Module | None, model: QuantizedModel, data: Any, settings: Settings) -> Collection:
    """Return the content for a model that is one program."""
    found, run = _Collected(), None
    with _unchanged_state(model):
        if float_model is not None and data is not None:
            run = run_comparison(float_model, model, data, settings.samples, statistics=True)
            if not run.graphs:
                found.limits.append(NO_REFERENCE)
        else:
            found.limits.append(NO_DATA)
        _add_program(found, "", model, run, settings, own=False)
        fingerprints = dict(found.fingerprints)  # that of the model includes the bodies
        for name, loop in model.loops.items():
            _add_program(found, name, loop.body, None, replace(settings, calls=0), own=False)
        found.fingerprints = fingerprints
    made = _report(model.model_info.name, ModelKind.WHOLE, model.coverage, run, found)
    return Collection(made, {"": run} if run is not None else {})


def _add_program(
    found: _Collected,
    name: str,
    program: QuantizedModel,
    run: ComparisonRun | None,
    settings: Settings,
    own: bool,
) -> None:
    """Add a program to what is known: its operators, errors and times."""
    facts = _facts(program.model_info.texts)
    if facts is None:
        found.limits.append(f"{name or 'model'}: {NO_FACTS}")
        facts = ModelFacts()
    report_progress("profile")
    profile, problem = _profile(program, run, settings.calls)
    if problem:
        found.limits.append(f"{name or 'model'}: the time of its steps was not measured: {problem}")
    compared = run.graphs[0] if run is not None and run.graphs else None
    rows = run.comparison.rows if run is not None else ()
    comparison = run.comparison if run is not None and own else None
    found.graphs.append(graph_report(name, facts, steps_of(facts, program), rows, compared, profile, comparison))
    found.texts.append(program.model_info.texts)
    found.integer.append(program.graph)
    with suppress(ArtifactError):  # float parts that no file can hold
        found.fingerprints[name] = program.fingerprint()
    found.isa = program.artifact.program.isa


def _profile(program: QuantizedModel, run: ComparisonRun | None, calls: int) -> tuple[Profile | None, str]:
    """Return the profile of one sample, or why there is none."""
    if not calls:
        return None, ""
    signature = program.signature
    try:
        if run is not None:
            leaves = bind(signature, *run.calls[0])
            sample = first_sample(signature, leaves, program.graph.byte_inputs())
        else:
            sample = random_sample(signature)
        args, kwargs = unflatten_call(signature, sample)
        with torch.no_grad():
            return program.profile(*args, calls=calls, **kwargs), ""
    except InputError as error:
        return None, error.problem.splitlines()[0]


def _of_parts(float_model: nn.Module | None, model: PartlyQuantizedModel, data: Any, settings: Settings) -> Collection:
    """Return the content for a model that consists of Python code and int8 parts."""
    found, runs = _Collected(), dict[str, ComparisonRun]()
    if float_model is not None and data is not None:
        runs = model.part_runs(float_model, data, settings.samples, statistics=True)
        found.limits.append(PARTS_ONLY)
    else:
        found.limits.append(NO_DATA)
    for path, part in model.parts.items():
        if runs and path not in runs:
            found.limits.append(f"{path}: no batch calls this part")
        _add_program(found, path, part, runs.get(path), settings, own=True)
    digests = "".join(run.digest for run in runs.values())
    made = _report(type(model.model).__name__, ModelKind.PARTS, model.coverage, None, found)
    samples = max((run.comparison.samples for run in runs.values()), default=0)
    run = replace(made.run, samples=samples, data=digests, fingerprint=_fingerprint(model))
    return Collection(replace(made, run=run), runs)


def _of_session(float_model: nn.Module | None, model: nn.Module, data: Any, settings: Settings) -> Collection:
    """Return the content for a converted model of eager mode."""
    found, run = _Collected(limits=[NO_TIMES]), None
    if float_model is not None and data is not None:
        run = run_comparison(float_model, model, data, settings.samples, statistics=True)
    else:
        found.limits.append(NO_DATA)
    compared = {graph.recording: graph for graph in run.graphs} if run is not None else {}
    rows = run.comparison.rows if run is not None else ()
    for number, lowered in _recordings(model):
        own = [row for row in rows if row.recording == number]
        facts = _facts(lowered.model_info.texts) or ModelFacts()
        name = f"recording {number}"
        found.graphs.append(graph_report(name, facts, OperatorSteps(), own, compared.get(number)))
        found.texts.append(lowered.model_info.texts)
        found.integer.append(lowered.graph)
    return Collection(_report(type(model).__name__, ModelKind.DEFINE_BY_RUN, eager.coverage(model), run, found))


def _recordings(model: nn.Module) -> Iterator[tuple[int, Lowered]]:
    """Yield number and integer graph of the recordings of a converted model that run in int8."""
    for number, segment in enumerate(session_of(model).segments):
        if segment.reference is not None and segment.refused is None:
            yield number, requantize(segment.reference)


def _of_programs(
    float_model: nn.Module | None,
    model: nn.Module,
    programs: Mapping[str, QuantizedModel],
    data: Any,
    settings: Settings,
) -> Collection:
    """Return the content for a model of a library that has several programs, such as one that generates text."""
    found, run = _Collected(limits=[PROGRAMS_ONLY]), None
    if float_model is not None and data is not None:
        run = _attempt(lambda: run_comparison(float_model, model, data, settings.samples), found.limits)
    for path, program in programs.items():
        _add_program(found, path, program, None, settings, own=False)
    made = _report(type(model).__name__, ModelKind.PARTS, _coverage(model, programs), run, found)
    own = _fingerprint(model) or made.run.fingerprint
    return Collection(replace(made, run=replace(made.run, fingerprint=own)))


def _fingerprint(model: nn.Module) -> str:
    """Return the fingerprint of a model that has several programs, or "" if it cannot tell."""
    if not hasattr(model, "fingerprint"):
        return ""
    try:
        return str(cast(Any, model).fingerprint())
    except ArtifactError:  # float parts that no file can hold
        return ""


def _coverage(model: nn.Module, programs: Mapping[str, QuantizedModel]) -> Coverage:
    """Return the coverage of a model, or the sum of those of its programs."""
    own = getattr(model, "coverage", None)
    if isinstance(own, Coverage):
        return own
    first, *others = programs.values()
    total = first.coverage
    for program in others:
        total = total.with_body(program.coverage)
    return total


def _attempt(action: Callable[[], ComparisonRun], limits: list[str]) -> ComparisonRun | None:
    """Return what an action returns, or note its error as a limit."""
    try:
        return action()
    except IntaglioError as error:
        limits.append(f"the results were not compared: {error.problem.splitlines()[0]}")
        return None


def _facts(texts: Mapping[str, str]) -> ModelFacts | None:
    return ModelFacts.from_json(texts["operators"]) if "operators" in texts else None


def _report(name: str, kind: ModelKind, coverage: Coverage, run: ComparisonRun | None, found: _Collected) -> ReportData:
    comparison = run.comparison if run is not None else None
    samples, digest = (comparison.samples, run.digest) if run is not None and comparison is not None else (0, "")
    record = replace(run_record(found.texts, found.integer, samples, digest), isa=found.isa)
    several = fingerprint_of_programs(found.fingerprints) if len(found.fingerprints) > 1 else ""
    record = replace(record, fingerprint=several or "".join(found.fingerprints.values()))
    return ReportData(name, kind, record, coverage, comparison, tuple(found.graphs), (), tuple(found.limits))


@contextmanager
def _unchanged_state(model: nn.Module) -> Iterator[None]:
    """Restore the mutable buffers of a model after calls that change them."""
    before = {name: tensor.clone() for name, tensor in model.named_buffers(recurse=False)}
    try:
        yield
    finally:
        for name, tensor in before.items():
            setattr(model, name, tensor)


NO_DATA = "errors were not measured: they need the float model and data"
NO_REFERENCE = (
    "operators were not compared, because the reference cannot be made again from the float model and the recipe"
)
NO_FACTS = "the model has no list of its operators: it was saved by an earlier version, or its weights were replaced"
NO_TIMES = "the time of single operators was not measured: Python runs between them"
PARTS_ONLY = "parts were compared with their float submodules one by one, and not the results of the whole model"
PROGRAMS_ONLY = "operators were not compared: the programs of this model are called by code of its library"
