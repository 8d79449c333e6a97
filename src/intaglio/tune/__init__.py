"""Judging a quantized model against the float model it came from, choosing what to leave in float by a user's metric,
and schedules by the clock."""

from intaglio.tune.accuracy import Criterion, Start, autotuned
from intaglio.tune.compare import compare
from intaglio.tune.comparison import Comparison, Row, Use
from intaglio.tune.race import made_up, one_image, search
from intaglio.tune.tuned import Trial, Tuned

__all__ = [
    "Comparison",
    "Criterion",
    "Row",
    "Start",
    "Trial",
    "Tuned",
    "Use",
    "autotuned",
    "compare",
    "made_up",
    "one_image",
    "search",
]
