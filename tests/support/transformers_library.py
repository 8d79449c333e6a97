"""The library transformers, which is an optional dependency."""

import contextlib
from functools import cache
from typing import Any

import pytest

from support.torchvision_stub import import_torchvision


@cache
def library() -> Any:
    """Return the package, after torchvision, which it imports where it is installed; skip the test without it."""
    with contextlib.suppress(ImportError):
        import_torchvision()
    return pytest.importorskip("transformers", reason="transformers is an optional dependency")
