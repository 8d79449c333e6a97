"""`Tuned`, the result of `autotune`, and its trials."""

from __future__ import annotations

from dataclasses import dataclass

from intaglio.formatting.html_text import element, html_table, shortened
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

    @property
    def verdict(self) -> str:
        """Return whether the metric is high enough, as text."""
        return "accepted" if self.holds else "too low"

    def __str__(self) -> str:
        return f"{self.metric:>12.6g} {100 * self.macs:>8.1f} % {self.verdict:>8}  {', '.join(self.left) or 'nothing'}"


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

    def __repr__(self) -> str:
        return f"Tuned({self._chosen_line()}; float {self.baseline:.6g}, {len(self.trials)} trials)"

    def _repr_html_(self) -> str:
        """Return the trials and the chosen one for notebooks."""
        rows = [
            (", ".join(one.left) or "nothing", one.verdict, f"{one.metric:.6g}", f"{100 * one.macs:.1f} %")
            for one in self.trials
        ]
        shown, more = shortened(rows, "trials")
        table = html_table(("left in float", "verdict", "metric", "int8 MACs"), shown, self._heading(), text=2)
        return table + "".join(element("p", line) for line in (more, self._chosen_line()) if line)

    def __str__(self) -> str:
        """Format one line for the requested metric, one for each trial and one for the verdict."""
        names = f"{'metric':>12} {'int8 MACs':>10} {'verdict':>8}  left in float"
        return "\n".join([self._heading(), names, *map(str, self.trials), self._chosen_line()])

    def _heading(self) -> str:
        return f"metric of the float model: {self.baseline:.6g}; accepted from {self.floor:.6g} on"

    def _chosen_line(self) -> str:
        found = "accepted" if self.reached else "no trial is accepted, this is the best"
        left = f"{len(self.left)} selector{'s' * (len(self.left) != 1)} left in float"
        return f"chosen: metric {self.chosen.metric:.6g}, {left} ({found})"
