"""Judging a quantized model against the float model it came from, and choosing schedules by the clock."""

from intaglio.tune.compare import compare
from intaglio.tune.comparison import Comparison, Row, Use
from intaglio.tune.race import made_up, one_image, search

__all__ = ["Comparison", "Row", "Use", "compare", "made_up", "one_image", "search"]
