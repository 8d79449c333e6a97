"""`Metric`: the result of a user's metric function, one number or one for each sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from intaglio.errors import InputError

ONE_NUMBER = (
    "return one finite number, or an array with one for each sample, where higher is better; for a loss, return its "
    "negative"
)


@dataclass(frozen=True)
class Metric:
    """The metric of a model.

    Attributes:
        value: the metric, higher for better.
        samples: f64[samples], the values of single samples, whose mean the metric is; ``None`` if only the mean is
            known.
    """

    value: float
    samples: np.ndarray | None = None

    @staticmethod
    def of(found: Any, name: str) -> Metric:
        """Return the metric that a metric function returned for a model.

        Args:
            found: the result of the function.
            name: the name of the model in error messages.

        Raises:
            InputError: it is neither a finite number nor a vector of them.
        """
        samples = _samples(found)
        number = float(samples.mean()) if samples is not None else _number(found)
        if number is None or not math.isfinite(number):
            shown = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
            if samples is not None:
                shown = f"an array of {len(samples)} numbers that are not all finite"
            raise InputError("evaluate", None, f"it returned {shown} for {name}", remedy=ONE_NUMBER)
        return Metric(number, samples)

    def standard_error(self, exact: Metric) -> float | None:
        """Return the standard error of the difference from the float model's metric, or ``None`` if it is not known.
        Both are means over the same samples, so that what makes a sample hard for both models does not count.

        Args:
            exact: the metric of the float model.

        Raises:
            InputError: the numbers of samples differ.
        """
        if self.samples is None or exact.samples is None:
            return None
        if len(self.samples) != len(exact.samples):
            problem = (
                f"it returned {len(exact.samples)} numbers for the float model, but {len(self.samples)} for another"
            )
            raise InputError("evaluate", None, problem, remedy="evaluate all models on the same samples")
        return float(np.std(self.samples - exact.samples, ddof=1)) / math.sqrt(len(self.samples))


def _samples(found: Any) -> np.ndarray | None:
    """Return a vector of at least two real numbers, or ``None`` if the result is something else."""
    if isinstance(found, torch.Tensor) and not found.is_complex():
        found = found.detach().to("cpu", torch.float64).numpy() if found.dim() == 1 else None
    if not isinstance(found, np.ndarray) or found.ndim != 1 or len(found) < 2 or found.dtype.kind not in "biuf":
        return None
    return found.astype(np.float64)


def _number(found: Any) -> float | None:
    if isinstance(found, (torch.Tensor, np.ndarray, np.generic)):
        return float(found.item()) if math.prod(found.shape) == 1 and np.isrealobj(found) else None
    return float(found) if isinstance(found, (int, float)) else None
