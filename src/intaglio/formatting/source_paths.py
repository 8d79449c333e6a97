"""Paths of source files without folders of the machine, for errors, reports and saved models."""

from __future__ import annotations

import os
import sys
from pathlib import Path

LIBRARIES = ("site-packages", "dist-packages")


def short_source_path(file: str) -> str:
    """Return the path of a source file as a reader of another machine would name it.

    Args:
        file: path of a file, such as ``/home/ada/.venv/lib/python3.11/site-packages/torchvision/models/resnet.py``.

    Returns:
        The path in the folder of installed libraries (``torchvision/models/resnet.py``), in the working directory, or
        behind ``~`` in the home folder; the given path if it is in none of them.
    """
    path = Path(file)
    if not path.is_absolute():
        return file
    libraries = [Path(entry) for entry in sys.path if Path(entry).name in LIBRARIES]
    inside = [path.relative_to(folder) for folder in libraries if path.is_relative_to(folder)]
    if inside:
        return min(inside, key=lambda one: len(one.parts)).as_posix()
    try:
        working, home = Path.cwd(), Path.home()
    except (OSError, RuntimeError):  # a deleted folder, or an unknown user
        return file
    if path.is_relative_to(working):
        return path.relative_to(working).as_posix()
    return f"~{os.sep}{path.relative_to(home)}" if path.is_relative_to(home) else file
