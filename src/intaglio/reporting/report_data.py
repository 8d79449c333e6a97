"""`ReportData`: everything that a report shows, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from intaglio.lower.facts.operator_facts import OperatorFacts, SiteFacts
from intaglio.runtime import Coverage
from intaglio.runtime.reports.profile import Profile, ProfiledStep
from intaglio.runtime.reports.speed import MeasuredSpeed
from intaglio.tune.comparison import Comparison, Row


class ModelKind(StrEnum):
    """Kinds of quantized models."""

    WHOLE = "model"
    """One int8 program."""
    PARTS = "parts"
    """Python code with int8 parts."""
    DEFINE_BY_RUN = "define-by-run"
    """Python code whose operators are intercepted."""


@dataclass(frozen=True)
class Histogram:
    """Numbers of a value's elements in bins of equal width.

    Attributes:
        start: lower end of the first bin.
        width: width of a bin.
        counts: number of elements in each bin; zeros count in the bin that begins with 0.
    """

    start: float
    width: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class WeightReport:
    """A weight and its quantized values.

    Attributes:
        site: name of its site.
        shape: its shape.
        datatype: type of the quantized values.
        rounding: method that rounded it.
        scales: scale of each output channel, or one for all.
        largest: largest magnitude of each output channel in float.
        decibels: signal-to-quantization-noise ratio of each output channel.
        all_decibels: signal-to-quantization-noise ratio of the whole weight.
    """

    site: str
    shape: tuple[int, ...]
    datatype: str
    rounding: str
    scales: tuple[float, ...]
    largest: tuple[float, ...]
    decibels: tuple[float, ...]
    all_decibels: float


@dataclass(frozen=True)
class OperatorReport:
    """An operator or input of a model.

    Attributes:
        name: modules and operator, which no other operator of the graph has.
        facts: what was decided about it.
        row: its error, if it was compared.
        histogram: the float model's values, if it was compared.
        site: the site of its result, if it is quantized.
        weight: its weight, if it is quantized.
        steps: numbers of the steps of the profile that are counted for it.
        fused: names of the other operators that run in the same kernel.
        counted_with: name of the operator that the time of its kernel is counted for, if that is another one.
        is_view: whether its result shares the memory of its input, so that it takes no time.
    """

    name: str
    facts: OperatorFacts
    row: Row | None = None
    histogram: Histogram | None = None
    site: SiteFacts | None = None
    weight: WeightReport | None = None
    steps: tuple[int, ...] = ()
    fused: tuple[str, ...] = ()
    counted_with: str = ""
    is_view: bool = False


@dataclass(frozen=True)
class GraphReport:
    """One graph of a model: the model itself, an int8 part, a recording of a define-by-run model or a loop body.

    Attributes:
        name: path of the part, or number of the recording; "" for a model that is one graph.
        operators: its inputs and operators in execution order.
        profile: the time of its steps, if it was measured.
        comparison: the errors of this part; ``None`` if they are those of the whole model.
    """

    name: str
    operators: tuple[OperatorReport, ...]
    profile: Profile | None = None
    comparison: Comparison | None = None

    @cached_property
    def by_name(self) -> Mapping[str, OperatorReport]:
        """Return the operators by name."""
        return {operator.name: operator for operator in self.operators}

    def steps_of(self, operator: OperatorReport) -> tuple[ProfiledStep, ...]:
        """Return the steps that are counted for an operator."""
        return () if self.profile is None else tuple(self.profile.parts[index] for index in operator.steps)

    def microseconds(self, operator: OperatorReport) -> float | None:
        """Return the time of an operator's steps, or ``None`` if none is counted for it."""
        steps = self.steps_of(operator)
        return sum(step.microseconds for step in steps) if steps else None

    def share(self, operator: OperatorReport) -> float | None:
        """Return the share of an operator's steps in the time of all steps, from 0 to 1."""
        time = self.microseconds(operator)
        return None if time is None or self.profile is None else time / max(self.profile.microseconds, 1e-9)

    def of_limit(self, operator: OperatorReport) -> float | None:
        """Return the share of the peak throughput that an operator's kernel reaches, or ``None``."""
        return next((step.of_limit for step in self.steps_of(operator) if step.of_limit is not None), None)

    @property
    def other_steps(self) -> tuple[ProfiledStep, ...]:
        """Return the steps that are counted for no operator, such as changes of the memory format."""
        if self.profile is None:
            return ()
        counted = {index for operator in self.operators for index in operator.steps}
        return tuple(step for index, step in enumerate(self.profile.parts) if index not in counted)


@dataclass(frozen=True)
class Suggestion:
    """A change of the quantization that was tried on the same samples.

    Attributes:
        title: what the change does.
        python: arguments of `intaglio.quantize` that make the change.
        command: options of the command ``intaglio quantize`` that make it; "" if there are none.
        before: signal-to-noise ratio of the first result now, in decibels, of the reference that changes are tried on.
        after: signal-to-noise ratio with the change.
        agreement_before: share of samples with the float model's top-1 class now, or ``None``.
        agreement_after: share with the change.
        macs: share of multiply-accumulates in int8 with the change.
        failure: why it could not be tried; "" if it was.
    """

    title: str
    python: str
    command: str = ""
    before: float = 0.0
    after: float = 0.0
    agreement_before: float | None = None
    agreement_after: float | None = None
    macs: float = 0.0
    failure: str = ""

    @property
    def gain(self) -> float:
        """Return by how many decibels the change improves the result."""
        return 0.0 if self.failure or self.before == self.after else self.after - self.before


@dataclass(frozen=True)
class RunRecord:
    """Record of everything that is needed to repeat a report.

    Attributes:
        created: date and time in UTC.
        versions: versions of packages by name.
        cpu: name of the processor.
        isa: instruction set of the programs.
        threads: number of threads.
        samples: number of samples that were compared.
        data: digest of the inputs of these samples; "" without data.
        recipe: the recipe as TOML; "" if it has no text form.
        parameters: digest of the quantization parameters.
        weights: digest of the integer graph's constants.
        corrections: what corrections gained, one line each.
        fingerprint: what ``model.fingerprint()`` returns, or the digest of those of several programs; "" if there is
            none.
    """

    created: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    cpu: str = ""
    isa: str = ""
    threads: int = 1
    samples: int = 0
    data: str = ""
    recipe: str = ""
    parameters: str = ""
    weights: str = ""
    corrections: tuple[str, ...] = ()
    fingerprint: str = ""


@dataclass(frozen=True)
class ReportData:
    """The content of a report.

    Attributes:
        name: name of the model.
        kind: kind of the model.
        run: what is needed to repeat the report.
        coverage: share of the model in int8, as ``model.coverage`` has it.
        comparison: errors of the results and operators, as `intaglio.compare` returns it; ``None`` without data.
        graphs: the graphs of the model.
        suggestions: changes that were tried, the one with the largest gain first.
        limits: what could not be said about this model, and why.
        measured: times of a call and of the operators beside those of the float model; ``None`` if it was not timed.
    """

    name: str
    kind: ModelKind
    run: RunRecord
    coverage: Coverage
    comparison: Comparison | None = None
    graphs: tuple[GraphReport, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    limits: tuple[str, ...] = ()
    measured: MeasuredSpeed | None = None
