"""Measured times of a quantized model beside those of its float model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from intaglio.formatting.html_text import element, html_table, shortened

CERTAIN = 0.75
"""Share of the blocks of calls in which one of two models must be faster. In fewer, noise may decide."""


def is_slower(own: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether times are longer than others that were measured in alternation, in at least 3 of 4 blocks."""
    slower = sum(mine > theirs for mine, theirs in zip(own, other, strict=True))
    return slower >= CERTAIN * len(own) and median(own) > median(other)


@dataclass(frozen=True)
class OperatorSpeed:
    """Times of the operators that one kernel computes.

    Attributes:
        name: the operator that the kernel is counted for, with its modules.
        selector: selector that leaves the kernel in float; "" if there is none.
        int8: microseconds of its steps in the int8 program, for each block of calls.
        float32: microseconds of the same operators in PyTorch.
    """

    name: str
    selector: str
    int8: tuple[float, ...]
    float32: tuple[float, ...]

    @property
    def loses(self) -> bool:
        """Return whether int8 takes longer than float."""
        return is_slower(self.int8, self.float32)

    @property
    def lost(self) -> float:
        """Return by how many microseconds int8 takes longer; negative if it is faster."""
        return median(self.int8) - median(self.float32)

    def __str__(self) -> str:
        return f"{self.name}: {median(self.int8):.1f} us in int8, {median(self.float32):.1f} us in float"


@dataclass(frozen=True)
class MeasuredSpeed:
    """Times of a quantized model and its float model on this machine.

    Calls of both models alternate in blocks, and each block counts with the median of its calls, so that a slow moment
    of the machine does not decide.

    Attributes:
        threads: number of threads that PyTorch allowed.
        int8: microseconds of a call of the quantized model, for each block.
        float32: microseconds of a call of the float model in PyTorch, for each block.
        operators: times of the kernels whose operators PyTorch was timed for; empty if they are not known.
        left_in_float: selectors that ``measure="keep_faster"`` left in float, because the model is faster so.
        before: microseconds of a call of the model with these operators in int8; empty if none was left in float.
        limits: what could not be measured, and why.
    """

    threads: int
    int8: tuple[float, ...]
    float32: tuple[float, ...]
    operators: tuple[OperatorSpeed, ...] = ()
    left_in_float: tuple[str, ...] = ()
    before: tuple[float, ...] = ()
    limits: tuple[str, ...] = ()

    @property
    def speedup(self) -> float:
        """Return the time of a call of the float model divided by that of the quantized model, by medians."""
        return median(self.float32) / median(self.int8)

    @property
    def outcome(self) -> str:
        """Return which model is faster, and by which factor."""
        if is_slower(self.int8, self.float32):
            return f"int8 is slower: it takes {1 / self.speedup:.2f} times as long"
        if is_slower(self.float32, self.int8):
            return f"int8 is {self.speedup:.2f} times as fast"
        return "the difference may be noise"

    @property
    def losing(self) -> tuple[OperatorSpeed, ...]:
        """Return the kernels that take longer in int8 than in float, those that lose most time first."""
        return tuple(sorted((one for one in self.operators if one.loses), key=lambda one: -one.lost))

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON: the fields, the speedup, and the names of the operators that lose."""
        return {**asdict(self), "speedup": self.speedup, "losing": [one.name for one in self.losing]}

    def __repr__(self) -> str:
        count = len(self.losing)
        losing = f", {count} operator{'s' * (count != 1)} slower in int8" if self.operators else ""
        return f"MeasuredSpeed({self._times}, {self._threads}{losing})"

    def __str__(self) -> str:
        """Format the times of a call, then the operators that take longer in int8, the worst first."""
        return "\n".join([self._verdict, *(f"  slower in int8: {one}" for one in self.losing), *self._notes])

    def _repr_html_(self) -> str:
        """Return the times for notebooks, the operators with the smallest gain first."""
        rows = [
            (one.name, "slower" if one.loses else "", f"{median(one.int8):.1f}", f"{median(one.float32):.1f}")
            for one in sorted(self.operators, key=lambda one: -one.lost)
        ]
        shown, more = shortened(rows, "operators")
        table = html_table(("operator", "int8 is", "int8 µs", "float µs"), shown, more, text=2) if rows else ""
        return element("p", self._verdict) + table + "".join(element("p", note) for note in self._notes)

    @property
    def _threads(self) -> str:
        return f"{self.threads} thread{'s' * (self.threads != 1)}"

    @property
    def _times(self) -> str:
        return f"{median(self.int8):.1f} us per call in int8, {median(self.float32):.1f} us in float"

    @property
    def _verdict(self) -> str:
        """Return the times of a call and which model is faster."""
        return f"{self._times}, {self._threads}: {self.outcome}"

    @property
    def _notes(self) -> tuple[str, ...]:
        if not self.left_in_float:
            return self.limits
        gain = f"{median(self.before):.1f} us before" if self.before else ""
        return (f"left in float, where the model is faster ({gain}): {', '.join(self.left_in_float)}", *self.limits)
