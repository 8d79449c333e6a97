"""Search for the operators to leave in float so that a metric is reached, with few trials and as few operators as
possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Left = tuple[str, ...]
"""Selectors of operators that stay in float, in the order of their ranking."""


class BudgetSpentError(Exception):
    """Raised when the number of trials is used up."""


def preference(left: Left, metric: float, floor: float) -> tuple[bool, float, float]:
    """Return the sort key of a trial: trials that reach the metric first, those with the fewest operators in float
    before others; otherwise the highest metric."""
    return (True, -len(left), metric) if metric >= floor else (False, metric, -len(left))


@dataclass
class FloatSearch:
    """Searches for a small set of operators to leave in float.

    If leaving more operators in float never lowers the metric and at least two trials are allowed, the search finds a
    set that reaches the metric whenever there is one. If the budget is not used up, no single operator of the set can
    be quantized again.

    Attributes:
        measure: returns the metric, higher for better, of the model that leaves these operators in float.
        floor: lowest accepted metric.
        budget: largest number of calls of ``measure``.
        trials: measured metrics in order.
    """

    measure: Callable[[Left], float]
    floor: float
    budget: int
    trials: dict[Left, float] = field(default_factory=dict)

    def run(self, ranked: Sequence[str]) -> Left:
        """Return the operators of ``ranked`` to leave in float. If no trial reaches the metric, return those of the
        best trial.

        Args:
            ranked: selectors, the most harmful operator first.
        """
        try:
            if not self.reaches_metric(()) and (found := self._prefix(tuple(ranked))):
                self._requantized_again(found)
        except BudgetSpentError:
            pass
        return self.best

    @property
    def best(self) -> Left:
        """Return the operators that the best trial left in float."""
        return max(self.trials, key=lambda left: preference(left, self.trials[left], self.floor))

    def reaches_metric(self, left: Left) -> bool:
        """Return whether the metric is reached with these operators in float. Raise `BudgetSpentError` if no trial is
        left."""
        if left not in self.trials:
            if len(self.trials) == self.budget:
                raise BudgetSpentError
            self.trials[left] = self.measure(left)
        return self.trials[left] >= self.floor

    def _prefix(self, ranked: Left) -> Left:
        """Return the shortest prefix of ``ranked`` that reaches the metric, found by doubling and bisection.

        The last trial of the budget is reserved for all of ``ranked``. If even that does not reach the metric, the
        result is empty.
        """
        failing, count = 0, min(1, len(ranked))
        while count:
            if len(self.trials) + 1 == self.budget:
                count = len(ranked)
            if self.reaches_metric(ranked[:count]):
                break
            failing, count = count, min(2 * count, len(ranked)) if count < len(ranked) else 0
        while count - failing > 1:
            middle = (failing + count) // 2
            failing, count = (failing, middle) if self.reaches_metric(ranked[:middle]) else (middle, count)
        return ranked[:count]

    def _requantized_again(self, left: Left) -> Left:
        """Quantize operators again that are not needed in float: halves, quarters, finally single ones, the least
        harmful first."""
        size = len(left) // 2
        while size:
            end = len(left)
            while end > 0:
                rest = left[: max(end - size, 0)] + left[end:]
                end -= size
                left = rest if self.reaches_metric(rest) else left
            size //= 2
        return left
