"""Comparison of a quantized model with its float model, references of changed recipes, and schedule search."""

from intaglio.tune.compare_models import ComparisonRun, compare, compare_results, run_comparison
from intaglio.tune.comparison import Comparison, RangeUse, Row
from intaglio.tune.reference_pool import ReferencePool
from intaglio.tune.schedule_search import first_sample, random_sample, search

__all__ = [
    "Comparison",
    "ComparisonRun",
    "RangeUse",
    "ReferencePool",
    "Row",
    "compare",
    "compare_results",
    "first_sample",
    "random_sample",
    "run_comparison",
    "search",
]
