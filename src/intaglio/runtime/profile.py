"""Where the time of a call goes, step by step, and how much of it the arithmetic units are used."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from intaglio.ir import Program, evaluate

COLUMNS = 120
"""Of a line of text; what does not fit is cut off."""
KERNEL_COLUMNS = 20
"""Where no step has a microkernel."""


class Clock:
    """Nanoseconds of steps, which the program adds up, and of float parts, by key."""

    def __init__(self, steps: int, islands: Iterable[str]) -> None:
        self.steps = (ctypes.c_int64 * (steps + 1))()
        self.islands = dict.fromkeys(islands, 0)

    def spent(self, program: Program) -> list[int]:
        """Nanoseconds of every step of the program, float parts among them."""
        ends = zip(program.steps, self.steps, strict=False)
        return [self.islands[step.island] if step.island else taken for step, taken in ends]


@dataclass(frozen=True)
class ProfiledStep:
    """A step or a float part: its name, operators and types, microseconds and multiply-accumulates of a call (0 where
    there are none, or where they are not int8), the module it is from.

    ``kernel``: the largest microkernel of the step and ``tile`` its output pixels and channels; where there is none,
    the function in the program's text, and for a float part nothing. ``of_limit``: share of the arithmetic limit of
    all threads; ``None`` where there are no multiply-accumulates, or no limit is known.
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

    @property
    def gmacs(self) -> float:
        """G multiply-accumulates a second."""
        return _rate(self.macs, self.microseconds)


@dataclass(frozen=True)
class Profile:
    """Parts of a call in execution order, and the threads that shared them.

    ``call_microseconds``: a whole call without the clock between steps. ``limit``: G int8 multiply-accumulates a second
    that so many threads do from registers alone with the instructions of ``isa``, measured; ``None`` where that is not
    known: for portable kernels, or without a compiler.
    """

    parts: tuple[ProfiledStep, ...]
    threads: int
    call_microseconds: float = 0.0
    limit: float | None = None
    isa: str = ""

    @property
    def microseconds(self) -> float:
        """Of all parts. Threads meet after every step while it is measured, so it can be more than a call takes."""
        return sum(part.microseconds for part in self.parts)

    @property
    def islands(self) -> float:
        """Microseconds of the float parts."""
        return sum(part.microseconds for part in self.parts if part.island)

    @property
    def overhead(self) -> float:
        """Microseconds of a call outside of its parts: Python, checks of the inputs, memory for the results, waking
        threads. 0 where the waits between steps cost as much."""
        return max(self.call_microseconds - self.microseconds, 0.0)

    def worst(self, count: int | None = None) -> tuple[ProfiledStep, ...]:
        """Those that take longest."""
        return tuple(sorted(self.parts, key=lambda part: -part.microseconds)[:count])

    def by_kind(self) -> dict[str, float]:
        """Operators -> microseconds of all their parts, the most first."""
        total: dict[str, float] = {}
        for part in self.parts:
            total[part.kinds] = total.get(part.kinds, 0.0) + part.microseconds
        return dict(sorted(total.items(), key=lambda entry: -entry[1]))

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary a part, for `pandas.DataFrame` and its like."""
        return [{**asdict(part), "gmacs": part.gmacs} for part in self.parts]

    def __str__(self) -> str:
        """A head, then the parts, slowest first: microseconds, share of all parts, G multiply-accumulates a second,
        share of the limit, tile, kernel, what it is."""
        whole = max(self.microseconds, 1e-9)
        wide = max((len(part.kernel) for part in self.parts if part.tile), default=KERNEL_COLUMNS)
        names = f"{'us':>9}  share  GMAC/s  limit  {'tile':7}  {'kernel':{wide}}  step"
        lines = [*self._head(), names, *(_line(part, whole, wide) for part in self.worst())]
        return "\n".join(line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…" for line in lines)

    def _head(self) -> list[str]:
        """The call, what it is made of, the limit it is held against."""
        macs, count = sum(part.macs for part in self.parts), sum(part.island for part in self.parts)
        call = f"{self.call_microseconds:.1f} us a call on {self.threads} thread{'s' * (self.threads != 1)}, {self.isa}"
        if self.limit:
            share = 100 * _rate(macs, self.call_microseconds) / self.limit
            least = f"{macs / self.limit / 1e3:.1f} us for {macs / 1e6:.1f} M MACs at {self.limit:.1f} GMAC/s"
            call += f": {share:.0f} % of the limit, {least}"
        steps = f"{len(self.parts) - count} steps {self.microseconds - self.islands:.1f} us"
        waits = "" if self.overhead else " (waits between timed steps cost more)"
        islands = f"{count} float part{'s' * (count != 1)} {self.islands:.1f} us"
        return [call, f"{steps}, {islands}, overhead {self.overhead:.1f} us{waits}"]


def _rate(macs: int, microseconds: float) -> float:
    return macs / max(microseconds, 1e-9) / 1e3


def _line(part: ProfiledStep, whole: float, wide: int) -> str:
    tile = "x".join(map(str, part.tile or ()))
    limit = "" if part.of_limit is None else f"{100 * part.of_limit:.0f} %"
    rate = f"{part.gmacs:.1f}" if part.macs else ""
    share = f"{100 * part.microseconds / whole:.1f}"
    kernel = "float part" if part.island else part.kernel
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
    """Medians over calls: of every step from the clock of each, and of the calls that had none. ``symbols``: the free
    dimensions; ``rates``: what each thread can do, nothing where that is not known. The program's steps have float
    parts among them, under their key."""
    limit = sum(rates) or None
    parts = []
    for step, *spent in zip(program.steps, *(clock.spent(program) for clock in clocks), strict=True):
        microseconds, macs = median(spent) / 1e3, evaluate(step.work.macs, symbols)
        of_limit = _rate(macs, microseconds) / limit if limit and macs else None
        about = step.path, step.kernel, step.tile, of_limit, bool(step.island) and not step.kernel
        parts.append(ProfiledStep(step.name, step.kinds, step.types, microseconds, macs, *about))
    return Profile(tuple(parts), threads, median(calls_ns) / 1e3, limit, program.isa)
