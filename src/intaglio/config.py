"""Settings from environment variables. This is the only module that reads them, and none of them changes results."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from intaglio.errors import InputError
from intaglio.formatting.number_text import MEGA

VERSION = "0.2.0"
"""Version of this package, which saved models record."""


PROGRAMS_SHARE = 4
"""Size of the cache of loaded programs as a multiple of that of the kernel cache."""


def cache_dir() -> Path:
    """Return the folder of compiled kernels: ``INTAGLIO_CACHE_DIR``, else ``intaglio`` below the user's cache folder.

    A relative path is one from the working directory, and ``~`` is the home folder.
    """
    chosen, base = os.environ.get("INTAGLIO_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    folder = chosen or (os.path.join(base, "intaglio") if base else os.path.join("~", ".cache", "intaglio"))
    return Path(os.path.abspath(os.path.expanduser(folder)))


def cache_limit_bytes() -> int:
    """Return the maximum size of the kernel cache in bytes: ``INTAGLIO_CACHE_MB``, 1024 by default."""
    return _number("INTAGLIO_CACHE_MB", 1024) * MEGA


def programs_limit_bytes() -> int:
    """Return the maximum size of the cache of loaded programs in bytes: four times that of the kernel cache."""
    return PROGRAMS_SHARE * cache_limit_bytes()


def max_plans() -> int:
    """Return the maximum number of call shapes whose plans a model caches: ``INTAGLIO_PLANS``, 256 by default.

    The least recently used plan is dropped first. A plan takes some kilobytes; all plans share the memory of
    activations.
    """
    return max(1, _number("INTAGLIO_PLANS", 256))


def _number(variable: str, default: int) -> int:
    """Return the whole number in an environment variable. Raise `InputError` for other contents."""
    value = os.environ.get(variable) or str(default)
    if not value.strip().isdecimal():
        problem = f"its value {value!r} is not a whole number"
        raise InputError(
            f"environment variable {variable}",
            None,
            problem,
            remedy=f"set it to a whole number, or unset it to use {default}",
        )
    return int(value)


def compiler() -> str | None:
    """Return the absolute path of the C++ compiler, or ``None`` if none is found. It runs in other folders.

    It is the one in ``CXX``; else ``g++``, ``c++`` or ``clang++``; else one of these with a version in its name, such
    as ``clang++-19``, the newest; else the program ``zig`` of the Python package ``ziglang``, which contains clang.
    """
    if chosen := os.environ.get("CXX"):
        found = shutil.which(chosen)
    else:
        found = next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)
        found = found or _versioned_compiler() or _packaged_compiler()
    return found and os.path.abspath(found)


def _versioned_compiler() -> str | None:
    """Return the newest program in ``PATH`` such as ``g++-14`` or ``clang++-19``."""
    folders, kinds = [Path(folder) for folder in os.get_exec_path()], ("g++-*", "clang++-*")
    found = [path for folder in folders for kind in kinds for path in folder.glob(kind)]
    versions = {str(path): path.name.rpartition("-")[2] for path in found if os.access(path, os.X_OK)}
    numbered = [path for path, version in versions.items() if version.isdecimal()]
    return max(numbered, key=lambda path: int(versions[path]), default=None)


def _packaged_compiler() -> str | None:
    """Return the program ``zig`` of the package ``ziglang`` (the extra ``compiler``), which is not imported."""
    found = importlib.util.find_spec("ziglang")
    folders = found.submodule_search_locations if found else None
    return next((path for folder in folders or () if (path := shutil.which(os.path.join(folder, "zig")))), None)


def show_progress() -> bool:
    """Return whether progress may be shown: standard error is a terminal, or the code runs in a notebook, and
    ``INTAGLIO_PROGRESS`` is not 0."""
    return (sys.stderr.isatty() or in_notebook()) and os.environ.get("INTAGLIO_PROGRESS", "1") != "0"


def in_notebook() -> bool:
    """Return whether the code runs in a Jupyter kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"
