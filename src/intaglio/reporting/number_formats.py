"""Numbers of reports as text."""

from __future__ import annotations

import math

from intaglio.formatting.number_text import count_text


def decibels(value: float | None, unit: str = " dB") -> str:
    """Return decibels as text: "exact" without an error, "–" if they are not known."""
    if value is None:
        return "–"
    if math.isinf(value):
        return "exact" if value > 0 else "no signal"
    return f"{value:.1f}{unit}"


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share as text in percent, or "–"."""
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def microseconds(value: float | None) -> str:
    """Return a time as text in the unit that fits it, or "–"."""
    if value is None:
        return "–"
    return f"{value / 1e3:.2f} ms" if value >= 10_000 else f"{value:.1f} µs"


def number(value: float) -> str:
    """Return a number with three significant digits, as a table shows it."""
    return f"{value:.3g}".replace("-", "−")


def macs_text(count: int) -> str:
    """Return multiply-accumulates as text, or "" for none."""
    return count_text(count) if count else ""


HALF_A_DIGIT = 0.05
"""Change in decibels below which the text of a change has no sign."""


def gain_text(gain: float) -> str:
    """Return a change in decibels with its sign."""
    if math.isinf(gain):
        return "exact"
    return f"{'±' if abs(gain) < HALF_A_DIGIT else '+' if gain > 0 else '−'}{abs(gain):.1f} dB"
