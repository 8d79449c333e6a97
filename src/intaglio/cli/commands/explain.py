"""`intaglio explain`: why operators of a saved model are in int8 or float, what they cost, and what would change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import intaglio
from intaglio.cli import targets
from intaglio.reporting.explanation import Explanation


@dataclass(frozen=True)
class ExplainRequest:
    """Options of the command line."""

    target: Path
    where: str
    float_model: str | None
    data: str | None
    samples: int
    calls: int


def run(request: ExplainRequest) -> Explanation:
    """Return the explanation of the operators with a name."""
    targets.check_float_and_data(request.float_model, request.data)
    model: Any = targets.report_or_model(request.target)
    exact = None if request.float_model is None else targets.float_model(request.float_model, "--float")
    data = None if request.data is None else targets.batches(request.data)
    return intaglio.explain(model, request.where, exact, data, samples=request.samples, calls=request.calls)
