"""`Tuned`: what `autotune` tried, and what it decided for."""

from __future__ import annotations

from dataclasses import dataclass

from intaglio.quant.qdq.convert import Reference
from intaglio.quant.recipes.recipe import Recipe
from intaglio.runtime import QuantizedModel


@dataclass(frozen=True)
class Trial:
    """One int8 model: selectors of what it leaves in float beside what the recipe does, its metric, whether that is
    enough, and its share of multiply-accumulates in int8, 0..1."""

    left: tuple[str, ...]
    metric: float
    holds: bool
    macs: float

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "too low"
        return f"{self.metric:>12.6g} {100 * self.macs:>8.1f} % {verdict:>8}  {', '.join(self.left) or 'nothing'}"


@dataclass(frozen=True)
class Tuned:
    """``model``: the one decided for, ``reference``: what it was compiled from. ``recipe``: quantizes the float model
    to the same bits with no data but an example, and can be saved. ``baseline``: the float model's metric, ``floor``:
    the lowest that was to be accepted. ``trials``: all of them in order; ``chosen``: the one decided for."""

    model: QuantizedModel
    reference: Reference
    recipe: Recipe
    baseline: float
    floor: float
    trials: tuple[Trial, ...]
    chosen: Trial

    @property
    def reached(self) -> bool:
        return self.chosen.holds

    @property
    def left(self) -> tuple[str, ...]:
        """Selectors of what stays in float beside what the recipe left there, the most harmful first."""
        return self.chosen.left

    def __str__(self) -> str:
        """A line for what was wanted, one a trial, one for the verdict."""
        heading = f"{self.baseline:.6g} in float; {self.floor:.6g} or more is wanted"
        names = f"{'metric':>12} {'int8 MACs':>10} {'verdict':>8}  left in float"
        found = "reached" if self.reached else "not reached, the best is taken"
        verdict = f"{found}: {self.chosen.metric:.6g}, {len(self.left)} left in float"
        return "\n".join([heading, names, *map(str, self.trials), verdict])
