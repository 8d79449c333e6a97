"""Where the time of a call goes, step by step."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

from intaglio.ir import Program


class Clock:
    """Nanoseconds of steps, which the program adds up, and of float parts, by key."""

    def __init__(self, steps: int, islands: Iterable[str]) -> None:
        self.steps = (ctypes.c_int64 * (steps + 1))()
        self.islands = dict.fromkeys(islands, 0)


@dataclass(frozen=True)
class Part:
    """A step or a float part: its name, operators and types, microseconds of a call, multiply-accumulates of one
    image (0 where there are none, or where they are not int8)."""

    name: str
    kinds: str
    types: str
    microseconds: float
    macs: int


@dataclass(frozen=True)
class Profile:
    """Parts of a call in execution order, and the threads that shared them."""

    parts: tuple[Part, ...]
    threads: int

    @property
    def microseconds(self) -> float:
        return sum(part.microseconds for part in self.parts)

    def worst(self, count: int | None = None) -> tuple[Part, ...]:
        """Those that take longest."""
        return tuple(sorted(self.parts, key=lambda part: -part.microseconds)[:count])

    def by_kind(self) -> dict[str, float]:
        """Operators -> microseconds of all their parts, the most first."""
        total: dict[str, float] = {}
        for part in self.parts:
            total[part.kinds] = total.get(part.kinds, 0.0) + part.microseconds
        return dict(sorted(total.items(), key=lambda entry: -entry[1]))

    def __str__(self) -> str:
        """The parts, slowest first: microseconds, share, multiply-accumulates a nanosecond, what it is."""
        whole = max(self.microseconds, 1e-9)
        lines = [f"{whole:.1f} us in {len(self.parts)} parts, {self.threads} thread{'s' * (self.threads != 1)}"]
        for part in self.worst():
            rate = f"{part.macs / part.microseconds / 1e3:7.1f} G MACs/s" if part.macs else " " * 16
            share = f"{100 * part.microseconds / whole:5.1f} %"
            lines.append(f"{part.microseconds:9.1f} us {share} {rate}  {part.name}: {part.kinds}, {part.types}")
        return "\n".join(lines)


def profile_of(program: Program, clock: Clock, calls: int, threads: int) -> Profile:
    """Means per call. The program's steps have float parts among them, under their key."""
    parts = []
    for step, nanoseconds in zip(program.steps, clock.steps, strict=False):
        spent = clock.islands.get(step.island, nanoseconds) if step.island else nanoseconds
        parts.append(Part(step.name, step.kinds, step.types, spent / calls / 1e3, step.macs))
    return Profile(tuple(parts), threads)
