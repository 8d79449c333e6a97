"""The programs of model files that were loaded before, in the cache folder.

An entry holds the constants of a program as its kernels read them, a record of the program, the number of bytes of the
record, and the SHA-256 of the SHA-256 of their pieces, which threads read and hash side by side. Its key is a digest of
all that the program is printed from, and of the code that prints it. A loaded model then reads its program instead of
planning and printing it and packing its weights again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from intaglio import config
from intaglio.drafts import draft_file
from intaglio.errors import BuildError
from intaglio.native.cache_folder import (
    evict,
    make_folder,
    mark_used,
    open_entry,
    place_entry,
    read_entry,
    trusted_folder,
)

FOLDER, SUFFIX, TEXT_SUFFIX = "constants", ".program", ".text"
"""Version 0.2 kept constants alone in this folder, in files with another suffix, which are evicted as others are."""
DIGEST_BYTES, LENGTH_BYTES = hashlib.sha256().digest_size, 8
SMALLEST_ENTRY = 1 << 16
"""Bytes of constants from which programs are stored. Those of smaller models are printed in some milliseconds."""
CODE = ("build", "codegen", "fusion", "ir", "kernels", "native/program_cache.py", "numerics", "ops", "plan", "runtime")
"""Folders and files with the code that entries depend on."""
PIECE_BYTES = 1 << 22
"""Bytes whose digest one thread computes."""
MOST_THREADS = 8
"""Threads that read an entry, at most."""

logger = logging.getLogger("intaglio")


def read(key: str, memory: Callable[[int], memoryview]) -> tuple[memoryview, bytes] | None:
    """Return the constants and the record of the entry of a key, or ``None`` if its file is missing or damaged.

    Args:
        key: as for `write`.
        memory: returns memory for so many bytes of constants.
    """
    try:
        path = _path(key)
        if (file := open_entry(path)) is None:
            return None
        with file:
            found = _read_file(file.fileno(), memory)
        if found is None:
            logger.warning("%s is damaged: the program is printed again", path)
            return None
        mark_used(path)
    except (OSError, BuildError) as error:
        logger.warning("a stored program cannot be read: %s", error)
        return None
    return found


def write(key: str, constants: memoryview, record: bytes) -> None:
    """Store a program as the entry of a key, unless it is small or larger than the cache may be.

    Failing to do so is not an error.

    Args:
        key: digest of all that the program depends on but the code that prints it.
        constants: its constants.
        record: everything else, with any content.
    """
    if not SMALLEST_ENTRY <= len(constants) <= config.programs_limit_bytes():
        return
    try:
        path = _path(key)
        make_folder(path.parent)
        length, digests = len(record).to_bytes(LENGTH_BYTES, "little"), []
        with draft_file(path.parent) as (draft, file):
            for piece, _ in _pieces([constants, memoryview(record)]):
                digests.append(hashlib.sha256(piece).digest())
                file.write(piece)
            file.write(length + _joined(digests, length))
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # whatever the umask is: others must not be able to write to it
            place_entry(draft, path)
        evict(path.parent, config.programs_limit_bytes())
    except (OSError, BuildError) as error:
        logger.warning("a program cannot be stored in %s: %s", config.cache_dir(), error)


def known_text(key: str) -> str:
    """Return what `write_text` has stored for a key, or an empty string."""
    try:
        path = _path(key).with_suffix(TEXT_SUFFIX)
        if (content := read_entry(path)) is None:
            return ""
        mark_used(path)
    except (OSError, BuildError):
        return ""
    text, _, digest = content.decode("ascii", "replace").partition(" ")
    return text if digest == _digest_of_text(text) else ""


def write_text(key: str, text: str) -> None:
    """Store the digest of the text of a program that is not used, so that later loads need not print it again.

    Failing to do so is not an error.

    Args:
        key: as for `write`.
        text: digest of the text.
    """
    content = f"{text} {_digest_of_text(text)}".encode()
    if len(content) > config.programs_limit_bytes():
        return
    with contextlib.suppress(OSError, BuildError):
        path = _path(key).with_suffix(TEXT_SUFFIX)
        make_folder(path.parent)
        with draft_file(path.parent) as (draft, file):
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            place_entry(draft, path)
        evict(path.parent, config.programs_limit_bytes())


def _digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_file(number: int, memory: Callable[[int], memoryview]) -> tuple[memoryview, bytes] | None:
    """Return the constants and the record in an open file, or ``None`` if it is damaged."""
    end = os.fstat(number).st_size - LENGTH_BYTES - DIGEST_BYTES
    if end < 0:
        return None
    tail = os.pread(number, LENGTH_BYTES + DIGEST_BYTES, end)
    length, digest = tail[:LENGTH_BYTES], tail[LENGTH_BYTES:]
    record = int.from_bytes(length, "little")
    if record > end:
        return None
    constants, text = memory(end - record), memoryview(bytearray(record))
    places = list(_pieces([constants, text]))
    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        digests = list(pool.map(lambda place: _read_piece(number, *place), places))
    return (constants, bytes(text)) if _joined(digests, length) == digest else None


def _pieces(arrays: Sequence[memoryview]) -> Iterator[tuple[memoryview, int]]:
    """Yield all bytes of arrays in order, a few at a time, and the place of each piece in an entry."""
    first = 0
    for array in arrays:
        for start in range(0, len(array), PIECE_BYTES):
            yield array[start : start + PIECE_BYTES], first + start
        first += len(array)


def _read_piece(number: int, piece: memoryview, start: int) -> bytes:
    """Read a piece of a file and return its digest, which is empty if the file ends before the piece does."""
    rest = piece
    while len(rest) and (count := os.preadv(number, [rest], start + len(piece) - len(rest))):
        rest = rest[count:]
    return hashlib.sha256(piece).digest() if not len(rest) else b""


def _joined(digests: Iterable[bytes], length: bytes) -> bytes:
    """Return the digest of an entry from those of its pieces and the length of its record."""
    return hashlib.sha256(b"".join(digests) + length).digest()


def _path(key: str) -> Path:
    return trusted_folder(FOLDER) / f"{hashlib.sha256(f'{key} {_code()}'.encode()).hexdigest()}{SUFFIX}"


@cache
def _code() -> str:
    """Return the digest of the code that programs depend on."""
    found = hashlib.sha256(config.VERSION.encode())
    package = Path(config.__file__).parent
    for folder in CODE:
        place = package / folder
        for path in [place] if place.suffix else sorted(place.rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()
