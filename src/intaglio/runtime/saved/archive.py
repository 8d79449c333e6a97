"""The container of saved models: named members in one zip file, written completely or not at all. The module does not
depend on the contents of the members."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from intaglio.errors import ArtifactError
from intaglio.output_paths import expanded, open_without_waiting, replace_file
from intaglio.runtime.saved.members import LOCAL_HEADER, Member, OpenFile, members_of

FORMAT = "intaglio model"
ARCHIVE_VERSION = 1
"""Version of the format. A reader accepts only its own version."""

MANIFEST = "manifest.json"
GENERATOR_ENTRY = "generator"
"""Key of the manifest of a model that generates."""
EPOCH = (1980, 1, 1, 0, 0, 0)
SAVE_AGAIN = "copy the file again from its source, or save the model again"
OTHER_FILE = "pass a file that model.save wrote; open files of torch.save with torch.load"


def write(path: Path, manifest: Mapping[str, Any], members: Mapping[str, bytes]) -> None:
    """Write an uncompressed zip file atomically. The same members always give the same bytes.

    Args:
        path: the file; an existing one is replaced only when the new one is complete.
        manifest: JSON object of the manifest, to which format, version and digests are added.
        members: contents by name.

    Raises:
        ArtifactError: the file cannot be written.
    """
    digests = {name: digest(members[name]) for name in sorted(members)}
    first = to_json({"format": FORMAT, "version": ARCHIVE_VERSION, **manifest, "digests": digests})

    def write_members(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, content in sorted({MANIFEST: first, **members}.items()):
                entry = zipfile.ZipInfo(name, EPOCH)
                entry.create_system, entry.external_attr = 3, 0o644 << 16
                archive.writestr(entry, content)

    replace_file(path, write_members)


Contents = tuple[dict[str, Any], dict[str, Member]]
"""Manifest of a file, and its other members by name."""


def read(path: Path) -> Contents:
    """Return the manifest and all other members, whose digests have been checked. Members are read when they are used.

    Model files inside of the file are checked when they are opened (`read_member`): the digests of their members are
    those of all their bytes, which would otherwise be computed twice.

    Raises:
        ArtifactError: the file cannot be read, is damaged, or has another format or version.
    """
    try:
        with open(expanded(path), "rb", opener=open_without_waiting) as file:
            whole = OpenFile(os.dup(file.fileno()), path)
        if not stat.S_ISREG(os.fstat(whole.number).st_mode):
            raise ArtifactError(str(path), None, "this is not a regular file", remedy=OTHER_FILE)
        return _checked(path, _unzip(path, Member(whole, path.name, 0, whole.state[0])))
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        problem = f"cannot be read: {said}"
        raise ArtifactError(str(path), None, problem, remedy="check the path and its permissions") from error


def read_member(path: Path, members: Mapping[str, Member], name: str) -> Contents:
    """Return the contents of a model file that is a member of another file, as `read` does.

    Raises:
        ArtifactError: the file has no such member, or it is damaged.
    """
    if name not in members:
        raise ArtifactError(str(path), None, f"'{name}' is missing", remedy=SAVE_AGAIN)
    whole = replace(members[name], digest="")
    return _checked(path / name, _unzip(path / name, whole))


def _checked(path: Path, members: dict[str, Member]) -> Contents:
    """Return manifest and members of a file. Raise `ArtifactError` unless the members are those of the manifest."""
    manifest = _manifest(path, members)
    digests, found = manifest["digests"], dict[str, Member]()
    for name in sorted({*members, *digests}):
        if name not in digests:
            raise ArtifactError(
                str(path), None, f"it contains '{name}', which its manifest does not list", remedy=SAVE_AGAIN
            )
        if name not in members:
            raise ArtifactError(str(path), None, f"'{name}' is missing", remedy=SAVE_AGAIN)
        if members[name].is_archive():
            found[name] = members[name].unchecked(digests[name])
            continue
        if (checked := members[name].checked(digests[name])) is None:
            raise ArtifactError(
                str(path),
                None,
                f"'{name}' is damaged: its digest differs from the one in the manifest",
                remedy=SAVE_AGAIN,
            )
        found[name] = checked
    return manifest, found


def _unzip(path: Path, whole: Member) -> dict[str, Member]:
    """Return all members by name. Raise `ArtifactError` if the file is not an intact, uncompressed zip file."""
    if whole.read(0, min(4, whole.size)) != LOCAL_HEADER:
        raise ArtifactError(str(path), None, "this is not a model file of intaglio", remedy=OTHER_FILE)
    try:
        return members_of(whole)
    except ArtifactError:
        raise
    except Exception as error:  # zipfile raises many types of errors for damaged headers
        raise ArtifactError(
            str(path), None, f"the file is damaged or incomplete: {error}", remedy=SAVE_AGAIN
        ) from error


def _manifest(path: Path, members: dict[str, Member]) -> dict[str, Any]:
    """Remove the manifest from the members and return it. Raise `ArtifactError` if this version cannot read it."""
    found, member = None, members.pop(MANIFEST, None)
    content = member.read() if member is not None else b""
    if member is not None and zlib.crc32(content) != member.crc:  # the manifest has no digest
        raise ArtifactError(str(path), None, f"'{MANIFEST}' is damaged", remedy=SAVE_AGAIN)
    with contextlib.suppress(ValueError):
        found = from_json(content)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ArtifactError(str(path), None, "this is not a model file of intaglio", remedy=OTHER_FILE)
    if found.get("version") != ARCHIVE_VERSION:
        raise ArtifactError(
            str(path),
            None,
            f"its format is {found.get('version')!r}, but this version reads format {ARCHIVE_VERSION}",
            remedy="save the model again with the installed version, or install the one that saved it "
            f"(intaglio {found.get('intaglio', '?')})",
        )
    if not isinstance(found.get("digests"), dict):
        raise ArtifactError(str(path), None, "its manifest does not list its members", remedy=SAVE_AGAIN)
    return found


def digest(content: bytes) -> str:
    """Return the SHA-256 digest in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def to_json(value: Any) -> bytes:
    """Return a value as compact JSON, always the same bytes for the same value. Infinities and NaN are not allowed.
    Surrogates, which Python puts into paths whose bytes are not UTF-8, are kept."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="surrogatepass")


def from_json(content: bytes) -> Any:
    """Parse JSON. Raise `ValueError` if it is malformed."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("the JSON text is nested too deeply") from None
