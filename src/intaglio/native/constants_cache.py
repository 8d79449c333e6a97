"""The packed constants of models that were loaded before, in the cache folder.

An entry holds the weights of a program as its kernels read them, and behind them the SHA-256 of the SHA-256 of their
pieces, which threads read and hash side by side. Its key is a digest of the weights in the model file, of the layout,
and of the code that packs them. A loaded model then reads its constants instead of decoding and packing its weights
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from intaglio import config
from intaglio.drafts import draft_file
from intaglio.errors import BuildError
from intaglio.native.cache_folder import evict, make_folder, open_entry, trusted_folder

FOLDER, SUFFIX = "constants", ".constants"
DIGEST_BYTES = hashlib.sha256().digest_size
SMALLEST_ENTRY = 1 << 20
"""Bytes of constants from which they are stored. Smaller ones are packed in some milliseconds."""
CODE = ("codegen", "ir", "kernels", "native/constants_cache.py", "numerics", "plan", "runtime/saved")
"""Folders and files with the code that entries depend on."""
PIECE_BYTES = 1 << 22
"""Bytes whose digest one thread computes."""
MOST_THREADS = 8
"""Threads that read an entry, at most."""

logger = logging.getLogger("intaglio")


class ConstantsCache:
    """The store of packed constants that `codegen.emit` uses. Failing to read or write an entry is not an error."""

    def read(self, key: str, arrays: Sequence[memoryview]) -> bool:
        """Fill arrays with the entry of a key. Return whether there is an intact one of their sizes."""
        size = sum(map(len, arrays))
        if size < SMALLEST_ENTRY:
            return False
        try:
            path = _path(key)
            if (file := open_entry(path)) is None:
                return False
            with file:
                if os.fstat(file.fileno()).st_size != size + DIGEST_BYTES:
                    return False
                places, number = list(_pieces(arrays)), file.fileno()
                with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
                    digests = list(pool.map(lambda place: _read_piece(number, *place), places))
                if os.pread(number, DIGEST_BYTES, size) != _joined(digests):
                    logger.warning("%s is damaged: the weights are packed again", path)
                    return False
            with contextlib.suppress(OSError):  # marks the entry as recently used; a read-only cache still works
                os.utime(path)
        except (OSError, BuildError) as error:
            logger.warning("packed weights cannot be read: %s", error)
            return False
        return True

    def write(self, key: str, arrays: Sequence[memoryview]) -> None:
        """Store arrays as the entry of a key, unless they are small or larger than the cache may be."""
        if not SMALLEST_ENTRY <= sum(map(len, arrays)) <= config.constants_limit_bytes():
            return
        try:
            path = _path(key)
            make_folder(path.parent)
            with draft_file(path.parent) as (draft, file):
                digests = []
                for piece, _ in _pieces(arrays):
                    digests.append(hashlib.sha256(piece).digest())
                    file.write(piece)
                file.write(_joined(digests))
                file.flush()
                os.fchmod(file.fileno(), 0o644)  # whatever the umask is: others must not be able to write to it
                os.replace(draft, path)
            evict(path.parent, config.constants_limit_bytes())
        except (OSError, BuildError) as error:
            logger.warning("packed weights cannot be saved in %s: %s", config.cache_dir(), error)


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


def _joined(digests: Iterable[bytes]) -> bytes:
    """Return the digest of an entry from those of its pieces."""
    return hashlib.sha256(b"".join(digests)).digest()


def _path(key: str) -> Path:
    return trusted_folder(FOLDER) / f"{hashlib.sha256(f'{key} {_code()}'.encode()).hexdigest()}{SUFFIX}"


@cache
def _code() -> str:
    """Return the digest of the code that packed constants depend on."""
    found = hashlib.sha256(config.VERSION.encode())
    package = Path(config.__file__).parent
    for folder in CODE:
        place = package / folder
        for path in [place] if place.suffix else sorted(place.rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()
