"""Comparison of a quantized model with its float model, mixed precision search by a user's metric, and schedule
search."""

from intaglio.tune.accuracy import Criterion, SearchStart, autotuned
from intaglio.tune.compare_models import ComparisonRun, compare, compare_results, run_comparison
from intaglio.tune.comparison import Comparison, RangeUse, Row
from intaglio.tune.schedule_search import first_sample, random_sample, search
from intaglio.tune.tuned import Trial, Tuned

__all__ = [
    "Comparison",
    "ComparisonRun",
    "Criterion",
    "RangeUse",
    "Row",
    "SearchStart",
    "Trial",
    "Tuned",
    "autotuned",
    "compare",
    "compare_results",
    "first_sample",
    "random_sample",
    "run_comparison",
    "search",
]
