"""Checks of output paths, made before the work whose results are written there. The folder of a file must exist; the
folder of an export is created. Only regular files are replaced, never devices, pipes and sockets."""

from __future__ import annotations

import os
import stat
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
    return ArtifactError(str(path) or "''", None, f"cannot be written: {said}", remedy=remedy)


def expanded(path: str | Path) -> str:
    """Return a path as text, with the home folder for a leading ``~`` (the user's, or the one of ``~name``)."""
    return os.path.expanduser(os.fspath(path))


def check_file(path: str | Path) -> None:
    """Raise `ArtifactError` if no file can be created at ``path``, or if what is there is not a regular file."""
    if (reason := _no_path_reason(path) or special_file_reason(path)) is not None:
        raise unwritable_error(path, reason, FILE_REMEDY)
    _check_place(path)


def check_folder(path: str | Path) -> None:
    """Raise `ArtifactError` if no folder can be created at ``path``, or if it cannot be written into."""
    if (reason := _no_path_reason(path)) is not None:
        raise unwritable_error(path, reason, FOLDER_REMEDY)
    folder = Path(os.path.realpath(path))
    existing = next(place for place in (folder, *folder.parents) if os.path.exists(place))
    if (reason := _unwritable_reason(existing)) is not None:
        raise unwritable_error(path, reason, FOLDER_REMEDY)


def special_file_reason(path: str | Path) -> str | None:
    """Return why ``path`` must not be replaced by a file, or ``None`` if it does not exist or is a regular file.
    Symbolic links are followed."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return None
    if stat.S_ISREG(mode):
        return None
    return "it is a folder, not a file" if stat.S_ISDIR(mode) else "it is a device, pipe or socket, not a regular file"


def _no_path_reason(path: str | Path) -> str | None:
    """Return why ``path`` cannot be the path of anything, or ``None``."""
    text = os.fspath(path)
    if not text:
        return "the path is empty"
    if "\0" in text:
        return "the path contains a null character"
    try:
        os.lstat(text)
    except (FileNotFoundError, PermissionError, NotADirectoryError):  # the check of the folder says more
        return None
    except OSError as error:  # a name that is too long, or a loop of links
        return error.strerror
    except ValueError as error:  # a character that paths of this system cannot have
        return str(error)
    return None


def _check_place(path: str | Path) -> None:
    """Raise `ArtifactError` if the folder of ``path`` does not exist or cannot be written into."""
    if (reason := _unwritable_reason(Path(os.path.realpath(path)).parent)) is not None:
        raise unwritable_error(path, reason, FILE_REMEDY)


def _unwritable_reason(folder: Path) -> str | None:
    """Return why files cannot be created in ``folder``, or ``None`` if they can."""
    if not folder.is_dir():
        return f"{folder} is a file, not a folder" if folder.exists() else f"the folder {folder} does not exist"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"no permission to write into {folder}"


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` to a file in UTF-8; devices and pipes are written to. Raise `ArtifactError` if it cannot be
    written."""
    reason = _no_path_reason(path) or ("it is a folder, not a file" if os.path.isdir(path) else None)
    if reason is not None:
        raise unwritable_error(path, reason, FILE_REMEDY)
    _check_place(path)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable_error(path, error, FILE_REMEDY) from error
