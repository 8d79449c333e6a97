"""Units of the memory that threads need for themselves while a step runs."""

from __future__ import annotations

from intaglio.ir import Dim

QUERIES = 24
"""Rows of queries whose scores are in memory at once, at most."""
SHARERS = 32
"""Threads that have such memory; more than these find nothing to do."""
LINE = 64
"""Bytes; all parts are whole lines."""


def whole(size: Dim, step: int) -> Dim:
    """Return how many steps hold so many."""
    return (size + (step - 1)) // step
