"""Names made of other names: what a program, a graph or a file may call a thing."""

from __future__ import annotations


def sanitized(text: str) -> str:
    """Return the text with ``_`` in place of every character that is no letter or digit."""
    return "".join(c if c.isalnum() else "_" for c in text)
