"""Corrections: steps that make an int8 model more accurate and cost nothing when it runs."""

from intaglio.quant.correct.equalize import equalize
from intaglio.quant.correct.steps import SAMPLES, correct, keep, kept_calls

__all__ = ["SAMPLES", "correct", "equalize", "keep", "kept_calls"]
