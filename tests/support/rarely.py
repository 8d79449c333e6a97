"""Parameters that run with `make slow` only."""

from typing import Any

import pytest


def rarely(*values: Any, reason: str) -> list[Any]:
    """Return parameters that are slow; a tuple is several parameters."""
    slow = pytest.mark.slow(reason=reason)
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=slow) for value in values]
