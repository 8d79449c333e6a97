"""Profiles: the time of every step of a call, and its share of the peak int8 throughput."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from intaglio.errors import InputError
from intaglio.formatting.html_text import element, html_table, shortened
from intaglio.formatting.number_text import count_text
from intaglio.formatting.plots import MARK, MOST_BARS, MUTED, STRONG, horizontal_bars
from intaglio.ir import Program, evaluate
from intaglio.runtime.reports.scaling import Scaling, barrier_of, scaling_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LINE_LENGTH = 120
"""Maximum length of a printed line; longer lines are cut."""
MAX_CALLS = 100_000
"""Calls of a profile, at most: the times of all steps of each are kept."""
KERNEL_COLUMN_WIDTH = 20
"""Width of the kernel column if no step has a microkernel."""


def calls_problem(calls: int, least: int) -> str | None:
    """Return why a profile cannot have this number of calls, or ``None``."""
    return None if least <= calls <= MAX_CALLS else f"calls = {calls}; it must be {least} to {MAX_CALLS}"


class Clock:
    """Accumulates the nanoseconds of the program's steps and, by key, of float islands."""

    def __init__(self, steps: int, islands: Iterable[str]) -> None:
        self.steps = (ctypes.c_int64 * (steps + 1))()
        self.islands = dict.fromkeys(islands, 0)

    def step_times(self, program: Program) -> list[int]:
        """Return the nanoseconds of every step of the program, float islands included."""
        ends = zip(program.steps, self.steps, strict=False)
        return [self.islands[step.island] if step.island else taken for step, taken in ends]


@dataclass(frozen=True)
class ProfiledStep:
    """A step of the program or a float island.

    Attributes:
        name: name of the step.
        kinds: its operators.
        types: its data types.
        microseconds: time per call.
        macs: int8 multiply-accumulates per call, 0 for other steps.
        path: module that the step comes from.
        kernel: its largest microkernel, or else its function in the program's source; empty for a float island.
        tile: output pixels and channels of the microkernel, or ``None``.
        of_limit: share of the peak throughput of all threads, or ``None`` if there is nothing to compare.
        island: whether it is a float island.
        units: number of parts that threads can divide it into.
        barrier_group: steps of one group have no barrier between them.
    """

    name: str
    kinds: str
    types: str
    microseconds: float
    macs: int
    path: str = ""
    kernel: str = ""
    tile: tuple[int, int] | None = None
    of_limit: float | None = None
    island: bool = False
    units: int = 1
    barrier_group: int = 0

    @property
    def gmacs(self) -> float:
        """Return the rate in 10⁹ multiply-accumulates per second."""
        return _rate(self.macs, self.microseconds)


@dataclass(frozen=True)
class Profile:
    """Steps and float islands of a call in execution order.

    Attributes:
        parts: the steps and islands.
        threads: number of threads that shared the work.
        call_microseconds: time of a whole call without the clock between steps.
        limit: peak int8 throughput of so many threads in 10⁹ multiply-accumulates per second, measured from registers
            with the instructions of ``isa``. ``None`` for portable kernels or without a compiler.
        isa: instruction set of the program.
        weight_bytes: bytes of the packed weights.
    """

    parts: tuple[ProfiledStep, ...]
    threads: int
    call_microseconds: float = 0.0
    limit: float | None = None
    isa: str = ""
    weight_bytes: int = 0

    @property
    def microseconds(self) -> float:
        """Return the total time of all parts. It can exceed the time of a call, because threads wait for each other
        after every step while it is measured."""
        return sum(part.microseconds for part in self.parts)

    @property
    def islands(self) -> float:
        """Return the microseconds of all float islands."""
        return sum(part.microseconds for part in self.parts if part.island)

    @property
    def overhead(self) -> float:
        """Return the microseconds of a call outside of its parts: Python, input checks, allocation of results and
        waking threads. It is 0 if the waits between timed steps cost as much."""
        return max(self.call_microseconds - self.microseconds, 0.0)

    def worst(self, count: int | None = None) -> tuple[ProfiledStep, ...]:
        """Return the ``count`` slowest parts, or all of them, slowest first."""
        return tuple(sorted(self.parts, key=lambda part: -part.microseconds)[:count])

    def by_kind(self) -> dict[str, float]:
        """Return the microseconds of all parts by operators, the slowest first."""
        total: dict[str, float] = {}
        for part in self.parts:
            total[part.kinds] = total.get(part.kinds, 0.0) + part.microseconds
        return dict(sorted(total.items(), key=lambda entry: -entry[1]))

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per part, for `pandas.DataFrame` and similar."""
        return [{**asdict(part), "gmacs": part.gmacs} for part in self.parts]

    def scaling(
        self, most: int = 64, *, barrier_us: float | None = None, memory_gb_per_second: float | None = None
    ) -> Scaling:
        """Predict the time of the call with more threads, each on a core of its own, from this profile on one thread.

        Float islands count as if they were not divided.

        Args:
            most: the largest number of threads.
            barrier_us: microseconds in which two threads wait for each other and fetch what the other has written
                (default: the constant of one socket by which a call chooses its number of threads). `barrier_us_of`
                measures it.
            memory_gb_per_second: rate at which all cores together read weights from memory (default: no limit, as if
                the weights stayed in caches).

        Returns:
            Times, and what they consist of, for 1 to ``most`` threads.

        Raises:
            InputError: this is a profile of several threads, or an argument is not positive.
        """
        self._require_one_thread()
        for name, value, least in (("most", most, 1), ("barrier_us", barrier_us, 0)):
            if value is not None and value < least:
                raise InputError("scaling", None, f"{name} = {value}; it must be at least {least}")
        if memory_gb_per_second is not None and memory_gb_per_second <= 0:
            raise InputError("scaling", None, f"memory_gb_per_second = {memory_gb_per_second}; it must be positive")
        return scaling_of(self.parts, self.overhead, self.weight_bytes, most, barrier_us, memory_gb_per_second)

    def barrier_us_of(self, shared: Profile) -> float:
        """Return the microseconds of a barrier of two threads, from this profile on one thread and another.

        Args:
            shared: profile of the same call on several threads.

        Raises:
            InputError: this is a profile of several threads, or ``shared`` is not.
        """
        self._require_one_thread()
        if shared.threads < 2:
            problem = "both profiles are of calls on one thread"
            raise InputError(
                "barrier_us_of", None, problem, remedy="torch.set_num_threads(2) before the second profile"
            )
        return barrier_of(self.parts, self.overhead, shared.call_microseconds, shared.threads)

    def _require_one_thread(self) -> None:
        if self.threads != 1:
            problem = f"the profile is of a call on {self.threads} threads; predictions begin with one thread"
            raise InputError("scaling", None, problem, remedy="torch.set_num_threads(1) before the profile")

    def plot(self, ax: Axes | None = None, *, most: int = MOST_BARS) -> Axes:
        """Draw the slowest steps with their microseconds; float islands have the colour of marks.

        Args:
            ax: axes of matplotlib to draw on (default: those of a new figure).
            most: largest number of steps.

        Returns:
            The axes.

        Raises:
            InputError: matplotlib is not installed.
        """
        parts = self.worst(most)
        colours = [MARK if part.island else STRONG if part.macs else MUTED for part in parts]
        names, times = [part.name for part in parts], [part.microseconds for part in parts]
        drawn = horizontal_bars(ax, names, times, "microseconds", color=colours)
        for place, part in enumerate(parts):
            if part.of_limit is not None:
                drawn.text(
                    part.microseconds, place, f" {100 * part.of_limit:.0f} % of peak", va="center", size="x-small"
                )
        drawn.margins(x=0.15)
        drawn.set_title(repr(self), fontsize="medium")
        return drawn

    def __repr__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"Profile({len(self.parts)} steps, {self.call_microseconds:.1f} us per call on {threads}, {self.isa})"

    def _repr_html_(self) -> str:
        """Return the parts for notebooks, slowest first."""
        total, rows = max(self.microseconds, 1e-9), []
        for part in self.worst():
            share, rate = f"{100 * part.microseconds / total:.1f} %", f"{part.gmacs:.1f}" if part.macs else ""
            limit = "" if part.of_limit is None else f"{100 * part.of_limit:.0f} %"
            kernel = "float island" if part.island else part.kernel
            rows.append((part.name, part.kinds, kernel, f"{part.microseconds:.1f}", share, rate, limit))
        shown, more = shortened(rows, "steps")
        table = html_table(("step", "operators", "kernel", "µs", "share", "GMAC/s", "of peak"), shown, text=3)
        return "".join(element("p", line) for line in self._head()) + table + element("p", more) * bool(more)

    def __str__(self) -> str:
        """Format a heading, then the parts, slowest first: microseconds, share of the total, 10⁹ multiply-accumulates
        per second, share of the peak throughput, tile, kernel and name."""
        total = max(self.microseconds, 1e-9)
        wide = max((len(part.kernel) for part in self.parts if part.tile), default=KERNEL_COLUMN_WIDTH)
        names = f"{'us':>9}  share  GMAC/s   peak  {'tile':7}  {'kernel':{wide}}  step"
        lines = [*self._head(), names, *(_line(part, total, wide) for part in self.worst())]
        return "\n".join(line if len(line) <= MAX_LINE_LENGTH else line[: MAX_LINE_LENGTH - 1] + "…" for line in lines)

    def _head(self) -> list[str]:
        """Return the lines about the whole call, its parts and the peak throughput."""
        macs, count = sum(part.macs for part in self.parts), sum(part.island for part in self.parts)
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        call = f"{self.call_microseconds:.1f} us per call on {threads}, {self.isa}"
        if self.limit and macs:
            share = 100 * _rate(macs, self.call_microseconds) / self.limit
            least = f"{count_text(macs)} MACs take {macs / self.limit / 1e3:.1f} us at {self.limit:.1f} GMAC/s"
            call += f": {share:.0f} % of the peak throughput, {least}"
        steps = f"{len(self.parts) - count} steps take {self.microseconds - self.islands:.1f} us"
        waits = "" if self.overhead else " (waits between timed steps cost more)"
        islands = f"{count} float island{'s' * (count != 1)} {self.islands:.1f} us"
        return [call, f"{steps}, {islands}, overhead {self.overhead:.1f} us{waits}"]


def _rate(macs: int, microseconds: float) -> float:
    return macs / max(microseconds, 1e-9) / 1e3


def _line(part: ProfiledStep, total: float, wide: int) -> str:
    """Return the printed line of a part, for a total of ``total`` microseconds and a kernel column of width
    ``wide``."""
    tile = "x".join(map(str, part.tile or ()))
    limit = "" if part.of_limit is None else f"{100 * part.of_limit:.0f} %"
    rate = f"{part.gmacs:.1f}" if part.macs else ""
    share = f"{100 * part.microseconds / total:.1f}"
    kernel = "float island" if part.island else part.kernel
    kernel = kernel if len(kernel) <= wide else kernel[: wide - 1] + "…"
    numbers = f"{part.microseconds:9.1f}  {share:>5}  {rate:>6}  {limit:>5}  {tile:7}  {kernel:{wide}}"
    return f"{numbers}  {part.name}: {part.kinds}, {part.types}"


def profile_of(
    program: Program,
    symbols: Mapping[str, int],
    clocks: Sequence[Clock],
    calls_ns: Sequence[int],
    threads: int,
    rates: Sequence[float],
) -> Profile:
    """Return the medians over calls.

    Args:
        program: the program.
        symbols: sizes of the dynamic dimensions.
        clocks: one clock for each timed call.
        calls_ns: nanoseconds of each ordinary call.
        threads: number of threads that the calls used.
        rates: peak rate of each thread in 10⁹ multiply-accumulates per second; empty if it is not known.
    """
    limit = sum(rates) or None
    parts = []
    for step, *step_times in zip(program.steps, *(clock.step_times(program) for clock in clocks), strict=True):
        microseconds, macs = median(step_times) / 1e3, evaluate(step.cost.macs, symbols)
        of_limit = _rate(macs, microseconds) / limit if limit and macs else None
        facts = step.path, step.kernel, step.tile, of_limit, bool(step.island) and not step.kernel
        division = evaluate(step.cost.units, symbols), step.cost.barrier_group
        parts.append(ProfiledStep(step.name, step.kinds, step.types, microseconds, macs, *facts, *division))
    weight_bytes = program.constants.nbytes
    return Profile(tuple(parts), threads, median(calls_ns) / 1e3, limit, program.isa, weight_bytes)
