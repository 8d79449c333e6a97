"""Where results are written, checked before the work that leads to them: a file needs a folder that exists, and the
folder of an export, which is the result itself, is made."""

from __future__ import annotations

import os
from pathlib import Path

from intaglio.errors import ArtifactError

FILE = "choose a file in a folder that exists, can be written and has room"
FOLDER = "choose a folder that can be made and has room"


def unwritable(path: str | Path, reason: object, remedy: str) -> ArtifactError:
    """``remedy``: `FILE` or `FOLDER`. Of an ``OSError``, its reason without the path of a draft."""
    said = getattr(reason, "strerror", None) or reason
    return ArtifactError(str(path), None, f"cannot be written: {said}", remedy=remedy)


def check_file(path: str | Path) -> None:
    """`ArtifactError` where no file can be made or replaced."""
    folder = Path(os.path.realpath(path)).parent
    if os.path.isdir(path):
        raise unwritable(path, "it is a folder", FILE)
    if (reason := _closed(folder)) is not None:
        raise unwritable(path, reason, FILE)


def check_folder(path: str | Path) -> None:
    """`ArtifactError` where no folder can be made or written into."""
    folder = Path(os.path.realpath(path))
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if (reason := _closed(existing)) is not None:
        raise unwritable(path, reason, FOLDER)


def _closed(folder: Path) -> str | None:
    """Why nothing can be put into a folder."""
    if not folder.is_dir():
        return f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"no permission to write into {folder}"


def write_text(path: str | Path, text: str) -> None:
    """The whole of a file, in UTF-8."""
    check_file(path)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error, FILE) from error
