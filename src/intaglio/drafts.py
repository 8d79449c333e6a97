"""Files and folders that are written under a temporary name beside their target and moved there when they are complete.

The process that writes a draft holds a lock on it (``flock``), which the kernel releases when the process ends. A draft
that is not locked was therefore left by a process that was killed, and the next one that writes into the folder removes
it. File systems without locks keep such drafts.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PREFIX, SUFFIX = ".intaglio-", ".tmp"
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Arguments of the system call ``renameat2``, from Linux's ``fcntl.h`` and ``fs.h``."""


@contextlib.contextmanager
def draft_file(folder: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Create a file in ``folder`` and yield its path and the open file. It is deleted at the end unless it was moved.

    Raises:
        OSError: the folder cannot be written.
    """
    remove_abandoned(folder)
    while True:
        path = _new_path(folder)
        file = path.open("xb")
        try:
            with file:
                if not _locked(file.fileno()):
                    continue
                yield path, file
                return
        finally:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


@contextlib.contextmanager
def draft_folder(parent: Path, prefix: str = PREFIX, mode: int = 0o777) -> Iterator[Path]:
    """Create a folder in ``parent``, whose name begins with ``prefix``, and yield its path. It is deleted at the end
    unless it was moved.

    Args:
        parent: the folder that it is created in.
        prefix: beginning of its name.
        mode: its permissions, without those that the umask of the process takes.

    Raises:
        OSError: the parent folder cannot be written.
    """
    remove_abandoned(parent, prefix)
    while True:
        path = _new_path(parent, prefix)
        path.mkdir(mode)
        try:
            try:
                handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # another process has removed it, which was not locked yet
                continue
            try:
                if not _locked(handle):
                    continue
                yield path
                return
            finally:
                os.close(handle)
        finally:
            shutil.rmtree(path, ignore_errors=True)


def exchange_folders(first: Path, second: Path) -> bool:
    """Let two folders of one file system change places in one step. Return whether the system could do it."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    arguments = (AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE)
    return rename is not None and rename(*arguments) == 0


def remove_abandoned(folder: Path, prefix: str = PREFIX) -> None:
    """Remove drafts in ``folder`` that belong to no running process. Drafts that cannot be removed are kept."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.name.endswith(SUFFIX):
                with contextlib.suppress(OSError):
                    _remove_unlocked(entry.path)


def _new_path(folder: Path, prefix: str = PREFIX) -> Path:
    return folder / f"{prefix}{secrets.token_hex(8)}{SUFFIX}"


def _locked(handle: int) -> bool:
    """Lock a new draft. Return whether it still exists, as another process may have removed it before it was locked."""
    with contextlib.suppress(OSError):  # the file system has no locks
        fcntl.flock(handle, fcntl.LOCK_EX)
    return os.fstat(handle).st_nlink > 0


def _remove_unlocked(path: str) -> None:
    """Remove a draft of this user. Raise `OSError` if a process holds its lock."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        info = os.fstat(handle)
        if info.st_uid != os.geteuid():
            return
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISDIR(info.st_mode):
            shutil.rmtree(path, ignore_errors=True)
        elif stat.S_ISREG(info.st_mode):
            os.unlink(path)
    finally:
        os.close(handle)
