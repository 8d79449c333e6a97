"""Weights of exported C that are damaged, cut or forged: a status, whatever the bytes are, and no access outside."""

import ctypes
import hashlib
import mmap
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from intaglio.runtime.export_weights import HEADER, weights_digest
from support import exported_c as c
from support import nets
from support.int8_models import compiled

DRIVER = Path(__file__).parent / "damaged_weights.c"
SANITIZE = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
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


def sanitized(folder: Path) -> Path:
    """The driver with the sources of the export, compiled once with sanitizers."""
    work = folder / "sanitized"
    if not (work / "driver").exists():
        compiler = sanitizing_compiler(folder)
        shutil.copytree(folder / "kernels", work / "kernels")
        name = next(folder.glob("*.h")).stem
        for source in (folder / f"{name}.h", folder / f"{name}.cpp"):
            shutil.copy(source, work)
        text = re.sub(r"\bNET(?=_)", name.upper(), re.sub(r"\bnet(?=_|\.h)", name, DRIVER.read_text()))
        (work / "driver.c").write_text(text)
        flags = re.search(r'^    FLAGS="(.*)"$', (folder / "README.txt").read_text(), re.MULTILINE)[1]
        cpp = f"{flags} {SANITIZE} -fno-exceptions -fno-rtti -Wl,--as-needed"
        sources = " ".join(sorted(str(path.relative_to(work)) for path in (work / "kernels").glob("portable*.[cs]*")))
        lines = [f"{compiler} {flags} {SANITIZE} -c driver.c", f"{compiler} {cpp} -c {name}.cpp {sources}"]
        lines += [f"{compiler} {SANITIZE} -pthread *.o -o driver"]
        subprocess.run(["sh", "-ec", "\n".join(lines)], cwd=work, check=True)
    return work / "driver"


def sanitizing_compiler(folder: Path) -> str:
    """gcc or clang, if it has the libraries of its sanitizers."""
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    for compiler in ("gcc", "clang"):
        command = f"{compiler} {SANITIZE} empty.c -o empty && ./empty"
        if subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True).returncode == 0:
            return compiler
    pytest.skip("no compiler has AddressSanitizer")
