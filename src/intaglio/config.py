"""The only reader of the environment. Nothing here is needed for correct results."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from intaglio.errors import InputError

VERSION = "0.1.0"
"""Of this package; saved models name it."""


def cache_dir() -> Path:
    """Folder of compiled kernels: ``INTAGLIO_CACHE_DIR``, else ``intaglio`` below the user's cache folder."""
    chosen = os.environ.get("INTAGLIO_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base, "intaglio") if base else Path.home() / ".cache" / "intaglio"


def cache_limit_bytes() -> int:
    """Size the kernel cache is kept below: ``INTAGLIO_CACHE_MB``, 1024 by default."""
    return _number("INTAGLIO_CACHE_MB", 1024) << 20


def plans() -> int:
    """Sets of shapes whose plans a model keeps, the least recently used out first: ``INTAGLIO_PLANS``, 256 by default.
    A plan is some kilobytes; memory of activations is shared by all."""
    return max(1, _number("INTAGLIO_PLANS", 256))


def _number(variable: str, default: int) -> int:
    value = os.environ.get(variable) or str(default)
    if not value.strip().isdecimal():
        problem = f"{value!r}, which is no whole number"
        raise InputError(f"environment variable {variable}", None, problem, remedy=f"unset it for {default}")
    return int(value)


def compiler() -> str | None:
    """Path of the C++ compiler (``CXX``, else ``g++``, else ``c++``), or ``None`` when there is none."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else ("g++", "c++")
    return next((path for name in names if (path := shutil.which(name))), None)


def show_progress() -> bool:
    """Whether progress bars may be drawn: a terminal, and ``INTAGLIO_PROGRESS`` is not 0."""
    return sys.stderr.isatty() and os.environ.get("INTAGLIO_PROGRESS", "1") != "0"
