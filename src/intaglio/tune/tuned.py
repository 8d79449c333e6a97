"""`Tuned`, the result of `autotune`, and its trials."""

from __future__ import annotations

from dataclasses import dataclass

from intaglio.quant.qdq.convert import Reference
from intaglio.quant.recipes.recipe import Recipe
from intaglio.runtime import QuantizedModel


@dataclass(frozen=True)
class Trial:
    """One int8 model that was evaluated.

    Attributes:
        left: selectors of operators in float, in addition to those of the recipe.
        metric: metric of the model.
        holds: whether the metric is high enough.
        macs: share of multiply-accumulates in int8, from 0 to 1.
    """

    left: tuple[str, ...]
    metric: float
    holds: bool
    macs: float

    def __str__(self) -> str:
        verdict = "accepted" if self.holds else "too low"
        return f"{self.metric:>12.6g} {100 * self.macs:>8.1f} % {verdict:>8}  {', '.join(self.left) or 'nothing'}"


@dataclass(frozen=True)
class Tuned:
    """Result of `intaglio.autotune`.

    Attributes:
        model: the chosen int8 model.
        reference: the reference it was compiled from.
        recipe: a recipe that can be saved. It quantizes the float model to the same bits without calibration; only
            example inputs are needed.
        baseline: metric of the float model.
        floor: lowest accepted metric.
        trials: all trials in order.
        chosen: the trial of the chosen model.
    """

    model: QuantizedModel
    reference: Reference
    recipe: Recipe
    baseline: float
    floor: float
    trials: tuple[Trial, ...]
    chosen: Trial

    @property
    def reached(self) -> bool:
        """Return whether the chosen model reaches the metric."""
        return self.chosen.holds

    @property
    def left(self) -> tuple[str, ...]:
        """Return selectors of operators in float in addition to those of the recipe, the most harmful first."""
        return self.chosen.left

    def __str__(self) -> str:
        """Format one line for the requested metric, one for each trial and one for the verdict."""
        heading = f"metric of the float model: {self.baseline:.6g}; accepted from {self.floor:.6g} on"
        names = f"{'metric':>12} {'int8 MACs':>10} {'verdict':>8}  left in float"
        found = "accepted" if self.reached else "no trial is accepted, this is the best"
        left = f"{len(self.left)} selector{'s' * (len(self.left) != 1)} left in float"
        verdict = f"chosen: metric {self.chosen.metric:.6g}, {left} ({found})"
        return "\n".join([heading, names, *map(str, self.trials), verdict])
