"""The folders of the caches: of kernels, whose files are loaded into the process, and of schedules. Only what this user
or root has written is used: regular files without permissions for others to write, in a folder without them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

from intaglio import config
from intaglio.errors import BuildError

MOVE_CACHE = "set INTAGLIO_CACHE_DIR to a folder that you can write to and that allows execution"
OWN_CACHE = "remove it if it is not yours, or set INTAGLIO_CACHE_DIR to a folder that only you can write to"
STICKY_CACHE = "run chmod go-w on it, or chmod +t, or set INTAGLIO_CACHE_DIR to a folder that only you can write to"
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

GRACE_SECONDS = 60
"""Entries built or used this recently are not evicted, because a process may not have loaded them yet."""
ABANDONED_SECONDS = 3600
ENTRY_SUFFIXES = (".so", ".o", ".cpp", ".program", ".text", ".constants")
"""Suffixes of the files of an entry. Version 0.2 wrote `.constants`."""

logger = logging.getLogger("intaglio")


def trusted_folder(name: str) -> Path:
    """Return the folder ``name`` of the cache, which need not exist.

    In a cache folder that others can write, each user has a folder of their own, ``u`` and the number of the user.

    Raises:
        BuildError: others can replace what the folder contains.
    """
    base = config.cache_dir()
    if not _is_shared(base):
        return _checked_folder(base / name)
    own = _checked_folder(base / f"u{os.geteuid()}")
    return _checked_folder(own / name)


def make_folder(folder: Path) -> None:
    """Create a folder of the cache for this user only. Other users can read what root creates, because the
    cache of a container is often written by root and read by another user.

    Raises:
        OSError: it cannot be created.
    """
    mode, missing = 0o755 if os.geteuid() == 0 else 0o700, []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process has made it
            path.mkdir(mode)


def read_entry(path: Path) -> bytes | None:
    """Return the contents of a file of the cache, or ``None`` if it does not exist or is not to be trusted."""
    if (file := open_entry(path)) is None:
        return None
    with file:
        return file.read()


def open_entry(path: Path) -> BufferedReader | None:
    """Open a file of the cache. Return ``None`` if it does not exist or is not to be trusted."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:  # another thread may make it at any time
        return None
    except OSError:
        if path.is_symlink():
            _warn(path, "it is a symbolic link")
        elif path.exists():
            raise
        return None
    info = os.fstat(handle)
    reason = _distrust(info) if stat.S_ISREG(info.st_mode) else "it is not a regular file"
    if reason is not None:
        os.close(handle)
        _warn(path, reason)
        return None
    return os.fdopen(handle, "rb")


def _is_shared(base: Path) -> bool:
    """Return whether others can write into the cache folder. Raise `BuildError` if they can replace folders of other
    users there."""
    try:
        info = base.stat()
    except OSError:  # it does not exist, or the caller will fail to write
        return False
    reason = _distrust(info)
    if reason is None:
        return False
    if info.st_uid not in (os.geteuid(), 0) or not info.st_mode & stat.S_ISVTX:
        raise BuildError(
            str(base), None, f"others can replace what this folder contains: {reason}", remedy=STICKY_CACHE
        )
    return True


def _checked_folder(folder: Path) -> Path:
    """Return ``folder``. Raise `BuildError` if it exists and others can write into it."""
    try:
        info = folder.lstat()
    except OSError:
        return folder
    reason = _distrust(info)
    if stat.S_ISLNK(info.st_mode):
        reason = "it is a symbolic link"
    if reason is not None:
        problem = f"{folder.name} of this folder are not used, because {reason}"
        raise BuildError(str(folder), None, problem, remedy=OWN_CACHE)
    return folder


def _distrust(info: os.stat_result) -> str | None:
    """Return why a file or folder may have been written by another user, or ``None``."""
    if info.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {info.st_uid}, not to this user ({os.geteuid()}) or root"
    if info.st_mode & WRITABLE_BY_OTHERS:
        return f"its mode {stat.S_IMODE(info.st_mode):o} lets others write to it"
    return None


def _warn(path: Path, reason: str) -> None:
    logger.warning("%s in the cache is not used and is made again: %s", path, reason)


@contextlib.contextmanager
def keeping_entries(folder: Path) -> Iterator[None]:
    """Let `evict` in other threads and processes wait while entries of a folder are looked up and marked as used, or
    replaced, so that what was found or written is not removed before it can be loaded.

    File systems without locks, and folders that do not exist yet, are not locked.
    """
    with _folder_lock(folder, fcntl.LOCK_SH):
        yield


def mark_used(path: Path) -> None:
    """Mark an entry as used now."""
    with contextlib.suppress(OSError):  # a read-only cache still works
        os.utime(path)


def place_entry(draft: Path, path: Path) -> None:
    """Move a file that was written just now to its path in the cache, also if an older one is being evicted there."""
    with keeping_entries(path.parent):
        os.replace(draft, path)


def evict(folder: Path, limit: int | None = None) -> None:
    """Remove the least recently used entries, and files left by crashed builds.

    Args:
        folder: A folder of the cache.
        limit: Bytes that it may have; the default is the limit of the kernel cache.
    """
    limit = config.cache_limit_bytes() if limit is None else limit
    with _folder_lock(folder, fcntl.LOCK_EX):
        now, entries = time.time(), _entries(folder)
        excess = sum(entry.size for entry in entries) - limit
        for entry in sorted(entries, key=lambda entry: entry.used):
            if excess <= 0 or now - entry.used < GRACE_SECONDS:
                return
            for file in entry.files:
                Path(file).unlink(missing_ok=True)
            excess -= entry.size


@dataclass
class _Entry:
    """The files of an entry, their bytes, and the time when one of them was last used."""

    files: list[str] = field(default_factory=list)
    size: int = 0
    used: float = 0.0


def _entries(folder: Path) -> list[_Entry]:
    """Return the entries of a folder, whose files have the same name up to the suffix, and remove folders that crashed
    builds have left."""
    found: dict[str, _Entry] = defaultdict(_Entry)
    for file in os.scandir(folder):
        try:
            info = file.stat()
        except FileNotFoundError:
            continue
        if file.is_dir():
            if time.time() - info.st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(file.path, ignore_errors=True)
            continue
        stem, dot, suffix = file.name.rpartition(".")  # paths of pathlib take most of the time of thousands of files
        if dot + suffix in ENTRY_SUFFIXES:
            entry = found[stem]
            entry.files.append(file.path)
            entry.size += info.st_size
            entry.used = max(entry.used, info.st_mtime)
    return list(found.values())


@contextlib.contextmanager
def _folder_lock(folder: Path, kind: int) -> Iterator[None]:
    """Hold a lock on a folder, which ``fcntl`` names. Go on without it where the system does not give one."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, kind)
        yield
    finally:
        with contextlib.suppress(OSError):  # closing does not unlock it if a child of a fork has the handle too
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)
