"""Which operators to leave in float so that a metric holds: found in few trials, then as few as will do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Left = tuple[str, ...]
"""Selectors of what stays in float, in the order of their ranking."""


class SpentError(Exception):
    """No trial is left."""


def preference(left: Left, metric: float, floor: float) -> tuple[bool, float, float]:
    """Order of trials: the fewest in float of those that hold; where none does, the highest metric."""
    return (True, -len(left), metric) if metric >= floor else (False, metric, -len(left))


@dataclass
class Search:
    """``measure``: metric of the model that leaves these in float, higher is better; ``floor``: what is to be reached;
    ``budget``: how often ``measure`` may be called. ``trials``: what it gave, in the order it was asked.

    If leaving more in float never harms, and two trials are allowed, what is found holds whenever anything does; and if
    the budget lasts, nothing of it could be taken back to int8.
    """

    measure: Callable[[Left], float]
    floor: float
    budget: int
    trials: dict[Left, float] = field(default_factory=dict)

    def run(self, ranked: Sequence[str]) -> Left:
        """What to leave in float of ``ranked``, the most harmful first. Where nothing holds, the best that was seen."""
        try:
            if not self.holds(()) and (found := self._prefix(tuple(ranked))):
                self._taken_back(found)
        except SpentError:
            pass
        return self.best

    @property
    def best(self) -> Left:
        return max(self.trials, key=lambda left: preference(left, self.trials[left], self.floor))

    def holds(self, left: Left) -> bool:
        if left not in self.trials:
            if len(self.trials) == self.budget:
                raise SpentError
            self.trials[left] = self.measure(left)
        return self.trials[left] >= self.floor

    def _prefix(self, ranked: Left) -> Left:
        """The shortest beginning of ``ranked`` that holds: doubled, then bisected. Empty where all of it does not hold.

        The last trial is kept for all of it.
        """
        fails, count = 0, min(1, len(ranked))
        while count:
            if len(self.trials) + 1 == self.budget:
                count = len(ranked)
            if self.holds(ranked[:count]):
                break
            fails, count = count, min(2 * count, len(ranked)) if count < len(ranked) else 0
        while count - fails > 1:
            middle = (fails + count) // 2
            fails, count = (fails, middle) if self.holds(ranked[:middle]) else (middle, count)
        return ranked[:count]

    def _taken_back(self, left: Left) -> Left:
        """Without what did not help: halves, quarters, at last single ones, the least harmful first."""
        size = len(left) // 2
        while size:
            end = len(left)
            while end > 0:
                rest = left[: max(end - size, 0)] + left[end:]
                end -= size
                left = rest if self.holds(rest) else left
            size //= 2
        return left
