"""`SearchResult`, the result of `intaglio.search`: the chosen model, its recipe, and the front of all trials."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from intaglio.formatting.html_text import element, html_table, shortened
from intaglio.formatting.plots import MARK, MUTED, STRONG, axes_for
from intaglio.mixed_precision.assignment_problem import Quantity, pareto
from intaglio.mixed_precision.search_trial import SearchTrial
from intaglio.quant.qdq.convert import Reference
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.settings import Setting
from intaglio.runtime import QuantizedModel
from intaglio.runtime.reports.speed import MeasuredSpeed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FRONT_COLUMNS = ("metric", "latency", "size", "int8 MACs", "verdict", "changes")
COST_LABELS = {Quantity.LATENCY: "milliseconds of a call", Quantity.SIZE: "megabytes of the saved model"}


@dataclass(frozen=True)
class SearchResult:
    """Result of `intaglio.search`.

    Attributes:
        model: the chosen int8 model.
        reference: the reference it was compiled from.
        recipe: a recipe that can be saved. It quantizes the float model to the same bits without calibration; only
            example inputs are needed.
        changes: selector -> settings of the changed groups, ``None`` for float: what ``recipe=`` of `quantize` takes,
            for a model that was searched with the default recipe.
        baseline: metric of the float model.
        floor: lowest accepted metric; minus infinity if the search maximizes it.
        confidence: probability with which the metric on other samples is not below it, if the metric function returns a
            number for each sample.
        limits: largest accepted latency in milliseconds and size in megabytes, where given.
        cost: quantity beside the metric in the front, "latency" or "size".
        trials: all trials in order. The first is the model that `quantize` returns.
        chosen: the trial of the chosen model.
        seconds: duration of the search.
        interrupted: whether it was interrupted with Ctrl-C.
    """

    model: QuantizedModel
    reference: Reference
    recipe: Recipe
    changes: Mapping[str, Setting | None]
    baseline: float
    floor: float
    limits: Mapping[str, float]
    cost: str
    trials: tuple[SearchTrial, ...]
    chosen: SearchTrial
    seconds: float = field(default=0.0, compare=False)
    interrupted: bool = False
    confidence: float | None = None

    @property
    def reached(self) -> bool:
        """Return whether the chosen model keeps the metric and the limits."""
        return self.chosen.accepted

    @property
    def measured(self) -> MeasuredSpeed | None:
        """Return the times of the chosen model beside those of the float model; ``None`` if the search was
        interrupted."""
        return self.model.measured

    @property
    def front(self) -> tuple[SearchTrial, ...]:
        """Return the trials that no other trial beats in both metric and cost, the cheapest first."""
        points = [(trial.cost(Quantity(self.cost)), trial.metric) for trial in self.trials]
        return tuple(self.trials[index] for index in pareto(points))

    @property
    def python(self) -> str:
        """Return the changes as Python source, an argument for `quantize`."""
        entries = [f"    {selector!r}: {_setting_text(setting)}," for selector, setting in self.changes.items()]
        return "recipe={\n" + "\n".join(entries) + "\n}" if entries else "recipe={}"

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return {
            "baseline": self.baseline,
            "floor": self.floor if self.floor > float("-inf") else None,
            "confidence": self.confidence,
            "limits": {**self.limits},
            "cost": self.cost,
            "reached": self.reached,
            "interrupted": self.interrupted,
            "seconds": self.seconds,
            "chosen": self.trials.index(self.chosen),
            "front": [self.trials.index(trial) for trial in self.front],
            "changes": {selector: setting and _given(setting) for selector, setting in self.changes.items()},
            "measured": self.measured and self.measured.to_dict(),
            "trials": [trial.to_dict() for trial in self.trials],
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the metric of all trials over their cost, the front as a line, and the chosen trial as a mark.

        Args:
            ax: axes of matplotlib to draw on (default: those of a new figure).

        Returns:
            The axes.

        Raises:
            InputError: matplotlib is not installed.
        """
        drawn, quantity = axes_for(ax, 4.0), Quantity(self.cost)
        drawn.scatter(*self._points(self.trials, quantity), color=MUTED, label="trials")
        drawn.plot(*self._points(self.front, quantity), color=STRONG, marker="o", label="front")
        drawn.scatter(*self._points((self.chosen,), quantity), color=MARK, zorder=3, label="chosen")
        if self.floor > float("-inf"):
            drawn.axhline(self.floor, color=MARK, linestyle="--", linewidth=1, label="lowest accepted metric")
        if (limit := self.limits.get(self.cost)) is not None:
            drawn.axvline(limit, color=MARK, linestyle=":", linewidth=1, label="limit")
        drawn.set_xlabel(COST_LABELS[quantity])
        drawn.set_ylabel("metric")
        drawn.legend(loc="lower right", framealpha=0.9)
        drawn.set_title(repr(self), fontsize="medium")
        return drawn

    @staticmethod
    def _points(trials: tuple[SearchTrial, ...], quantity: Quantity) -> tuple[list[float], list[float]]:
        return [trial.cost(quantity) for trial in trials], [trial.metric for trial in trials]

    def __repr__(self) -> str:
        metric, latency, size, *_ = self.chosen.cells()
        cost = size if self.cost == Quantity.SIZE else latency
        return f"SearchResult(metric {metric} at {cost}; float {self.baseline:.6g}, {len(self.trials)} trials)"

    def _repr_html_(self) -> str:
        """Return the front, the choice and its recipe for notebooks."""
        rows, more = shortened([(*trial.cells()[4:], *trial.cells()[:4]) for trial in self.front], "trials")
        table = html_table((*FRONT_COLUMNS[4:], *FRONT_COLUMNS[:4]), rows, self._heading(), text=2)
        lines = "".join(element("p", line) for line in (more, *self._end()) if line)
        return table + lines + element("pre", self.python)

    def __str__(self) -> str:
        """Format a line for the target, one for each trial of the front, the choice, and the recipe of the choice."""
        names = _line(FRONT_COLUMNS)
        return "\n".join([self._heading(), names, *(_line(t.cells()) for t in self.front), *self._end(), self.python])

    def _heading(self) -> str:
        target = f"accepted from {self.floor:.6g} on" if self.floor > float("-inf") else "to be as high as possible"
        if self.floor > float("-inf") and self.confidence is not None:
            target += f" with a confidence of {100 * self.confidence:g} %"
        units = {"latency": "ms", "size": "MB"}
        limits = "".join(f", {name} at most {limit:g} {units[name]}" for name, limit in self.limits.items())
        return f"metric of the float model: {self.baseline:.6g}; {target}{limits}"

    def _end(self) -> list[str]:
        found = "accepted" if self.reached else "no trial is accepted, this is the best"
        count, took = len(self.chosen.assignment), f"{len(self.trials)} trials in {self.seconds:.0f} s"
        groups = f"{count} group{'s' * (count != 1)} of operators changed"
        ended = ", interrupted" if self.interrupted else ""
        speed = str(self.measured).splitlines() if self.measured is not None else ()
        return [f"chosen: metric {self.chosen.metric:.6g}, {groups} ({found}); {took}{ended}", *speed]


def _given(setting: Setting) -> dict[str, Any]:
    """Return the fields of a setting that are given."""
    return {name: value for name, value in vars(setting).items() if value is not None}


def _setting_text(setting: Setting | None) -> str:
    return "None" if setting is None else repr(_given(setting))


def _line(cells: tuple[str, ...]) -> str:
    metric, latency, size, macs, verdict, changes = cells
    return f"{metric:>16} {latency:>12} {size:>10} {macs:>10} {verdict:>9}  {changes}"
