"""The objective of a search: a metric to keep at the least cost, or limits within which the metric is to be best."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch

from intaglio.errors import InputError, did_you_mean
from intaglio.mixed_precision.assignment_problem import Quantity
from intaglio.mixed_precision.metric import Metric

DEFAULT_DROP = 0.01
WITHOUT_GENERATE = (
    "let evaluate call the model, for instance for its loss, and call quantize with found.recipe.with_parameters(None)"
)
"""Remedy for a metric of generated tokens."""
MINIMIZED = (Quantity.LATENCY, Quantity.SIZE)

Evaluate = Callable[[Any], Any]


@dataclass(frozen=True)
class Objective:
    """The metric, what it may lose, and the limits.

    Attributes:
        evaluate: function of a model that returns its metric, higher for better, or one for each sample.
        max_drop: largest accepted loss of the metric, as a fraction of the float model's or, without ``relative``, as
            an absolute difference; ``None`` to maximize the metric within the limits.
        relative: whether ``max_drop`` is a fraction.
        max_latency: largest accepted latency of a call in milliseconds.
        max_size: largest accepted size of a saved file in megabytes.
        minimize: what is minimized while the metric is kept, "latency" or "size".
        confidence: probability with which the chosen model keeps the metric on other samples of the same kind.
    """

    evaluate: Evaluate
    max_drop: float | None = None
    relative: bool = True
    max_latency: float | None = None
    max_size: float | None = None
    minimize: str = Quantity.LATENCY.value
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if not callable(self.evaluate):
            raise InputError(
                "evaluate",
                None,
                f"expected a function, got a {type(self.evaluate).__name__}",
                remedy="pass a function that takes a model and returns its metric",
            )
        if self.max_drop is not None and not 0 <= self.max_drop < math.inf:
            problem = f"it is {self.max_drop}, but must be a finite number of at least 0"
            raise InputError("max_drop", None, problem, remedy="pass max_drop=0.01 to accept a loss of 1 %")
        for name, limit in (("max_latency", self.max_latency), ("max_size", self.max_size)):
            if limit is not None and not 0 < limit < math.inf:
                problem = f"it is {limit}, but must be a finite number above 0"
                unit = "milliseconds" if name == "max_latency" else "megabytes"
                raise InputError(name, None, problem, remedy=f"pass a number of {unit}, such as {name}=5.0")
        if self.minimize not in MINIMIZED:
            problem = f"{self.minimize!r} cannot be minimized; allowed are 'latency' and 'size'"
            raise InputError("minimize", None, problem, remedy=did_you_mean(self.minimize, MINIMIZED))
        if not 0.5 <= self.confidence < 1:
            problem = f"it is {self.confidence}, but must be at least 0.5 and below 1"
            raise InputError("confidence", None, problem, remedy="pass confidence=0.95, or 0.5 for no margin")
        if self.max_drop is None and not self.limits:
            object.__setattr__(self, "max_drop", DEFAULT_DROP)

    @property
    def cost(self) -> Quantity:
        """Return the quantity that is minimized, or that a front shows beside the metric."""
        if self.max_drop is None and self.max_latency is None and self.max_size is not None:
            return Quantity.SIZE
        return Quantity(self.minimize)

    @property
    def with_size(self) -> bool:
        """Return whether the size of the model counts."""
        return self.max_size is not None or self.minimize == Quantity.SIZE

    @property
    def with_latency(self) -> bool:
        """Return whether the latency of the model counts."""
        return self.max_latency is not None or self.cost == Quantity.LATENCY

    @property
    def limits(self) -> dict[Quantity, float]:
        """Return the limits by quantity."""
        both = {Quantity.LATENCY: self.max_latency, Quantity.SIZE: self.max_size}
        return {name: limit for name, limit in both.items() if limit is not None}

    def floor(self, baseline: float) -> float:
        """Return the lowest accepted metric, given the float model's."""
        if self.max_drop is None:
            return -math.inf
        return baseline - self.max_drop * (abs(baseline) if self.relative else 1.0)

    def margin(self, standard_error: float | None, tries: int) -> float:
        """Return by how much a metric must exceed the lowest accepted one.

        A model that was chosen because its metric is high enough has a metric that is too high by chance, the more so
        the more models were tried. With this margin, the probability that any of them is accepted although it does not
        keep the metric is at most one minus the confidence, for normally distributed means.

        Args:
            standard_error: standard error of the metric's difference from the float model's; ``None`` if it is unknown.
            tries: largest number of models that are tried.
        """
        if standard_error is None or self.confidence == 0.5:
            return 0.0
        return NormalDist().inv_cdf(1 - (1 - self.confidence) / tries) * standard_error

    def metric_of(self, model: Any, name: str) -> Metric:
        """Return the metric of a model.

        Args:
            model: the model.
            name: its name in error messages.

        Raises:
            InputError: the function fails or returns neither a finite number nor a vector of them.
        """
        try:
            with torch.no_grad():
                found = self.evaluate(model)
        except Exception as error:
            problem = f"it raised {type(error).__name__} for {name}: {error}"
            generates = isinstance(error, AttributeError) and error.name == "generate"
            raise InputError("evaluate", None, problem, remedy=WITHOUT_GENERATE if generates else None) from error
        return Metric.of(found, name)
