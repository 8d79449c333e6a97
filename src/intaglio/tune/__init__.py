"""Comparison of a quantized model with its float model, mixed precision search by a user's metric, and schedule
search."""

from intaglio.tune.accuracy import Criterion, Start, autotuned
from intaglio.tune.compare_models import compare
from intaglio.tune.comparison import Comparison, RangeUse, Row
from intaglio.tune.schedule_search import made_up, one_image, search
from intaglio.tune.tuned import Trial, Tuned

__all__ = [
    "Comparison",
    "Criterion",
    "RangeUse",
    "Row",
    "Start",
    "Trial",
    "Tuned",
    "autotuned",
    "compare",
    "made_up",
    "one_image",
    "search",
]
