"""Parameters that run with `make slow` only."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_params(*values: Any, reason: str) -> list[Any]:
    """Return parameters that are slow; a tuple is several parameters."""
    slow = pytest.mark.slow(reason=reason)
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=slow) for value in values]


def slow_params_except(*always: Any, of: Iterable[Any], reason: str) -> list[Any]:
    """Return the values of a table as parameters, in its order; those that are not named in `always` are slow."""
    values = list(of)
    assert all(value in values for value in always), f"the table holds {values}"
    slow = pytest.mark.slow(reason=reason)
    return [value if value in always else pytest.param(value, marks=slow) for value in values]
