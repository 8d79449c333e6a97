"""Units of the scratch memory that threads use during a step."""

from __future__ import annotations

from intaglio.ir import Dim

QUERY_BLOCK = 32
"""Maximum number of query rows whose scores are in memory at a time."""
MAX_SCRATCH_THREADS = 32
"""Maximum number of threads that have scratch memory; further threads stay idle."""
CACHE_LINE = 64
"""Bytes of a line; all parts of scratch memory consist of whole lines."""


def ceil_div(size: Dim, step: int) -> Dim:
    """Return ``size / step`` rounded up."""
    return (size + (step - 1)) // step
