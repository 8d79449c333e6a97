"""Conversion of names for programs, graphs and files."""

from __future__ import annotations


def sanitized(text: str) -> str:
    """Return the text with every character other than letters and digits replaced by ``_``."""
    return "".join(c if c.isalnum() else "_" for c in text)
