"""Searches whose times do not matter."""

import pytest

from intaglio.reporting.timing import measure_speed


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Time one call of the float model for each of two blocks at the end of a search."""
    monkeypatch.setattr(measure_speed, "BLOCK_SECONDS", 0.0)
    monkeypatch.setattr(measure_speed, "TIMED_BLOCKS", 2)
