"""One quantized model that a search has evaluated and timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from intaglio.mixed_precision.assignment_problem import Quantity


@dataclass(frozen=True)
class SearchTrial:
    """A quantized model that was evaluated.

    Attributes:
        assignment: selector of each changed group -> name of its candidate.
        metric: metric of the model.
        accepted: whether the metric and all limits are kept.
        latency_ms: milliseconds of the timed call; ``None`` if the search does not need times.
        size_mb: megabytes of the saved model without its compiled program.
        error: squared error of the results on some calibration samples, relative to their squares.
        predicted_ms: latency that was predicted from its groups.
        predicted_error: error that was predicted from its groups.
        macs: share of multiply-accumulates in int8, from 0 to 1.
        standard_error: standard error of the metric's difference from the float model's; ``None`` if it is unknown,
            because the metric function returns one number.
    """

    assignment: Mapping[str, str]
    metric: float
    accepted: bool
    latency_ms: float | None
    size_mb: float
    error: float
    predicted_ms: float | None = None
    predicted_error: float | None = None
    macs: float = 1.0
    standard_error: float | None = None

    @property
    def verdict(self) -> str:
        """Return whether it is accepted, as text."""
        return "accepted" if self.accepted else "refused"

    def cost(self, quantity: Quantity) -> float:
        """Return the latency or size."""
        found = self.latency_ms if quantity == Quantity.LATENCY else self.size_mb
        return float("inf") if found is None else found

    @property
    def changes(self) -> str:
        """Return the changed groups by candidate as text."""
        by_name: dict[str, list[str]] = {}
        for selector, name in self.assignment.items():
            by_name.setdefault(name, []).append(selector)
        return "; ".join(f"{name}: {_shortened(listed)}" for name, listed in by_name.items()) or "nothing"

    def cells(self) -> tuple[str, ...]:
        """Return metric, latency, size, share of MACs in int8, verdict and changes as text."""
        latency = "" if self.latency_ms is None else f"{self.latency_ms:.3f} ms"
        deviation = "" if self.standard_error is None else f" +-{self.standard_error:.1g}"
        numbers = f"{self.metric:.6g}{deviation}", latency, f"{self.size_mb:.2f} MB", f"{100 * self.macs:.1f} %"
        return (*numbers, self.verdict, self.changes)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"assignment": {**self.assignment}}


MOST_SELECTORS = 4
"""Largest number of selectors of a candidate in a line."""


def _shortened(selectors: list[str]) -> str:
    rest = len(selectors) - MOST_SELECTORS
    return ", ".join(selectors[:MOST_SELECTORS]) + (f" and {rest} more" if rest > 0 else "")
