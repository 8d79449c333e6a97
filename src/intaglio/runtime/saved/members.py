"""`Member`: a part of a model file, which is read when it is needed, with its digest checked before."""

from __future__ import annotations

import hashlib
import io
import os
import weakref
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from intaglio.errors import ArtifactError

READ_BYTES = 1 << 20
"""Bytes that are read at a time for a digest, so that a file of any size needs little memory."""
LOCAL_HEADER = b"PK\x03\x04"
LOCAL_HEADER_BYTES, NAME_BYTES_AT = 30, 26
"""Size of the header in front of each member of a zip file, without name and extra field, and the place in it of the
sizes of these two, which have two bytes each."""
CHANGED = "load the file again; to replace it while it is in use, write a new file and rename it"


class OpenFile:
    """A file that stays open as long as a member of it is used, also after it is renamed or deleted.

    Attributes:
        path: its path, for errors.
        number: its descriptor, which it closes.
        intact: first byte of a member -> state of the file when the digest of the member was last found to be right.
    """

    def __init__(self, number: int, path: Path) -> None:
        self.path, self.number, self.intact = path, number, dict[int, tuple[int, int]]()
        weakref.finalize(self, os.close, number)

    @property
    def state(self) -> tuple[int, int]:
        """Return size and time of the last change."""
        info = os.fstat(self.number)
        return info.st_size, info.st_mtime_ns

    def fill(self, memory: memoryview, start: int) -> None:
        """Read bytes from ``start`` on into memory, as many as it has. Raise `ArtifactError` if the file is shorter,
        and `OSError` if it cannot be read."""
        while len(memory):
            count = os.preadv(self.number, [memory], start)
            if not count:
                raise ArtifactError(str(self.path), None, "the file is shorter than it says", remedy=CHANGED)
            memory, start = memory[count:], start + count

    def read(self, start: int, size: int) -> bytes:
        """Return bytes of the file, with the errors of `fill`."""
        memory = bytearray(size)
        self.fill(memoryview(memory), start)
        return bytes(memory)


@dataclass(frozen=True)
class Member:
    """Bytes of a file.

    Attributes:
        file: The file.
        name: Name of the member, for errors.
        start: Its first byte.
        size: Its bytes.
        crc: Their CRC-32 according to the file.
        digest: SHA-256 of its bytes; bytes are not returned before they have it. Empty if none is known.
    """

    file: OpenFile = field(repr=False)
    name: str
    start: int
    size: int
    crc: int = 0
    digest: str = ""

    def checked(self, digest: str) -> Member | None:
        """Return the member with its digest, or ``None`` if its bytes have another one."""
        return replace(self, digest=digest) if self._is_intact(digest) else None

    def unchecked(self, digest: str) -> Member:
        """Return the member with a digest that is compared when its bytes are read."""
        return replace(self, digest=digest)

    def is_archive(self) -> bool:
        """Return whether the bytes begin as those of a zip file."""
        return self.size >= len(LOCAL_HEADER) and self.file.read(self.start, len(LOCAL_HEADER)) == LOCAL_HEADER

    def _is_intact(self, digest: str) -> bool:
        """Return whether the bytes have this SHA-256 digest. They are only read again if the file was changed."""
        state = self.file.state
        if self.file.intact.get(self.start) != state:
            if self._computed_digest() != digest:
                return False
            self.file.intact[self.start] = state
        return True

    def _computed_digest(self) -> str:
        """Return the SHA-256 digest of the bytes in hexadecimal."""
        found, memory = hashlib.sha256(), memoryview(bytearray(min(READ_BYTES, self.size)))
        for start in range(0, self.size, READ_BYTES):
            part = memory[: self.size - start]
            self.file.fill(part, self.start + start)
            found.update(part)
        return found.hexdigest()

    def read(self, start: int = 0, size: int | None = None) -> bytes:
        """Return bytes of the member, by default all, with the errors of `fill`."""
        memory = bytearray(self.size - start if size is None else size)
        self.fill(memoryview(memory), start)
        return bytes(memory)

    def fill(self, memory: memoryview, start: int) -> None:
        """Read bytes from ``start`` on into memory. Raise `ArtifactError` if the file was changed meanwhile."""
        if self.digest and not self._is_intact(self.digest):
            raise ArtifactError(
                str(self.file.path), None, f"'{self.name}' was changed after the file was loaded", remedy=CHANGED
            )
        self.file.fill(memory, self.start + start)


class MemberStream(io.RawIOBase):
    """A member as a file that can be read and searched."""

    def __init__(self, member: Member) -> None:
        self.member, self.position = member, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position, and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.member.size}[whence]
        if base + offset < 0:
            raise ValueError(f"position {base + offset} is negative")
        self.position = base + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer and return the number of bytes."""
        memory = memoryview(buffer)
        size = max(min(len(memory), self.member.size - self.position), 0)
        self.member.file.fill(memory[:size], self.member.start + self.position)
        self.position += size
        return size


def members_of(whole: Member) -> dict[str, Member]:
    """Return the members of an uncompressed zip file by name.

    Raises:
        ArtifactError: a member is compressed, encrypted or occurs twice.
        Exception: the file is not a zip file; `zipfile` raises many types of errors for damaged headers.
    """
    path, found = str(whole.file.path), dict[str, Member]()
    with zipfile.ZipFile(io.BufferedReader(MemberStream(whole))) as archive:
        entries = archive.infolist()
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            problem = f"'{entry.filename}' is compressed or encrypted, which files of intaglio are not"
            raise ArtifactError(path, None, problem, remedy="pass a file that model.save wrote")
        if entry.filename in found:
            problem = f"it contains '{entry.filename}' twice"
            raise ArtifactError(path, None, problem, remedy="save the model again")
        found[entry.filename] = _located(whole, entry)
    return found


def _located(whole: Member, entry: zipfile.ZipInfo) -> Member:
    """Return the bytes of an entry of a zip file. Raise `ValueError` if its header is damaged."""
    header = whole.file.read(whole.start + entry.header_offset, LOCAL_HEADER_BYTES)
    if header[:4] != LOCAL_HEADER or entry.file_size != entry.compress_size:
        raise ValueError(f"'{entry.filename}' has a damaged header")
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (NAME_BYTES_AT, NAME_BYTES_AT + 2))
    start = entry.header_offset + LOCAL_HEADER_BYTES + name + extra
    if start + entry.file_size > whole.size:
        raise ValueError(f"'{entry.filename}' is longer than the file")
    stored = whole.file.read(whole.start + entry.header_offset + LOCAL_HEADER_BYTES, name)
    if stored != entry.filename.encode(errors="surrogateescape") and stored.decode("cp437") != entry.filename:
        raise ValueError(f"'{entry.filename}' has another name in its header")
    return Member(whole.file, entry.filename, whole.start + start, entry.file_size, entry.CRC)
