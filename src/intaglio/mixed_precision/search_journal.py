"""The journal of a search: one JSON object per line, from which an interrupted search continues."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from intaglio import config
from intaglio.errors import MALFORMED, ArtifactError, InputError

JOURNAL_VERSION = 2
JOURNAL_NAME = "intaglio search"


def journal_key(parts: Iterable[object]) -> str:
    """Return a digest of everything that measurements depend on."""
    return hashlib.sha256("\n".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:32]


class SearchJournal:
    """Measurements and trials of a search, each of which is written to a file as soon as it is known.

    Attributes:
        path: the file, or ``None`` to keep them in memory only.
        records: all records by their kind and by what they are about.
    """

    def __init__(self, path: Path | None, key: str) -> None:
        """Read the file if it exists, else begin it.

        Args:
            path: the file, or ``None``.
            key: digest of the model, its recipe, its parameters and the machine.

        Raises:
            InputError: the file belongs to another search.
            ArtifactError: the file cannot be read or written, or is not a journal.
        """
        self.path, self.records = path, dict[tuple[str, str], Mapping[str, Any]]()
        lines = [] if path is None else _lines(path)
        if lines:
            _check_header(path, lines[0], key)
            for record in lines[1:]:
                self.records[str(record.get("kind")), str(record.get("about"))] = record
        else:
            self._write({"journal": JOURNAL_NAME, "version": JOURNAL_VERSION, "intaglio": config.VERSION, "key": key})

    def known(self, kind: str, about: object) -> Mapping[str, Any] | None:
        """Return the record of a kind about something, or ``None``."""
        return self.records.get((kind, text_of(about)))

    def trials(self) -> list[dict[str, str]]:
        """Return the assignments of all recorded trials."""
        return [json.loads(about) for kind, about in self.records if kind == "trial"]

    def add(self, kind: str, about: object, **values: Any) -> None:
        """Store a record."""
        record = {"kind": kind, "about": text_of(about), **values}
        self.records[kind, record["about"]] = record
        self._write(record)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except (OSError, ValueError) as error:  # a path with a null character is a ValueError
            problem = f"cannot be written: {getattr(error, 'strerror', error)}"
            raise ArtifactError(str(self.path), None, problem, remedy="pass a journal in another folder") from error


def text_of(about: object) -> str:
    """Return what a record is about as text, the same for equal mappings."""
    return about if isinstance(about, str) else json.dumps(about, sort_keys=True)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file. The last line may be incomplete, if the process was killed while it wrote it."""
    try:
        if not path.exists():
            return []
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise ArtifactError(str(path), None, problem, remedy="pass a journal in another folder") from error
    complete, _, rest = text.rpartition("\n")
    try:
        found = [json.loads(line) for line in complete.splitlines()]
        if not all(isinstance(one, dict) for one in found):
            raise ValueError("a line holds no JSON object")
    except MALFORMED as error:
        problem = f"is not the journal of a search: {error}"
        raise ArtifactError(str(path), None, problem, remedy="delete it, or pass the name of another file") from error
    if rest:
        path.write_text(complete + "\n" * bool(complete), encoding="utf-8")
    return found


def _check_header(path: Path | None, header: Mapping[str, Any], key: str) -> None:
    if header.get("journal") != JOURNAL_NAME or header.get("version") != JOURNAL_VERSION:
        raise ArtifactError(
            str(path),
            None,
            "is not the journal of a search of this version",
            remedy="delete it, or pass the name of another file",
        )
    if header.get("key") != key:
        raise InputError(
            "journal",
            None,
            f"{str(path)!r} belongs to a search with another model, recipe, calibration or machine",
            remedy="delete it, or pass the name of another file",
        )
