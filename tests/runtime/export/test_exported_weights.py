"""Weights of exported C that are damaged, cut or forged: a status, whatever the bytes are, and no access outside."""

import ctypes
import hashlib
import mmap
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from intaglio.runtime.export_weights import HEADER, weights_digest
from support import exported_c as c
from support import nets
from support.damaged_weights import sanitized
from support.int8_models import compiled

MUTATIONS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The export of a small network with its library."""
    found = tmp_path_factory.mktemp("weights")
    compiled(nets.Linears)[0].export_c(found, isa="portable")
    c.build(found)
    return found


@pytest.fixture
def status(folder) -> Callable[[bytes], int]:
    """The status of opening these bytes."""
    library = c.Library(next(folder.glob("lib*.so")))

    def opened(content: bytes) -> int:
        memory, handle = mmap.mmap(-1, max(len(content), 1)), c.P(1)
        memory[: len(content)] = content
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        found = library.open_memory(start, len(content), ctypes.byref(handle))
        assert bool(handle) is (found == c.OK)
        library.close(handle)
        return found

    return opened


def test_the_program_knows_the_digest_of_the_whole_file(folder):
    content = (folder / "weights.bin").read_bytes()
    text = (folder / "kernels" / "description.h").read_text()
    known = re.search(r"kWeightsDigest\[32\] = \{(.*?)\}", text, re.DOTALL)[1]
    assert bytes(int(byte, 16) for byte in known.split(",")) == weights_digest(content)
    assert weights_digest(content) == hashlib.blake2b(content, digest_size=32).digest()


def test_every_changed_bit_of_the_file_is_found(folder, status):
    content = (folder / "weights.bin").read_bytes()
    for position in range(0, len(content), 7):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        assert status(bytes(changed)) in (c.FOREIGN, c.DAMAGED), position
    assert status(content) == c.OK


def test_two_changed_highest_bits_are_found(folder, status):
    content = (folder / "weights.bin").read_bytes()
    generator = np.random.default_rng(0)
    for first, second in generator.integers(HEADER.size // 8, len(content) // 8, (MUTATIONS, 2)):
        changed = bytearray(content)
        changed[8 * first + 7] ^= 0x80
        changed[8 * second + 7] ^= 0x80
        assert status(bytes(changed)) == (c.OK if first == second else c.DAMAGED)


def test_forged_sizes_are_a_status(folder, status):
    content = (folder / "weights.bin").read_bytes()
    magic, version, key, size = HEADER.unpack_from(content)
    assert size == len(content)
    for forged in (HEADER.size, len(content) // 128 * 64, len(content) + 64):
        changed = bytearray(content[:forged].ljust(forged, b"\0"))
        HEADER.pack_into(changed, 0, magic, version, key, forged)
        assert status(bytes(changed)) == c.DAMAGED


def test_a_pointer_is_null_after_every_open_that_fails(folder, tmp_path):
    library = c.Library(next(folder.glob("lib*.so")))
    os.mkfifo(tmp_path / "pipe")
    for path, expected in ((None, c.ARGUMENT), (b"missing", c.FILE), (str(tmp_path / "pipe").encode(), c.FILE)):
        handle = c.P(1)
        assert library.open(path, ctypes.byref(handle)) == expected
        assert not handle
    handle = c.P(1)
    assert library.open_memory(None, 64, ctypes.byref(handle)) == c.ARGUMENT
    assert not handle


@pytest.mark.slow(reason="compiles the export with sanitizers")
@pytest.mark.parametrize("seed", range(4))
def test_damaged_weights_are_never_read_outside(seed, folder, tmp_path):
    (line,) = subprocess.run(
        [sanitized(folder), folder / "weights.bin", "5000", str(seed)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    opened, unchanged = map(int, re.findall(r"\d+", line))
    assert opened == unchanged >= 1
