"""The folders of the caches: of kernels, whose files are loaded into the process, and of schedules. Only what this user
or root has written is used: regular files without permissions for others to write, in a folder without them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import time
from collections import defaultdict
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
ENTRY_SUFFIXES = (".so", ".o", ".cpp", ".program", ".constants")
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


def evict(folder: Path, limit: int | None = None) -> None:
    """Remove the least recently used entries, and files left by crashed builds.

    Args:
        folder: A folder of the cache.
        limit: Bytes that it may have; the default is the limit of the kernel cache.
    """
    now, limit = time.time(), config.cache_limit_bytes() if limit is None else limit
    sizes: dict[str, int] = defaultdict(int)
    used: dict[str, float] = defaultdict(float)
    for file in os.scandir(folder):
        try:
            info = file.stat()
        except FileNotFoundError:
            continue
        if file.is_dir():
            if now - info.st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(file.path, ignore_errors=True)
            continue
        stem = Path(file.name).stem
        sizes[stem] += info.st_size
        used[stem] = max(used[stem], info.st_mtime)
    excess = sum(sizes.values()) - limit
    for stem in sorted(used, key=lambda stem: used[stem]):
        if excess <= 0 or now - used[stem] < GRACE_SECONDS:
            return
        for suffix in ENTRY_SUFFIXES:
            (folder / f"{stem}{suffix}").unlink(missing_ok=True)
        excess -= sizes[stem]
