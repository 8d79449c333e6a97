"""Files that users name: checks of their paths, made before the work whose results are written there, and writing and
reading. The folder of a file must exist; the folder of an export is created.

A file is written completely, or the one that was there stays as it is. Only regular files are replaced, never devices,
pipes and sockets.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from intaglio.drafts import draft_file, draft_folder
from intaglio.errors import ArtifactError

FILE_REMEDY = "choose a file in an existing folder that you can write to and that has free space"
FOLDER_REMEDY = "choose a folder that can be created and written to and that has free space"
NAMES_REMEDY = "rename the module or the input whose name has it"
READ_REMEDY = "check the path: it must be a text file that you can read"

Written = TypeVar("Written")


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
    if (reason := _no_path_reason(path) or special_file_reason(expanded(path))) is not None:
        raise unwritable_error(path, reason, FILE_REMEDY)
    _check_place(path)


def check_folder(path: str | Path) -> None:
    """Raise `ArtifactError` if no folder can be created at ``path``, or if it cannot be written into."""
    if (reason := _no_path_reason(path)) is not None:
        raise unwritable_error(path, reason, FOLDER_REMEDY)
    folder = Path(os.path.realpath(expanded(path)))
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
    text = expanded(path)
    if not text:
        return "the path is empty"
    if "\0" in text:
        return "the path contains a null character"
    try:
        os.stat(text)
    except (FileNotFoundError, PermissionError, NotADirectoryError):  # the check of the folder says more
        return None
    except OSError as error:  # a name that is too long, or a loop of links
        return error.strerror
    except ValueError as error:  # a character that paths of this system cannot have
        return str(error)
    return None


def _check_place(path: str | Path) -> None:
    """Raise `ArtifactError` if the folder of ``path`` does not exist or cannot be written into."""
    if (reason := _unwritable_reason(Path(os.path.realpath(expanded(path))).parent)) is not None:
        raise unwritable_error(path, reason, FILE_REMEDY)


def _unwritable_reason(folder: Path) -> str | None:
    """Return why files cannot be created in ``folder``, or ``None`` if they can."""
    if not folder.is_dir():
        return f"{folder} is a file, not a folder" if folder.exists() else f"the folder {folder} does not exist"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"no permission to write into {folder}"


def replace_file(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Create or replace a file.

    Args:
        path: the file.
        write: writes the contents into an open file. When it returns, the file is moved to its path.

    Raises:
        ArtifactError: the file cannot be written. An existing one is unchanged.
    """
    check_file(path)
    target = Path(os.path.realpath(expanded(path)))
    try:
        with draft_file(target.parent) as (draft, file):
            write(file)
            file.flush()
            os.fsync(file.fileno())
            _move_to(target, draft, path)
    except OSError as error:
        raise unwritable_error(path, error, FILE_REMEDY) from error


def replace_file_by(path: str | Path, write: Callable[[Path], Written]) -> Written:
    """Create or replace a file whose writer needs a path, and files whose names begin with its name.

    Args:
        path: the file.
        write: writes a file at the path that it is given, which has the same name, and possibly others beside it. When
            it returns, they are moved to the folder of ``path``, the file itself last.

    Returns:
        What ``write`` returns.

    Raises:
        ArtifactError: a file cannot be written. Existing ones are unchanged.
    """
    check_file(path)
    target = Path(os.path.realpath(expanded(path)))
    try:
        with draft_folder(target.parent) as folder:
            draft = folder / target.name
            result = write(draft)
            others = [other for other in folder.iterdir() if other != draft]
            for written in (*others, draft):
                with written.open("rb") as file:
                    os.fsync(file.fileno())
                check_file(target.parent / written.name)
            for other in others:
                _move_to(target.parent / other.name, other, path)
            _move_to(target, draft, path)
    except OSError as error:
        raise unwritable_error(path, error, FILE_REMEDY) from error
    return result


def _move_to(target: Path, draft: Path, path: str | Path) -> None:
    """Move a complete draft to its path. Raise `ArtifactError` if something else than a file came to be there."""
    if (reason := special_file_reason(target)) is not None:
        raise unwritable_error(path, reason, FILE_REMEDY)
    if target.exists():
        shutil.copymode(target, draft)
    os.replace(draft, target)


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` to a file in UTF-8, completely or not at all. Raise `ArtifactError` if it cannot be written.

    The standard output of the process (``/dev/stdout``) is written to if it is a terminal or a pipe, and so are devices
    without blocks, such as ``/dev/null``.
    """
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        problem = f"cannot be written: its text would contain {text[error.start]!r}, which is not a character"
        raise ArtifactError(str(path), None, problem, remedy=NAMES_REMEDY) from error
    name = expanded(path)
    if not (_is_stream(name) or _has_type(name, stat.S_ISCHR)):
        replace_file(path, lambda file: file.write(content))
        return
    try:
        Path(name).write_bytes(content)
    except OSError as error:
        raise unwritable_error(path, error, FILE_REMEDY) from error


def unreadable_reason(error: OSError | ValueError) -> str:
    """Return why a text file cannot be read, from the error of Python."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "the path is not valid"


def file_text(path: str | Path) -> str:
    """Return the text of a file, or of the standard input (``/dev/stdin``), in UTF-8.

    Raises:
        OSError: it cannot be read, or is a named pipe, a socket or a device, for which reading could wait forever.
        ValueError: it is not UTF-8 text, or the path is not valid.
    """
    name = expanded(path)
    with open(name, encoding="utf-8", opener=open_without_waiting) as file:
        if not (stat.S_ISREG(os.fstat(file.fileno()).st_mode) or file.isatty() or _is_stream(name)):
            raise OSError(errno.EINVAL, "it is a device, pipe or socket, not a regular file")
        os.set_blocking(file.fileno(), True)
        return file.read()


def open_without_waiting(path: str, flags: int) -> int:
    """Open a file for reading. A named pipe opens at once, too, instead of waiting for a process that writes."""
    return os.open(path, flags | os.O_NONBLOCK)


def _is_stream(path: str) -> bool:
    """Return whether a path such as ``/dev/stdin`` names a pipe without a place in the file system."""
    return _has_type(path, stat.S_ISFIFO) and not _has_type(os.path.realpath(path), stat.S_ISFIFO)


def _has_type(path: str, test: Callable[[int], bool]) -> bool:
    """Return whether something exists at a path and its mode passes a test."""
    try:
        return test(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_text(path: str | Path) -> str:
    """Return the text of a file in UTF-8. Raise `ArtifactError` if it cannot be read."""
    try:
        return file_text(path)
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {unreadable_reason(error)}"
        raise ArtifactError(str(path) or "''", None, problem, remedy=READ_REMEDY) from error
