"""Writing of an export: a folder of files that is complete, or as it was before."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from intaglio.drafts import draft_folder, exchange_folders
from intaglio.output_paths import FOLDER_REMEDY, special_file_reason, unwritable_error


def write_exported_files(folder: str | Path, members: Mapping[str, bytes]) -> None:
    """Write the files of an export, which may be in subfolders.

    All files are written to a draft beside the folder, which then takes its place in one system call. Other files of an
    existing folder are kept. Where this is not possible, the files of an existing folder are replaced one by one once
    all of them are written; if that fails, those that were replaced are restored. It is not possible if the folder is
    the working directory of a process, a mount point, or in a folder or on a file system that does not allow it.

    Args:
        folder: the folder, which is created if it does not exist.
        members: contents by path.

    Raises:
        ArtifactError: a file cannot be written. The folder keeps its contents.
    """
    target = Path(os.path.realpath(folder))
    place = next(path for path in (target, *target.parents) if path.exists())
    beside = target.parent if place == target and _can_be_exchanged(target) else place
    try:
        for path in members:
            if (reason := special_file_reason(target / path)) is not None:
                raise unwritable_error(target / path, reason, FOLDER_REMEDY)
        with draft_folder(beside) as draft:
            for path, content in members.items():
                (draft / path).parent.mkdir(parents=True, exist_ok=True)
                _write_through(draft / path, content)
            target.parent.mkdir(parents=True, exist_ok=True)
            if place != target:
                os.rename(draft, target)
                return
            if beside != target and _exchange(draft, target):
                _move_late_files(draft, target)
                return
            _replace_files(draft, target, members)
    except OSError as error:
        raise unwritable_error(folder, error, FOLDER_REMEDY) from error


def _can_be_exchanged(folder: Path) -> bool:
    """Return whether another folder can take the place of this one, which must be neither a mount point nor the working
    directory of a process, because that would stay in the old folder."""
    return not folder.is_mount() and os.access(folder.parent, os.W_OK | os.X_OK) and not _is_working_directory(folder)


def _is_working_directory(folder: Path) -> bool:
    """Return whether a process works in a folder or below it, as far as this user can see."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if Path(os.readlink(process / "cwd")).is_relative_to(folder):
                return True
    return False


def _exchange(draft: Path, target: Path) -> bool:
    """Let a draft and an existing folder change places, after links to the other files of the folder were added to the
    draft. Return whether it was possible; if not, both are as before, except for added links."""
    try:
        _add_links(target, draft)
        shutil.copystat(target, draft)
        new, old = draft.stat(), target.stat()
        return (new.st_uid, new.st_gid) == (old.st_uid, old.st_gid) and exchange_folders(draft, target)
    except (OSError, shutil.Error):
        return False


def _move_late_files(old: Path, target: Path) -> None:
    """Move files to the new folder that came to be in the old one while its files were linked."""
    for path in sorted(old.rglob("*")):
        new = target / path.relative_to(old)
        if not os.path.lexists(new):
            with contextlib.suppress(OSError):
                os.rename(path, new)


def _add_links(source: Path, draft: Path) -> None:
    """Add the files of a folder that the draft does not have: links to files, and copies of symbolic links.

    Raises:
        OSError: an entry is neither a file, a folder nor a symbolic link, or cannot be linked.
    """
    with os.scandir(source) as entries:
        for entry in entries:
            path = draft / entry.name
            if entry.is_symlink():
                if not path.exists():
                    path.symlink_to(os.readlink(entry.path))
            elif entry.is_dir():
                path.mkdir(exist_ok=True)
                _add_links(Path(entry.path), path)
                shutil.copystat(entry.path, path)
            elif not entry.is_file():
                raise OSError(f"{entry.path} is neither a file nor a folder")
            elif not path.exists():
                os.link(entry.path, path)


def _write_through(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk, where an error of the disk is still reported."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _replace_files(draft: Path, target: Path, members: Mapping[str, bytes]) -> None:
    """Move the files of a draft to their paths. If one cannot be moved, restore those that were replaced before it."""
    with contextlib.ExitStack() as restore:
        for folder in sorted({Path(path).parent for path in members}):
            if not (target / folder).is_dir():
                (target / folder).mkdir(parents=True)
                restore.callback(_remove_folder, target / folder)
        for index, path in enumerate(members):
            old, kept = target / path, draft / f"replaced-{index}"
            if old.exists():
                os.link(old, kept)
            os.replace(draft / path, old)
            restore.callback(_restore, old, kept)
        restore.pop_all()


def _restore(path: Path, kept: Path) -> None:
    """Move the old file back to its path, or remove the new one if there was none."""
    with contextlib.suppress(OSError):
        if kept.exists():
            os.replace(kept, path)
        else:
            path.unlink()


def _remove_folder(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()
