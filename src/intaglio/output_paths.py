"""Checks of output paths, made before the work whose results are written there. The folder of a file must exist; the
folder of an export is created."""

from __future__ import annotations

import os
from pathlib import Path

from intaglio.errors import ArtifactError

FILE_REMEDY = "choose a file in an existing folder that you can write to and that has free space"
FOLDER_REMEDY = "choose a folder that can be created and written to and that has free space"


def unwritable_error(path: str | Path, reason: object, remedy: str) -> ArtifactError:
    """Return the error for a path that cannot be written.

    Args:
        path: the path that the user gave.
        reason: a text, or an ``OSError``, whose message is used without the path of the temporary file.
        remedy: `FILE_REMEDY` or `FOLDER_REMEDY`.
    """
    said = getattr(reason, "strerror", None) or reason
    return ArtifactError(str(path), None, f"cannot be written: {said}", remedy=remedy)


def check_file(path: str | Path) -> None:
    """Raise `ArtifactError` if no file can be created or replaced at ``path``."""
    folder = Path(os.path.realpath(path)).parent
    if os.path.isdir(path):
        raise unwritable_error(path, "it is a folder, not a file", FILE_REMEDY)
    if (reason := _unwritable_reason(folder)) is not None:
        raise unwritable_error(path, reason, FILE_REMEDY)


def check_folder(path: str | Path) -> None:
    """Raise `ArtifactError` if no folder can be created at ``path``, or if it cannot be written into."""
    folder = Path(os.path.realpath(path))
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if (reason := _unwritable_reason(existing)) is not None:
        raise unwritable_error(path, reason, FOLDER_REMEDY)


def _unwritable_reason(folder: Path) -> str | None:
    """Return why files cannot be created in ``folder``, or ``None`` if they can."""
    if not folder.is_dir():
        return f"{folder} is a file, not a folder" if folder.exists() else f"the folder {folder} does not exist"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"no permission to write into {folder}"


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` to a file in UTF-8. Raise `ArtifactError` if it cannot be written."""
    check_file(path)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable_error(path, error, FILE_REMEDY) from error
