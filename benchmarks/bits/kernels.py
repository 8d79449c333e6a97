"""The machine code of a program's microkernels, and what an exported program computes.

Kernels are told apart by the name of their symbol; their bytes are read from object files, with all that a linker fills
in set to zero, so that neither comments nor the order of kernels nor the file that holds them matters.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

SYMBOLS, RELOCATIONS, EXECUTABLE, FUNCTION = 2, 4, 4, 2
WIDE = (1, 24, 25)
"""Relocations of eight bytes (absolute, or from here to there); all others of x86-64 code have four."""
OWN = re.compile(r"_(run|plan)$|^main$")
"""C functions of a program that are no kernels."""
U8 = 1
"""Code of bytes in an exported header."""


def build(folder: Path, only_kernels: bool = False) -> list[Path]:
    """Compile an exported folder by the commands of its README; return the object files of its kernels."""
    text = (folder / "README.txt").read_text()
    lines = [line.strip() for line in re.findall(r"^    (?:FLAGS=|gcc ).*$", text, re.MULTILINE)]
    lines = [line for line in lines if line.startswith("FLAGS=") or " -c " in line]
    if only_kernels:  # kernels are assembler: how the rest is optimized does not touch them
        lines = [line.replace("-O3", "-O0") for line in lines if "FLAGS=" in line or "-c kernels/" in line]
    subprocess.run(["sh", "-ec", "\n".join(lines).replace("gcc ", "gcc -w ")], cwd=folder, check=True)
    name = next(folder.glob("*.h")).stem
    return sorted(path for path in folder.glob("*.o") if path.stem not in (name, "main"))


def kernels(objects: Sequence[Path]) -> dict[str, str]:
    """Return the digest of every kernel's bytes in object files by the name of its symbol."""
    return {name: _digest(code) for path in objects for name, code in _functions(path.read_bytes())}


def weights(folder: Path) -> str:
    """Return the digest of the packed constants, without the header of their file."""
    return _digest((folder / "weights.bin").read_bytes()[64:])


def run(folder: Path, inputs: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Run the exported program that `build` compiled; ``like`` gives shapes and types of the results."""
    name = next(folder.glob("*.h")).stem
    path = folder / f"lib{name}.so"
    if not path.exists():
        command = f"gcc -shared -pthread {name}.o $(ls *.o | grep -v -e ^main.o -e ^{name}.o) -o {path.name}"
        subprocess.run(["sh", "-ec", command], cwd=folder, check=True)
    library, handle, pointer = ctypes.CDLL(str(path)), ctypes.c_void_p(), ctypes.c_void_p

    def call(function: str, *arguments: object) -> None:
        if status := getattr(library, f"{name}_{function}")(*arguments):
            raise RuntimeError(f"{name}_{function}: status {status}")

    call("open", str(folder / "weights.bin").encode(), ctypes.byref(handle))
    sizes = [(ctypes.c_int64 * max(tensor.dim(), 1))(*tensor.shape) for tensor in inputs]
    call("resize", handle, (pointer * (len(sizes) + 1))(*[ctypes.addressof(size) for size in sizes]))
    for index, tensor in enumerate(inputs):
        if tensor.dtype is torch.uint8:
            strides = (ctypes.c_int64 * tensor.dim())(*tensor.stride())
            call("read_as", handle, index, U8, strides)
    results = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in like]
    given, made = ((pointer * (len(ts) + 1))(*[t.data_ptr() for t in ts]) for ts in (inputs, results))
    call("run", handle, given, made, 2)
    library[f"{name}_close"](handle)
    return results


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _functions(image: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of the functions of an ELF object that a C++ compiler did not name."""
    start, count, names_at = struct.unpack_from("<Q", image, 40)[0], *struct.unpack_from("<HH", image, 60)
    # Of each section: name, type, flags, address, offset, size, link, info, alignment, size of an entry.
    sections = [list(struct.unpack_from("<IIQQQQIIQQ", image, start + 64 * index)) for index in range(count)]
    content = [bytearray(image[offset : offset + size]) for _, _, _, _, offset, size, *_ in sections]
    assert 0 <= names_at < count, "a damaged object file"
    for index, (_, kind, *_, info, _, _) in enumerate(sections):
        if kind == RELOCATIONS:
            for offset, type_ in struct.iter_unpack("<QI12x", content[index]):
                width = 8 if type_ in WIDE else 4
                content[info][offset : offset + width] = bytes(width)
    for index, (_, kind, *_, link, _, _, _) in enumerate(sections):
        if kind != SYMBOLS:
            continue
        for name_at, what, _, home, value, size in struct.iter_unpack("<IBBHQQ", content[index]):
            name = bytes(content[link][name_at : content[link].index(0, name_at)]).decode()
            code = home and home < count and sections[home][2] & EXECUTABLE
            if code and what & 15 == FUNCTION and size and not name.startswith("_Z") and not OWN.search(name):
                yield name, bytes(content[home][value : value + size])
