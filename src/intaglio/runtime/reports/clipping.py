"""Reports of values outside of their calibrated range, which are clipped when they are quantized."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import sqrt

from intaglio.errors import InputError, did_you_mean
from intaglio.formatting.html_text import element, html_table, shortened
from intaglio.ir import Program, RangeCheck, evaluate

logger = logging.getLogger("intaglio")

MOST_CLIPPED = 0.05
"""Share of a value's elements in a call above which clipping is a problem. No range method clips as much of the data
that it was calibrated with."""
DEVIATIONS = 3
"""Standard deviations above this share that the share of a few elements must be, so that chance alone does not warn."""
CALIBRATE_MORE = "calibrate with data like that of this call"
METRICS = (
    (
        "intaglio_clipped_share",
        "gauge",
        "Largest share of a value's elements that a call clipped.",
        "share",
    ),
    (
        "intaglio_clipped_calls_total",
        "counter",
        "Calls that clipped elements of a value.",
        "calls",
    ),
)
"""Name, type, help and attribute of `ClippedValue` of each metric for Prometheus."""
Place = tuple[str, str, float, float]
"""Module, name and range of a value."""


class ClippingPolicy(StrEnum):
    """Policies for calls of which many values are outside of their calibrated range."""

    WARN = "warn"
    """Warn once for each value."""
    ERROR = "error"
    """Raise `InputError` in each such call."""
    IGNORE = "ignore"
    """Only count."""


@dataclass(frozen=True)
class ClippedValue:
    """A float value some of whose elements were outside of the calibrated range when it was quantized.

    Attributes:
        path: module that reads the quantized value.
        value: name of the value in the integer graph.
        low: lower end of the calibrated range.
        high: upper end of the calibrated range.
        share: largest share of its elements that a call clipped, from 0 to 1.
        calls: number of calls that clipped any.
    """

    path: str
    value: str
    low: float
    high: float
    share: float
    calls: int

    def __str__(self) -> str:
        calls = f"{self.calls} call{'s' * (self.calls != 1)}"
        where = f"{self.path or 'model'} (%{self.value})"
        return f"{where}: up to {_percent(self.share)} of a call, in {calls}; range {self.low:.4g} to {self.high:.4g}"


@dataclass(frozen=True)
class Clipping:
    """Values that were outside of their calibrated range, those with the largest share first."""

    values: tuple[ClippedValue, ...]

    def __str__(self) -> str:
        if not self.values:
            return "no values outside of their calibrated ranges"
        return "\n".join(["values outside of their calibrated ranges:", *(f"  {value}" for value in self.values)])

    def __repr__(self) -> str:
        count = len(self.values)
        most = f", up to {_percent(self.values[0].share)} of a call" if count else ""
        return f"Clipping({count} value{'s' * (count != 1)}{most})"

    def _repr_html_(self) -> str:
        """Return the clipped values for notebooks, those with the largest share first."""
        rows = [
            (one.path or "model", one.value, f"{one.low:.4g}", f"{one.high:.4g}", _percent(one.share), one.calls)
            for one in self.values
        ]
        shown, more = shortened(rows, "values")
        columns = ("module", "value", "range from", "to", "largest share", "calls")
        return element("p", repr(self)) + (html_table(columns, shown, more, text=2) if rows else "")

    def to_prometheus(self) -> str:
        """Return the report in the text format of Prometheus, for an endpoint that it reads.

        Each value has a gauge ``intaglio_clipped_share``, the largest share of its elements that a call clipped, and a
        counter ``intaglio_clipped_calls_total``. Their labels are ``module``, ``value``, and the ends of the range,
        ``low`` and ``high``, because values of two loop bodies or parts may have the same name.

        Examples:
            >>> text = model.clipping.to_prometheus()
        """
        lines = []
        for name, kind, what, attribute in METRICS:
            lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]
            for value in self.values:
                labels = f'module="{_label(value.path)}",value="{_label(value.value)}",'
                labels += f'low="{value.low:.9g}",high="{value.high:.9g}"'
                lines.append(f"{name}{{{labels}}} {getattr(value, attribute):.9g}")
        return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    """Return the value of a label with the characters escaped that the format of Prometheus escapes."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


@dataclass
class _Record:
    """Largest share of a value that a call clipped, number of such calls, and whether a warning was given."""

    share: float = 0.0
    calls: int = 0
    warned: bool = False


class RangeCounts:
    """Notes the clipped elements of calls that have the same sizes.

    Nearly every call on data that calibration has not seen clips a few elements, so that this takes few operations: a
    large model evicts the interpreter from the caches of the core.

    Attributes:
        monitor: collects the counts.
    """

    def __init__(self, monitor: ClippingMonitor, program: Program, symbols: Mapping[str, int]) -> None:
        """Prepare calls.

        Args:
            monitor: collects the counts.
            program: the program, which has the checked values.
            symbols: sizes of its free dimensions.
        """
        self.monitor = monitor
        self._checks, self._symbols = program.range_checks, symbols
        self._clipped: dict[int, tuple[float, int, _Record, RangeCheck]] = {}

    def note(self, counts: Sequence[int]) -> None:
        """Note the clipped elements of one call.

        Args:
            counts: number of clipped elements of every checked value.

        Raises:
            InputError: a share is large, and the policy is to raise.
        """
        large = []
        for place, count in enumerate(counts):
            if count:
                limit, size, record, check = self._clipped.get(place) or self._add(place)
                record.calls += 1
                if count > record.share * size:
                    record.share = count / size
                if count > limit:
                    large.append((check, count / size))
        for check, share in large:  # when all are noted, because it may raise
            self.monitor.act(check, share)

    def _add(self, place: int) -> tuple[float, int, _Record, RangeCheck]:
        """Return the number of elements from which clipping is a problem, that of all, the record and the check of a
        value that is clipped for the first time."""
        check = self._checks[place]
        size = evaluate(check.size, self._symbols)
        limit = size * MOST_CLIPPED + DEVIATIONS * sqrt(size * MOST_CLIPPED)
        found = self._clipped[place] = limit, size, self.monitor.record_of(check), check
        return found


class ClippingMonitor:
    """Collects the counts of clipped elements of calls, and warns of large shares or raises.

    The programs of loop bodies and of a define-by-run model share one.

    Attributes:
        policy: what happens in a call with a large share.
    """

    def __init__(self, policy: ClippingPolicy = ClippingPolicy.WARN) -> None:
        self.policy = policy
        self._records: dict[Place, _Record] = {}

    def report(self) -> Clipping:
        """Return the report of all values so far."""
        records = list(self._records.items())  # another thread may add one
        found = [ClippedValue(*place, record.share, record.calls) for place, record in records if record.calls]
        return Clipping(tuple(sorted(found, key=lambda value: -value.share)))

    def set_policy(self, name: str) -> None:
        """Set the policy by its name.

        Raises:
            InputError: no policy has this name.
        """
        try:
            self.policy = ClippingPolicy(name)
        except ValueError as error:
            allowed = ", ".join(ClippingPolicy)
            problem = f"{name!r} is not a policy; allowed are {allowed}"
            raise InputError("on_clipping", None, problem, remedy=did_you_mean(name, ClippingPolicy)) from error

    def forget(self) -> None:
        """Forget the values so far, which belong to other parameters."""
        for record in self._records.values():  # in place, because plans of calls hold them
            record.share, record.calls, record.warned = 0.0, 0, False

    def record_of(self, check: RangeCheck) -> _Record:
        """Return the record of a checked value."""
        return self._records.setdefault((check.path, check.value, check.low, check.high), _Record())

    def act(self, check: RangeCheck, share: float) -> None:
        """Act on a large share of clipped elements as the policy says.

        Raises:
            InputError: the policy is to raise.
        """
        where, ends = check.path or "model", f"{check.low:.4g} to {check.high:.4g}"
        problem = (
            f"{_percent(share)} of the values of its operand %{check.value} are outside of the calibrated range {ends}"
        )
        if self.policy is ClippingPolicy.ERROR:
            raise InputError(where, None, problem, remedy=CALIBRATE_MORE)
        record = self.record_of(check)
        if self.policy is ClippingPolicy.WARN and not record.warned:
            record.warned = True
            logger.warning("%s: %s and are clipped; %s, or check its preprocessing", where, problem, CALIBRATE_MORE)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
