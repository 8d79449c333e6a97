"""Judging a quantized model against the float model it came from, choosing what to leave in float by a user's metric,
and schedules by the clock."""

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
