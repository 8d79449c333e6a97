"""Corrections: steps that make an int8 model more accurate and cost nothing when it runs."""
