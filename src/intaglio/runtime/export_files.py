"""Writing of an export: a folder of files that is complete, or as it was before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from intaglio.drafts import draft_folder
from intaglio.output_paths import FOLDER_REMEDY, special_file_reason, unwritable_error


def write_exported_files(folder: str | Path, members: Mapping[str, bytes]) -> None:
    """Write the files of an export, which may be in subfolders.

    All files are written to a draft first. A new folder is moved to its path as a whole. In an existing folder, which
    may contain other files too, the files are replaced one by one once all of them are written; if that fails, those
    that were replaced are restored.

    Args:
        folder: the folder, which is created if it does not exist.
        members: contents by path.

    Raises:
        ArtifactError: a file cannot be written. The folder keeps its contents.
    """
    target = Path(os.path.realpath(folder))
    place = next(path for path in (target, *target.parents) if path.exists())
    try:
        for path in members:
            if (reason := special_file_reason(target / path)) is not None:
                raise unwritable_error(target / path, reason, FOLDER_REMEDY)
        with draft_folder(place) as draft:
            for path, content in members.items():
                (draft / path).parent.mkdir(parents=True, exist_ok=True)
                _write_through(draft / path, content)
            target.parent.mkdir(parents=True, exist_ok=True)
            if place == target:
                _replace_files(draft, target, members)
            else:
                os.rename(draft, target)
    except OSError as error:
        raise unwritable_error(folder, error, FOLDER_REMEDY) from error


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
