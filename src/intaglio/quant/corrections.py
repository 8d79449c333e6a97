"""`Corrections`: what was found better than the nearest integers and the biases as they were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from intaglio.ir import QParams
from intaglio.quant.annotate import Annotations


@dataclass(frozen=True, eq=False)
class Rounded:
    """A weight as integers of its own shape, and the scales they count in."""

    qparams: QParams
    levels: np.ndarray


@dataclass(frozen=True)
class Step:
    """One correction: what it did, and signal to noise in decibels before and after it, of what it is about."""

    name: str
    subject: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.name}: {self.subject}, {self.before:.1f} -> {self.after:.1f} dB"


@dataclass(frozen=True)
class Corrections:
    """For `convert`. ``annotations``: of the graph with corrected biases; ``weights``: site -> its integers."""

    annotations: Annotations
    weights: Mapping[str, Rounded] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """One line each."""
        return (*map(str, self.steps), *self.remarks)

    def __str__(self) -> str:
        return "\n".join(self.notes)
