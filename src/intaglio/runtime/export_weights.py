"""The weights file of exported C: a header, then the constants for every instruction set.

The exported program contains the size and the digest of the file, so it takes exactly the bytes that were exported with
it: neither damaged nor forged weights are opened.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

WEIGHTS_VERSION = 2
BLOB_ALIGNMENT = 64
HEADER = struct.Struct("<8s3Q32x")
"""``Header`` in net.cpp: magic, version, key of the export, size of the file in bytes."""

PADDING_BYTES = 64
"""Bytes after the last constant that vector loads may read."""


def array_offsets(arrays: Sequence[np.ndarray]) -> list[int]:
    """Return the offset of each array in the file, and the end of the last one."""
    return list(accumulate((_aligned_size(array.nbytes) for array in arrays), initial=_aligned_size(HEADER.size)))


def _aligned_size(size: int) -> int:
    return -(-size // BLOB_ALIGNMENT) * BLOB_ALIGNMENT


def weights_file(arrays: Sequence[np.ndarray]) -> bytes:
    """Return the contents of weights.bin: the header, then the arrays at aligned offsets."""
    starts = array_offsets(arrays)
    content = bytearray(starts[-1] + PADDING_BYTES)
    for start, array in zip(starts, arrays, strict=False):
        content[start : start + array.nbytes] = array.tobytes()
    key = int.from_bytes(weights_digest(content)[:8], "little")
    HEADER.pack_into(content, 0, b"intaglio", WEIGHTS_VERSION, key, len(content))
    return bytes(content)


def weights_digest(content: bytes | bytearray) -> bytes:
    """Return the digest of a weights file, header included: 32 bytes of BLAKE2b."""
    return hashlib.blake2b(content, digest_size=32).digest()
