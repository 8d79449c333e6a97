"""Recipes that tests share."""

UNCORRECTED = {"*": {"equalize": 0.0, "rounding": "nearest"}}
"""A recipe without corrections, for tests whose results do not depend on them: they take much of the time of
`quantize`."""
