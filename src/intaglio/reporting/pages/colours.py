"""Classes of errors, times and precisions: the colours of a page, from 0 (harmless) to 5."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

UNKNOWN = "-"
"""Class of what was not measured."""
DECIBELS = (30.0, 35.0, 40.0, 45.0, 50.0)
"""Signal-to-noise ratios at which the class of an error changes."""
SHARES = (0.01, 0.02, 0.04, 0.08, 0.16)
"""Shares of the time at which its class changes."""


@dataclass(frozen=True)
class LegendStep:
    """A colour and its meaning."""

    kind: str
    text: str


@dataclass(frozen=True)
class ColourMode:
    """A choice of colours, and the key that selects it."""

    key: str
    label: str
    title: str
    legend: tuple[LegendStep, ...]


def error_class(decibels: float | None) -> str:
    """Return the class of an error in decibels."""
    if decibels is None:
        return UNKNOWN
    return str(0 if math.isinf(decibels) and decibels > 0 else len(DECIBELS) - bisect_right(DECIBELS, decibels))


def time_class(share: float | None) -> str:
    """Return the class of a share of the time."""
    return UNKNOWN if share is None else str(bisect_right(SHARES, share))


def worst_class(classes: Sequence[str]) -> str:
    """Return the largest of several classes."""
    known = [one for one in classes if one != UNKNOWN]
    return max(known, key=int) if known else UNKNOWN


def _errors() -> tuple[LegendStep, ...]:
    steps = [f"{low:g} to {high:g}" for low, high in pairwise(DECIBELS)]
    texts = [f"from {DECIBELS[-1]:g} dB on", *reversed(steps), f"below {DECIBELS[0]:g} dB"]
    return tuple(LegendStep(f"h{index}", text) for index, text in enumerate(texts))


def _times() -> tuple[LegendStep, ...]:
    steps = [f"{100 * low:g} to {100 * high:g} %" for low, high in pairwise(SHARES)]
    texts = [f"below {100 * SHARES[0]:g} % of the time", *steps, f"from {100 * SHARES[-1]:g} % on"]
    return tuple(LegendStep(f"h{index}", text) for index, text in enumerate(texts))


PRECISIONS = (
    LegendStep("int8", "int8"),
    LegendStep("float32", "float32 in the program"),
    LegendStep("PyTorch", "PyTorch, a float island"),
    LegendStep("input", "input"),
)
COLOUR_MODES = (
    ColourMode("e", "own error", "the error of its own rounding, with exact operands", _errors()),
    ColourMode("a", "error so far", "the error with everything before it quantized too", _errors()),
    ColourMode("t", "time", "share of the time of all steps", _times()),
    ColourMode("p", "precision", "the type that it runs in", PRECISIONS),
)
"""Colours of a page, in the order of their buttons."""
