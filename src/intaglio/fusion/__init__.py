"""Operator fusion: one table of fusions, a pattern language and a matcher. This package does not use torch."""
