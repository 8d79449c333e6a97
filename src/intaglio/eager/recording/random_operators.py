"""Detect operators that draw random numbers, which no recording can contain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def watched_generator(kwargs: dict[str, Any]) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether an operator in the `with` block drew random numbers.

    Args:
        kwargs: Keyword arguments of the operator, which may name a generator of its own.
    """
    before = torch.get_rng_state()
    own = isinstance(kwargs.get("generator"), torch.Generator)
    yield lambda: own or not torch.equal(before, torch.get_rng_state())
