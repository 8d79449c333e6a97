"""Judging a quantized model against the float model it came from, and choosing schedules by the clock."""

from intaglio.tune.compare import Comparison, Row, compare
from intaglio.tune.race import made_up, one_image, search

__all__ = ["Comparison", "Row", "compare", "made_up", "one_image", "search"]
