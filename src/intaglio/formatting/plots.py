"""Plots of results with matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from intaglio.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW_HEIGHT, LEAST_HEIGHT, WIDTH = 0.25, 2.5, 8.0
"""Inches of a bar, of the lowest plot, and of the width of plots."""
MOST_BARS = 30
"""Default for the largest number of bars."""
MUTED, STRONG, MARK = "#9ecae1", "#2171b5", "#d94801"
"""Colours of bars, of the bars of steps with multiply-accumulates, and of marks."""


def axes_for(ax: Axes | None, height: float = LEAST_HEIGHT) -> Axes:
    """Return axes to draw on: the given ones, or those of a new figure of pyplot.

    Args:
        ax: axes of matplotlib, or ``None``.
        height: inches of a new figure.

    Raises:
        InputError: matplotlib is not installed.
    """
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        problem = "a plot needs the package matplotlib"
        raise InputError("plot", None, problem, remedy="install it with pip install 'intaglio[plot]'") from error
    _, made = pyplot.subplots(figsize=(WIDTH, max(height, LEAST_HEIGHT)), layout="constrained")
    return made


def horizontal_bars(ax: Axes | None, names: Sequence[str], lengths: Sequence[float], what: str, **options: Any) -> Axes:
    """Draw one bar for each name, the first at the top, and return the axes.

    Args:
        ax: axes of matplotlib, or ``None`` for new ones.
        names: names of the bars. They are shown as they are, and may be equal.
        lengths: their lengths.
        what: what the lengths are, with the unit.
        options: options of ``Axes.barh``.
    """
    drawn = axes_for(ax, ROW_HEIGHT * len(names) + 1)
    places = range(len(names))
    drawn.barh(places, lengths, **{"color": MUTED, **options})
    drawn.set_yticks(places, [name.replace("$", r"\$") for name in names], fontsize="small")
    drawn.set_xlabel(what)
    drawn.invert_yaxis()
    return drawn
