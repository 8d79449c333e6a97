"""Judging a quantized model against the float model it came from."""

from intaglio.tune.compare import Comparison, Row, compare

__all__ = ["Comparison", "Row", "compare"]
